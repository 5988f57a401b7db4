#!/usr/bin/env python3
"""linattn beside other implementations of the same equations, in tables.

  benchmarks/peers/run.py            builds, compares outputs, measures in three minutes or so, prints Markdown
  benchmarks/peers/run.py --readme   writes it into README.md between its marks, too
  benchmarks/peers/run.py --quick    two rounds: does everything work?

The peers are ONNX Runtime's operator LinearAttention on the CPU (needs node and npm, `npm install` in this folder, and
python3-onnx), and the per-token loop of the 2020 paper (paper_loop.hpp; needs OpenMP). What is missing is said, and the
rest printed. A peer whose outputs differ from linattn's is an error, not a row.

Every round gives each its turn, in processes that wait for each other; figures are medians over rounds. They are the
wall clock's, but for the loop and what is beside it on one thread, and mean something where nobody else has work for
the cores.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "release"
PROGRAMS = BUILD / "benchmarks" / "peers"
sys.path.insert(0, str(HERE.parent))
sys.dont_write_bytecode = True
from charts import README, between_marks, number, processor, table_of  # pylint: disable=wrong-import-position

RULES = ("linear", "gated", "gated_per_feature", "delta", "gated_delta", "gated_delta_per_feature")
SHAPES = {"prefill": (8, 4096), "decode": (16, 64)}  # H, and N tokens of input
DIMENSIONS = (64, 128)
SECONDS = 0.05  # of a turn, or one call
REST = 0.05  # of threads that wait actively after a call
BUSY = 1.2  # a thread's seconds by the wall clock for one of CPU time: above, others had the cores


class Missing(Exception):
    """What this machine has not, and where it is found."""


def build():
    subprocess.run(["cmake", "--preset", "release"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(BUILD), "--target", "linattn_peers"], check=True, stdout=sys.stderr)


# ---- ONNX Runtime ----------------------------------------------------------------------------------------------------


class Partner:
    """A process that answers a line with a line."""

    def __init__(self, *command):
        self.process = subprocess.Popen(command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        reply = self.process.stdout.readline().strip()
        if not reply or reply.startswith("error"):
            sys.exit(f"{self.process.args[-1]}: {' '.join(map(str, words))}: {reply or 'it ended'}")
        return reply

    def numbers(self, *words):
        return [float(x) for x in self.ask(*words).split()]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()


def write_models(folder):
    """By the first interpreter that has python3-onnx: Debian's need not be the one that runs this."""
    heads = [str(h) for h, _ in SHAPES.values()]
    for python in dict.fromkeys((sys.executable, "/usr/bin/python3")):
        if subprocess.run([python, "-c", "import onnx"], stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return subprocess.run([python, str(HERE / "onnx_models.py"), folder, *heads], check=True)
    raise Missing("python3-onnx (Debian's package of that name)")


def require_onnx_runtime():
    if not shutil.which("node"):
        raise Missing("node (nodejs and npm on Debian)")
    found = subprocess.run(["node", "-e", "require.resolve('onnxruntime-node')"], cwd=HERE, stderr=subprocess.DEVNULL,
                           check=False)
    if found.returncode:
        raise Missing(f"onnxruntime-node (npm install --prefix {HERE.relative_to(ROOT)})")


def prepare(ours, theirs, *case):
    """Inputs drawn, and outputs of both compared. Useful flops of a call, and the largest difference."""
    flops, = ours.numbers("prepare", *case)
    theirs.ask("prepare", *case)
    theirs.ask("outputs")
    return flops, max(ours.numbers("compare"))


def measure(ours, theirs, form, rule, d, h, threads, folder, rounds):
    """Seconds of a call, of each: the peer, linattn's operator and, of one token, its form of the peer's."""
    n = SHAPES[form][1]
    flops, difference = prepare(ours, theirs, form, rule, d, h, n, threads, folder)
    ways = ("operator", "onnx") if form == "decode" and threads == 1 else ("operator",)
    samples = {way: [] for way in ways}
    peak = 0
    for _ in range(rounds):
        peak = max(peak, *ours.numbers("peak"))
        theirs.ask("time", SECONDS)
        if threads > 1:
            time.sleep(REST)
        for way in ways:
            samples[way].append(ours.numbers("time", way, SECONDS))
    row = {way: statistics.median(wall for wall, _ in sample) for way, sample in samples.items()}
    row["peer"] = statistics.median(theirs.numbers("finish"))
    # Of long calls alone: the median of short ones does not see that others had the core.
    judges = form == "prefill" and h % threads == 0  # every thread as much work
    busy = statistics.median(wall * threads / cpu for wall, cpu in samples["operator"]) if judges else 0
    return row | {"flops": flops, "peak": peak, "busy": busy, "difference": difference}


def onnx_runtime(rounds, threads):
    require_onnx_runtime()
    rows = {}
    with tempfile.TemporaryDirectory() as folder, Partner(str(PROGRAMS / "onnx_operator")) as ours, \
            Partner("node", str(HERE / "onnx_runtime.js")) as theirs:
        write_models(folder)
        version = theirs.ask("version")
        counts = list(dict.fromkeys((1, threads)))
        for form, (h, _) in SHAPES.items():
            for d in DIMENSIONS:
                for rule in RULES:
                    print(f"{form} {rule} D = {d}", file=sys.stderr)
                    for t in counts:
                        rows[form, d, rule, t] = measure(ours, theirs, form, rule, d, h, t, folder, rounds)
    return {"version": version, "rows": rows}


# ---- the paper's loop ------------------------------------------------------------------------------------------------


def paper_loop(rounds):
    program = PROGRAMS / "bench_paper_loop"
    if not program.exists():
        raise Missing("OpenMP for the compiler in use")
    print(program.name, file=sys.stderr)
    run = subprocess.run([str(program), "--benchmark_format=json", f"--benchmark_min_time={SECONDS}",
                          f"--benchmark_repetitions={rounds}", "--benchmark_enable_random_interleaving=true",
                          "--benchmark_report_aggregates_only=true"], stdout=subprocess.PIPE, check=False, text=True)
    if run.returncode:
        sys.exit(f"{program.name} failed")
    result = json.loads(run.stdout)
    rows = {}
    for row in result["benchmarks"]:
        if row["aggregate_name"] == "median":
            name, *arguments = row["run_name"].split("/")
            d, threads = (int(argument.split(":")[1]) for argument in arguments[:2])
            rows[name, d, threads] = row
    return {"compiler": result["context"]["compiler"], "rows": rows}


# ---- tables ----------------------------------------------------------------------------------------------------------


def times(x, base):
    return f"{x / base:.2g}" if x < 10 * base else f"{x / base:.0f}"


def threads_title(threads):
    return "1 thread" if threads == 1 else f"{threads} threads"


CASES = [(rule, d) for d in DIMENSIONS for rule in RULES]
VERBS = {"prefill": "forward_causal", "decode": "step"}


def case_name(rule, d):
    return f"`{rule.removesuffix('_per_feature')}`" + (", per feature" if "per_feature" in rule else "") + f", D = {d}"


def prefill_table(rows, counts):
    h, n = SHAPES["prefill"]
    table = [[f"`forward_causal`, N = {n:,}, H = {h}, ms"]]
    for t in counts:
        table[0] += [f"ONNX Runtime, {threads_title(t)}", "linattn", "times", *(["of peak"] if t == 1 else [])]
    for rule, d in CASES:
        table.append([case_name(rule, d)])
        for t in counts:
            x = rows["prefill", d, rule, t]
            table[-1] += [number(1e3 * x["peer"]), number(1e3 * x["operator"]), times(x["peer"], x["operator"])]
            if t == 1:
                table[-1].append(" / ".join(f"{x['flops'] / x[way] / x['peak']:.2f}" for way in ("peer", "operator")))
    return table_of(table)


def decode_table(rows, counts):
    table = [[f"`step`, H = {SHAPES['decode'][0]}, microseconds"]]
    for t in counts:
        table[0] += [f"ONNX Runtime, {threads_title(t)}", "linattn", "times",
                     *(["`onnx::linear_attention`", "times"] if t == 1 else [])]
    for rule, d in CASES:
        table.append([case_name(rule, d)])
        for t in counts:
            x = rows["decode", d, rule, t]
            table[-1].append(number(1e6 * x["peer"]))
            for way in ("operator", "onnx"):
                table[-1] += [number(1e6 * x[way]), times(x["peer"], x[way])] if way in x else []
    return table_of(table)


def ahead(rows, counts):
    """Where the peer is, in words."""
    found = []
    for form, verb in VERBS.items():
        for way, title in (("operator", verb), ("onnx", "onnx::linear_attention")):
            for t in counts:
                row_of = {case_name(rule, d): rows[form, d, rule, t] for rule, d in CASES}
                won = [name for name, x in row_of.items() if way in x and x["peer"] < x[way]]
                if won:
                    where = "in every row" if len(won) == len(CASES) else f"in {'; '.join(won)}"
                    found.append(f"of `{title}`, {form}, on {threads_title(t)} {where}")
    return ", and ".join(found) or "in none of these rows"


def onnx_paragraphs(data):
    if isinstance(data, Missing):
        return [f"Not compared with ONNX Runtime, for want of {data}."]
    rows = data["rows"]
    counts = sorted({t for *_, t in rows})
    difference = max(row["difference"] for row in rows.values())
    return [
        f"""**ONNX Runtime** {data['version']} (`onnxruntime-node`, CPU provider), operator LinearAttention of
        com.microsoft. The same tensors, (1, N, H D), go to both, float, D = M, queries scaled by 1/sqrt(D), no feature
        map, no normaliser; outputs and states differ by {difference:.1g} at most.""",
        prefill_table(rows, counts),
        decode_table(rows, counts),
        f"""ONNX Runtime is ahead {ahead(rows, counts)}. Its kernel goes token by token, heads over threads. Its state
        is an input and an output, copied by every call; so it is for `onnx::linear_attention`, linattn's form of the
        operator, which also makes a state and a workspace a call, while `step` updates a state in place. Its times are
        those of the operator by its own profiler, in whole microseconds, without the runtime and JavaScript around it.
        It takes half precision on other devices only, linattn's operator on the CPU, too.""",
    ]


def loop_paragraphs(data):
    if isinstance(data, Missing):
        return [f"Not compared with the paper's loop, for want of {data}."]

    def figure(name, d, t):
        row = data["rows"][name, d, t]
        assert row["time_unit"] == "ms"
        return row["cpu_time" if t == 1 else "real_time"]

    rows = [["causal, N = 4,096, H = 8, ms"]]
    dimensions = sorted({d for _, d, _ in data["rows"]})
    counts = sorted({t for _, _, t in data["rows"]})
    rows[0] += [f"D = M = {d}, {threads_title(t)}" for t in counts for d in dimensions]
    titles = {"BM_loop": "the paper's loop: features in, no normaliser", "BM_product": "linattn, the same",
              "BM_attention": "linattn, elu + 1 and normaliser included"}
    for name, title in titles.items():
        rows.append([title] + [number(figure(name, d, t)) for t in counts for d in dimensions])
    rows.append(["times, of the same"] + [times(figure("BM_loop", d, t), figure("BM_product", d, t))
                                         for t in counts for d in dimensions])
    peak = [" / ".join(f"{data['rows'][name, d, 1]['peak_fraction']:.2f}" for name in ("BM_loop", "BM_product"))
            for d in dimensions]
    rows.append(["of peak, loop / linattn"] + peak + [""] * (len(rows[0]) - 1 - len(peak)))
    won = [f"D = {d} on {threads_title(t)}" for t in counts for d in dimensions
           if figure("BM_loop", d, t) < figure("BM_product", d, t)]
    return [
        """**The 2020 paper's loop**, as its algorithm 1 states it (S += k v^T, then out = q S, token by token, float,
        heads over OpenMP's threads), written from the description in
        [paper_loop.hpp](benchmarks/peers/paper_loop.hpp) and built with the same flags as linattn.""",
        table_of(rows),
        f"""Both on the loop's layout, (H, N, D). The loop takes phi(q) and phi(k) and leaves the denominators to the
        framework around it, whose passes over the tensors are not counted here. Its outputs are the same to 1e-5; it is
        ahead in {'; '.join(won) or 'none of these columns'}.""",
    ]


def paragraphs(onnx, loop):
    compiler = loop["compiler"] if isinstance(loop, dict) else "the compiler of build/release"
    version = ".".join(re.findall(r"#define LINATTN_VERSION_\w+ (\d+)",
                                  (ROOT / "include/linattn/version.hpp").read_text()))
    text = onnx_paragraphs(onnx) + loop_paragraphs(loop)
    text.append(f"""linattn {version}, {processor()}, {compiler}, `-O3 -march=native`; medians of interleaved
                repetitions, by the wall clock, but for the loop's table on one thread, which is CPU time; peak of FMA
                instructions and useful flops as above. All of it is the output of `benchmarks/peers/run.py`.""")
    if busyness(onnx) > BUSY:
        text.append(f"""**The machine was busy**: the wall clock's figures mean little, as it went on by
                    {busyness(onnx):.1f} times a thread's CPU time.""")
    return text


def busyness(onnx):
    """A thread's seconds by the wall clock for one of CPU time, of linattn: of the number of threads that had to wait
    longer."""
    if isinstance(onnx, Missing):
        return 1
    counts = {t for *_, t in onnx["rows"]}
    seconds = ([row["busy"] for (*_, t), row in onnx["rows"].items() if t == count and row["busy"]] for count in counts)
    return max(statistics.median(each) for each in seconds if each)


def attempt(what, *arguments):
    try:
        return what(*arguments)
    except Missing as missing:
        print(f"missing: {missing}", file=sys.stderr)
        return missing


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true", help="write the tables into README.md, too")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    arguments = parser.parse_args()
    if arguments.quick and arguments.readme:
        parser.error("README.md's figures need all rounds")
    build()
    rounds = 2 if arguments.quick else 9
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    onnx, loop = attempt(onnx_runtime, rounds, threads), attempt(paper_loop, rounds)
    text = paragraphs(onnx, loop)
    print(between_marks("<!-- peers -->\n<!-- /peers -->\n", "peers", text))
    if arguments.readme:
        if isinstance(onnx, Missing) or isinstance(loop, Missing) or busyness(onnx) > BUSY:
            sys.exit("README.md stays as it was: a table is missing, or the machine was busy")
        README.write_text(between_marks(README.read_text(), "peers", text))


if __name__ == "__main__":
    main()
