#!/usr/bin/env python3
"""Instructions per token, counted by callgrind and held against instruction_counts.json.

  benchmarks/instruction_counts.py build/release/benchmarks/instruction_counts            compare
  benchmarks/instruction_counts.py build/release/benchmarks/instruction_counts --update   record

A count does not depend on load or clock, so it tells a lost inlining or a spilled register from noise. It does depend
on the compiler and on Eigen: the table has an entry for each pair that was recorded, and there is nothing to compare
with under another one. More than 2 % off, either way, fails: an improvement is recorded, too, or the next loss hides in
it. The table changes in the commit that changes the counts, and that commit's message says why they changed.

Exits with 0 when all counts agree or were recorded, 1 when not, 77 when nothing was compared.
"""
import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

# One instruction more per row of S is 2 to 4 % of most cases. Counts of one binary repeat exactly; one compiler version
# packaged elsewhere, with other defaults, came within 0.2 %.
SLACK = 0.02
SKIPPED = 77
TABLE = pathlib.Path(__file__).with_suffix(".json")


def skip(reason):
    print("skipped:", reason)
    sys.exit(SKIPPED)


def count(program, cases):
    """{case: instructions a token}; callgrind writes one part between each count_begin and count_end."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "part")
        command = ["valgrind", "--tool=callgrind", "--zero-before=count_begin", "--dump-before=count_end",
                   f"--callgrind-out-file={out}", program]
        run = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if run.returncode != 0:
            sys.exit(run.stderr)
        counts = {}
        for number, case in enumerate(cases, start=1):
            part = pathlib.Path(f"{out}.{number}").read_text()
            assert "Trigger: --dump-before=count_end" in part, f"{case}: no count"
            tokens = int(re.search(r"/N:(\d+)/", case)[1])
            counts[case] = round(int(re.search(r"^summary: (\d+)", part, re.MULTILINE)[1]) / tokens, 1)
    return counts


def differences(counts, recorded):
    for case in sorted(counts.keys() | recorded.keys()):
        if case not in recorded:
            yield f"{case}: not in the table"
        elif case not in counts:
            yield f"{case}: in the table, but not counted"
        elif abs(counts[case] / recorded[case] - 1) > SLACK:
            yield f"{case}: {counts[case]} instructions a token, {counts[case] / recorded[case] - 1:+.1%}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--update", action="store_true", help="record the counts in instruction_counts.json")
    arguments = parser.parse_args()

    if not shutil.which("valgrind"):
        skip("valgrind is not installed")
    if not {"avx2", "bmi2", "fma"} <= set(pathlib.Path("/proc/cpuinfo").read_text().split()):
        skip("this processor cannot run x86-64-v3 code")
    compiler, *cases = subprocess.run([arguments.program], stdout=subprocess.PIPE, text=True,
                                      check=True).stdout.splitlines()
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if compiler not in table and not arguments.update:
        skip(f"no counts recorded for {compiler}; there are some for {'; '.join(sorted(table))}")

    counts = count(arguments.program, cases)
    different = list(differences(counts, table.get(compiler, {})))
    print(*different, sep="\n", end="\n" if different else "")
    if arguments.update:
        table[compiler] = counts
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    print(f"{compiler}: {len(counts)} cases, {len(different)} differ,", "recorded" if arguments.update else "compared")
    sys.exit(1 if different and not arguments.update else 0)


main()
