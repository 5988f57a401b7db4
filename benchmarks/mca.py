#!/usr/bin/env python3
"""How much of its time does the causal kernel's inner loop need for its multiply-adds alone? llvm-mca's forecast.

  benchmarks/mca.py            print
  benchmarks/mca.py --check    compare with mca.json
  benchmarks/mca.py --update   record in mca.json

For processors that are not at hand: forward_causal (float, identity map, sizes at run time and D = M = 64 fixed) is
compiled for each, and its inner loop goes through llvm-mca, which runs it on the compiler's own model of the processor.
The share is the cycles the multiply-adds need, were they alone, of the cycles forecast: what is missing to 1 is what
loads, stores and bookkeeping cost. Every load hits L1, no branch misses, and what surrounds the loop is free.

A forecast is as good as its model. The znver4 model charges a broadcast load to a multiply-add unit and forecasts 0.67
where detail/kernel.hpp states 0.94 and more, measured. The neoverse-n1 model dispatches three micro-operations a cycle,
of which a load with a scaled index is two and the store of a pair six; it had eight when it was first written, so there
is a line for that, too. apple-m1 is described by the Cyclone of 2013, with three vector units instead of four;
neoverse-v2 has the four. (LLVM 14 would describe neoverse-n1 by the Cortex-A57: hence a newer one.)

Exits with 0 when all forecasts agree or were recorded, 1 when not, 77 when nothing was compared.
"""
import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys

MCA = "llvm-mca-22"
SKIPPED = 77
# The tools are deterministic: this is one unit in the last of the digits that are recorded.
SLACK = 0.001
ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = pathlib.Path(__file__).with_suffix(".json")

# Compiler, its flags, and the models with their multiply-adds of a packet's width a cycle.
NEOVERSE = {"neoverse-n1": 2, "neoverse-n1 -dispatch=8": 2, "neoverse-v2": 4}
BUILDS = [
    ("aarch64-linux-gnu-g++", ["-mcpu=neoverse-n1"], NEOVERSE),
    ("clang++-22", ["--target=aarch64-linux-gnu", "-mcpu=neoverse-n1"], NEOVERSE),
    ("clang++-22", ["--target=aarch64-linux-gnu", "-mcpu=apple-m1"], {"apple-m1": 3}),
    ("g++", ["-march=x86-64-v3"], {"znver3": 2}),
    ("g++", ["-march=x86-64-v4"], {"znver4": 1, "skylake-avx512": 2}),
]
FLAGS = ["-std=c++20", "-O3", "-DNDEBUG", f"-I{ROOT}/include", "-isystem", "/usr/include/eigen3"]
SIZES = {"any size": "", "D = M = 64": ", 64, 64, 1"}
SOURCE = """
#include <linattn/linattn.hpp>
using attention = linattn::linear_attention<linattn::identity, linattn::additive, float%s>;
void causal(const attention& a, attention::input x, attention::output out, attention::workspace_type& ws) {
  a.forward_causal(x, x, x, out, ws);
}
"""


def output(command, text=""):
    run = subprocess.run(command, input=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)}:\n{run.stderr}")
    return run.stdout


def version(tool):
    return re.search(r"\d+\.\d+\.\d+", output([tool, "--version"]))[0]


def is_fma(instruction):
    return re.match(r"fmla|vfmadd", instruction) is not None


def is_broadcast(instruction):
    return re.search(r"^ld1r|^dup|\.s\[|^vbroadcast|\{1to", instruction) is not None


def innermost_loops(assembly):
    """The instructions from each label to a branch back to it with no other label, branch or call between."""
    label, body = None, []
    for line in assembly.splitlines():
        line = line.split("//")[0].strip()
        if found := re.match(r"([\w.$]+):", line):
            label, body = found[1], []
        elif line and not line.startswith((".", "#")):
            body.append(line)
            target = re.search(r"\s(\.L\w+)$", line)
            if target and target[1] == label:
                yield body
            if target or re.match(r"(bl|call|ret|jmp|b)\b", line):
                label, body = None, []


def inner_loop(assembly):
    """The one with the most multiply-adds of those that broadcast: a feature times a row of the state."""
    loops = [loop for loop in innermost_loops(assembly) if any(map(is_broadcast, loop))]
    return max(loops, key=lambda loop: sum(map(is_fma, loop)))


def forecast(loop, model, triple):
    """Cycles an iteration."""
    report = json.loads(output([MCA, f"-mtriple={triple}", *f"-mcpu={model}".split(), "-iterations=1000", "-json"],
                               "\n".join(loop) + "\n"))
    summary = report["CodeRegions"][0]["SummaryView"]
    return summary["TotalCycles"] / summary["Iterations"]


def forecasts():
    results = {}
    for compiler, flags, models in BUILDS:
        if not shutil.which(compiler):
            print(f"skipped: {compiler} is not installed")
            continue
        name = f"{'Clang' if 'clang' in compiler else 'GNU'} {version(compiler)}"
        triple = "x86_64" if "-march" in flags[0] else "aarch64"
        for sizes, arguments in SIZES.items():
            assembly = output([compiler, *FLAGS, *flags, "-S", "-o-", "-xc++", "-"], SOURCE % arguments)
            loop = inner_loop(assembly)
            fmas = sum(map(is_fma, loop))
            for model, units in models.items():
                cycles = forecast(loop, model, triple)
                results[f"{model}: {name} {flags[-1]}, {sizes}"] = {
                    "multiply_adds": fmas, "instructions": len(loop), "cycles": round(cycles, 2),
                    "share": round(fmas / units / cycles, 3)}
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with mca.json")
    parser.add_argument("--update", action="store_true", help="record in mca.json")
    arguments = parser.parse_args()
    if not shutil.which(MCA):
        print(f"skipped: {MCA} is not installed")
        sys.exit(SKIPPED)

    results = forecasts()
    tool = f"llvm-mca {version(MCA)}"
    for case, result in results.items():
        print(f"{result['share']:.2f}  {case}: {result['multiply_adds']} of {result['instructions']} instructions, "
              f"{result['cycles']} cycles")
    if arguments.update:
        TABLE.write_text(json.dumps({tool: results}, indent=1) + "\n")
    if arguments.check:
        recorded = json.loads(TABLE.read_text()).get(tool, {})
        common = results.keys() & recorded.keys()
        different = [case for case in sorted(common)
                     if abs(results[case]["share"] - recorded[case]["share"]) > SLACK]
        for case in different:
            print(f"{case}: the share was {recorded[case]['share']}, is {results[case]['share']}")
        print(f"{tool}: {len(common)} of {len(results)} compared, {len(different)} differ")
        sys.exit(1 if different else 0 if common else SKIPPED)


main()
