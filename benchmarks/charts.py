#!/usr/bin/env python3
"""The README's charts and the tables under them and in a guide, from committed figures. Needs gnuplot (gnuplot-nox on Debian).

  benchmarks/charts.py             draws data/*.svg and rewrites README.md and the guide between their marks
  benchmarks/charts.py --check     draws into memory and compares byte for byte; exits with 1 when anything differs
  benchmarks/charts.py --measure   first measures anew: runs bench_roofline, bench_vs_softmax, bench_approximation and
                                   bench_cost of build/release (or of the directory that follows), twelve minutes
                                   together, and writes data/*.json

So this one command renews every figure, after `cmake --workflow --preset benchmarks`:

  taskset -c 1 benchmarks/charts.py --measure

A data file of times names its command and machine, and holds the medians of Google Benchmark's repetitions, one a line;
approximation.json is what its program prints, and hardly depends on the machine; cost.json is what its program prints,
and the machine.
--check skips the drawings, with a message, where gnuplot is missing or of another version than the one that drew them.
"""
import argparse
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "data"
README = ROOT / "README.md"
GUIDE = ROOT / "examples" / "guides" / "measurements.md"
PROGRAMS = {"roofline": "bench_roofline", "vs_softmax": "bench_vs_softmax"}

LEVEL_COLOURS = {"L1": "#1b7837", "L2": "#2166ac", "L3": "#b35806", "DRAM": "#b2182b"}
COLOURS = {"naive softmax": "#777777", "tiled softmax": "#d95f02", "linear": "#2166ac"}
SERIES = {
    "naive softmax": "BM_softmax_naive<float>",
    "tiled softmax": "BM_softmax_tiled<float>",
    "linear": "BM_forward_causal<elu_plus_one,float>",
}
METHODS = {"naive": "#777777", "blocked": "#d95f02", "linear": "#2166ac"}
APPROXIMATIONS = {"random_fourier": "#7570b3", "positive_random": "#d95f02", "hyperbolic": "#1b7837", "gerf": "#2166ac"}


# ---- figures ---------------------------------------------------------------------------------------------------------


def significant(x, digits=4):
    rounded = float(f"{x:.{digits}g}")
    return int(rounded) if rounded == int(rounded) else rounded


def processor():
    """Its name and, as virtual machines shorten that, its family and model."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    about = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    if "model name" not in about:
        return "unknown processor"
    return f"{about['model name']} (family {about['cpu family']}, model {about['model']})"


def measure(build):
    """Runs the programs and keeps what the charts and a reader need: no host, path or date."""
    DATA.mkdir(exist_ok=True)
    for name, program in PROGRAMS.items():
        command = [str(build / "benchmarks" / program), "--benchmark_format=json"]
        print("running", " ".join(command), flush=True)
        run = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if run.returncode:
            sys.exit(f"{program} failed; the figures stay as they were")
        result = json.loads(run.stdout)
        context = result["context"]
        header = {
            "command": " ".join([os.path.relpath(command[0], ROOT), *command[1:]]),
            "statistic": "median of the repetitions",
            "processor": processor(),
            "compiler": context["compiler"],
            "packet_bytes": int(context["packet_bytes"]),
            "caches": [f"L{c['level']} {c['type']} {c['size'] >> 10} KiB" for c in context["caches"]],
        }
        header.update({key: text for key, text in context.items() if key.startswith("skipped")})
        rows = []
        for row in result["benchmarks"]:
            if row.get("aggregate_name") != "median":
                continue
            kept = {"name": row["run_name"], f"cpu_{row['time_unit']}": significant(row["cpu_time"])}
            if row.get("label"):
                kept["level"] = row["label"]
            builtin = ("family_index", "per_family_instance_index", "repetitions", "threads", "iterations", "real_time",
                       "cpu_time")
            kept.update((key, significant(x)) for key, x in row.items()
                        if isinstance(x, (int, float)) and key not in builtin)
            rows.append(kept)
        text = json.dumps(header, indent=2)[:-2] + ',\n  "benchmarks": [\n    '
        text += ",\n    ".join(json.dumps(row) for row in rows) + "\n  ]\n}\n"
        (DATA / f"{name}.json").write_text(text)
    print("running bench_approximation", flush=True)
    run = subprocess.run([str(build / "benchmarks" / "bench_approximation")], stdout=subprocess.PIPE, check=False)
    if run.returncode:
        sys.exit("bench_approximation failed; its figures stay as they were")
    (DATA / "approximation.json").write_bytes(run.stdout)
    measure_cost(build / "benchmarks" / "bench_cost")


def measure_cost(program):
    print("running bench_cost", flush=True)
    run = subprocess.run([str(program)], stdout=subprocess.PIPE, check=False, text=True)
    if run.returncode:
        sys.exit("bench_cost failed; its figures stay as they were")
    header = {"command": os.path.relpath(program, ROOT), "processor": processor()}
    (DATA / "cost.json").write_text(json.dumps(header, indent=2)[:-2] + "," + run.stdout[1:])


def load(name):
    """A data file, its benchmarks by name; the name's arguments become a dictionary."""
    data = json.loads((DATA / f"{name}.json").read_text())
    data["rows"] = []
    for row in data["benchmarks"]:
        family, *arguments = row["name"].split("/")
        data["rows"].append((family, {key: int(x) for key, x in (a.split(":") for a in arguments)}, row))
    return data


def times(data, d):
    """{series: {N: microseconds}} of one D."""
    return {
        title: {a["N"]: row["cpu_us"] for family, a, row in data["rows"] if family == wanted and a["D"] == d}
        for title, wanted in SERIES.items()
    }


def dimensions(data):
    return sorted({a["D"] for family, a, _ in data["rows"] if family == SERIES["linear"]})


def crossover(baseline, linear):
    """The N from which on linear takes less time, between measured N along straight lines of the log-log chart; None
    when it still loses at the longest, 1 when it never does."""
    common = sorted(set(baseline) & set(linear))
    losing = [n for n in common if linear[n] >= baseline[n]]
    if not losing:
        return 1
    if losing[-1] == common[-1]:
        return None
    low, high = losing[-1], common[common.index(losing[-1]) + 1]
    gap = [math.log(linear[n] / baseline[n]) for n in (low, high)]
    return math.ceil(significant(low * (high / low) ** (gap[0] / (gap[0] - gap[1])), 2))


def approximation(data, name, rows, d, sigma):
    """{C: quartiles of the output's error} of one map; `rows` says how its directions are drawn."""
    wanted = {"map": name, "rows": rows, "D": d, "sigma": sigma}
    return {row["C"]: row["output"] for row in data["errors"] if wanted.items() <= row.items()}


def mean_of_v(data, d, sigma):
    """The error of an output that is the plain mean of all values."""
    wanted = {"map": "mean", "D": d, "sigma": sigma}
    return next(row["output"][1] for row in data["errors"] if wanted.items() <= row.items())


# ---- drawings --------------------------------------------------------------------------------------------------------


def gnuplot(script):
    return subprocess.run(["gnuplot"], input=script, stdout=subprocess.PIPE, check=True, text=True,
                          env={**os.environ, "LC_ALL": "C"}).stdout


def block(name, points):
    return f"${name} << EOD\n" + "".join(" ".join(f"{x:.6g}" for x in p) + "\n" for p in points) + "EOD\n"


def label(text, x, y, colour, where="left", offset="0,0", size=12):
    return (f'set label "{text}" at {x:.6g},{y:.6g} {where} offset {offset} front textcolor rgb "{colour}" '
            f'font ",{size}"\n')


def axes(size):
    return (f'set terminal svg size {size} dynamic background "#ffffff" font "sans-serif,13" linewidth 1.2\n'
            'set logscale xy\nunset key\nset border 3 lc rgb "#555555"\nset tics nomirror out\n'
            'set grid xtics ytics lc rgb "#e5e5e5" lw 0.8\n')


def roofs_script(machine):
    """The peak and a slanted line a level, and the plot commands for them; lines close to each other share a label."""
    peak = machine["peak_gflops"]
    rates = {level: machine[f"{level}_update"] * 1e-9 for level in LEVEL_COLOURS if f"{level}_update" in machine}
    script = block("peak", [(peak / max(rates.values()), peak), (100, peak)])
    plots = ['$peak with lines lw 1.6 lc rgb "#222222"']
    script += label(f"FMA peak, {peak:.0f} GFLOP/s", 100, peak, "#222222", "right", "0,0.7")
    labels = []
    for level, rate in rates.items():
        script += block(f"roof_{level}", [(0.05, 0.05 * rate), (peak / rate, peak)])
        plots.append(f'$roof_{level} with lines lw 1.6 lc rgb "{LEVEL_COLOURS[level]}"')
        if labels and labels[-1][1] / rate < 1.15:
            labels[-1][0].append(f"{level} {rate:.0f}")
        else:
            labels.append(([f"{level} {rate:.0f}"], rate, LEVEL_COLOURS[level]))
    for index, (names, rate, colour) in enumerate(labels):  # the first one left of its line, the others right
        y = peak * (0.12 if index else 0.4)
        side = ("left", "0.8,0") if index else ("right", "-0.8,0")
        script += label(", ".join(names) + " GB/s", y / rate, y, colour, *side)
    return script, plots


def roofline_script(data):
    machine = next(row for family, _, row in data["rows"] if family == "BM_machine")
    script = (axes("900,560") + f"set xrange [0.05:120]\nset yrange [8:{1.5 * machine['peak_gflops']:.6g}]\n"
              'set xtics ("1/16" 0.0625, "1/8" 0.125, "1/4" 0.25, "1/2" 0.5, "1" 1, "2" 2, "4" 4, "8" 8, "16" 16, '
              '"32" 32, "64" 64)\nset ytics ("8" 8, "16" 16, "32" 32, "64" 64, "128" 128)\n'
              'set xlabel "useful flops for each byte that has to move (inputs, outputs and state once)"\n'
              'set ylabel "useful GFLOP/s"\nset key bottom right Left reverse samplen 1 spacing 1.3\n')
    roofs, plots = roofs_script(machine)
    script += roofs
    plots = [plot + " notitle" for plot in plots]
    marks = [("BM_step", "step", 7, 1.0, [1]),
             ("BM_forward_causal", "forward\\\\_causal, N = 64, 1,024, 16,384", 5, 0.8, [64, 1024, 16384]),
             ("BM_forward", "forward, the same N", 8, 1.0, [64, 1024, 16384])]
    for family, title, point, size, lengths in marks:
        drawn = [(a, row["flops_per_byte"], row["flops_per_second"] * 1e-9, row["level"])
                 for f, a, row in data["rows"] if f == family and a["H"] == 8 and a["N"] in lengths]
        style = f"with points pt {point} ps {size} lc rgb"
        plots.append(f'NaN {style} "#555555" title "{title}"')
        for level, colour in LEVEL_COLOURS.items():
            points = [(x, y) for _, x, y, where in drawn if where == level]
            if points:
                script += block(f"{family}_{level}", points)
                plots.append(f'${family}_{level} {style} "{colour}" notitle')
        before = 0
        for a, x, y, _ in sorted(drawn, key=lambda mark: mark[2]):
            if family == "BM_step":  # left of the point where the label below is close
                side = ("right", "-0.9,0") if y < 1.12 * before else ("left", "0.9,0")
                script += label(f"D = {a['D']}", x, y, "#555555", *side, 10)
                before = y if side[0] == "left" else 0
            elif family == "BM_forward_causal" and a["N"] == lengths[-1]:
                script += label(f"D = {a['D']}", x, y, "#555555", "center", "0,-1.1", 10)
    return script + "plot " + ", ".join(plots) + "\n"


def crossover_script(data):
    tics = [(0.1, "0.1 us"), (1, "1 us"), (10, "10 us"), (100, "100 us"), (1e3, "1 ms"), (1e4, "10 ms"),
            (1e5, "100 ms"), (1e6, "1 s")]
    script = (axes("1000,420") + "set xrange [1:20000]\nset yrange [0.03:3e6]\n"
              'set xtics ("1" 1, "16" 16, "256" 256, "4,096" 4096)\nset xlabel "N, tokens"\n')
    wanted = dimensions(data)
    script += f"set multiplot layout 1,{len(wanted)} margins 0.07,0.89,0.17,0.91 spacing 0.03,0.1\n"
    for d in wanted:
        series = times(data, d)
        plots = []
        named = ", ".join(f'"{text if d == wanted[0] else ""}" {y:g}' for y, text in tics)
        script += f'unset label\nunset arrow\nset title "D = M = {d}"\nset ytics ({named})\n'
        for index, (title, points) in enumerate(series.items()):
            script += block(f"d{d}_{index}", sorted(points.items()))
            plots.append(f'$d{d}_{index} with lines lw 2 lc rgb "{COLOURS[title]}"')
            if d == wanted[-1]:  # at the line's end where that is the chart's, else left of it
                n = max(points)
                place = ("left", "0.8,0") if n > 8192 else ("right", "-1,0")
                script += label(title, n, points[n], COLOURS[title], *place)
        n = crossover(series["tiled softmax"], series["linear"])
        if n and n > 1:
            script += f'set arrow from {n},0.03 to {n},3e6 nohead dashtype 3 lc rgb "#999999"\n'
            script += label(f"N = {n}", n, 0.06, "#555555", "left", "0.5,0")
        script += "plot " + ", ".join(plots) + "\n"
    return script + "unset multiplot\n"


def approximation_script(data):
    script = (axes("1000,420") + "set xrange [16:4096]\nset yrange [0.015:6]\n"
              'set xtics ("16" 16, "64" 64, "256" 256, "1,024" 1024, "4,096" 4096)\n'
              'set xlabel "C, features"\nset style fill transparent solid 0.15 noborder\n'
              "set multiplot layout 1,3 margins 0.08,0.97,0.17,0.91 spacing 0.04,0.1\n")
    for index, (d, sigma) in enumerate(((16, 0.5), (64, 0.5), (64, 1))):
        tics = ", ".join(f'"{"" if index else y}" {y}' for y in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5))
        script += f'set title "D = {d}, sigma = {sigma}"\nset ytics ({tics})\nunset label\nunset key\n'
        mean = mean_of_v(data, d, sigma)
        plots = [f'{mean:.6g} with lines lw 1.2 dashtype 3 lc rgb "#222222" notitle']
        script += f'set ylabel "{"" if index else "relative error of the output"}"\n'
        if index == 2:
            script += "set key bottom left Left reverse samplen 1.5 spacing 1.2\n"
        if index == 0:
            script += label("the mean of v", 4096, mean, "#222222", "right", "-0.5,0.5", 11)
        outside = []
        for name, colour in APPROXIMATIONS.items():
            for rows, style in (("independent", "lw 1 dashtype 2"), ("orthogonal", "lw 2")):
                points = approximation(data, name, rows, d, sigma)
                if min(middle for _, middle, _ in points.values()) > 6:
                    outside.append(name)
                    points = {}
                block_name = f"p{index}_{name}_{rows}"
                script += block(block_name, [(c, *quartiles) for c, quartiles in points.items()] or [(1, 1, 1, 1)])
                if rows == "orthogonal":
                    plots.append(f'${block_name} using 1:2:4 with filledcurves lc rgb "{colour}" notitle')
                title = f'title "{name}"'.replace("_", "\\\\_") if rows == "orthogonal" else "notitle"
                plots.append(f'${block_name} using 1:3 with lines {style} lc rgb "{colour}" {title}')
        for name in dict.fromkeys(outside):
            least = min(approximation(data, name, "orthogonal", d, sigma).values(), key=lambda q: q[1])[1]
            text = f"{name}: {least:.0f} and more".replace("_", "\\\\_")
            script += label(text, 4096, 5, APPROXIMATIONS[name], "right", "-0.5,0", 11)
        script += "plot " + ", ".join(plots) + "\n"
    return script + "unset multiplot\n"


def cost_series(data, what):
    """{method: its series} of `forward` or `forward + vjp`."""
    return {series["method"]: series for series in data["series"] if series["what"] == what}


def cost_script(data):
    script = (axes("1000,420") + "set xrange [512:65536]\n"
              'set xtics ("512" 512, "2,048" 2048, "8,192" 8192, "32,768" 32768)\nset xlabel "N, tokens"\n'
              "set multiplot layout 1,2 margins 0.07,0.9,0.17,0.91 spacing 0.12,0.1\n")
    panels = [("seconds", "time a sample", "[1e-4:1e3]",
               [(1e-4, "0.1 ms"), (1e-3, "1 ms"), (1e-2, "10 ms"), (0.1, "100 ms"), (1, "1 s"), (10, "10 s"),
                (100, "100 s"), (1e3, "1,000 s")]),
              ("bytes", "most bytes allocated at once for a sample", "[1e6:1e10]",
               [(1e6, "1 MB"), (1e7, "10 MB"), (1e8, "100 MB"), (1e9, "1 GB"), (1e10, "10 GB")])]
    for key, title, limits, tics in panels:
        plots = []
        named = ", ".join(f'"{text}" {y:g}' for y, text in tics)
        script += f'unset label\nset title "{title}"\nset yrange {limits}\nset ytics ({named})\n'
        for what, style in (("forward", "lw 1.4 dashtype 2"), ("forward + vjp", "lw 2.2")):
            for method, series in cost_series(data, what).items():
                points = [(f["N"], f[key]) for f in series["figures"]]
                name = f"{key}_{method}_{len(what)}"
                script += block(name, points)
                plots.append(f'${name} with linespoints {style} pt 7 ps 0.5 lc rgb "{METHODS[method]}"')
                if what == "forward + vjp":  # beside the line's end, left of it where that is the chart's
                    n, y = points[-1]
                    title = "linear" if method == "linear" else f"{method} softmax"
                    side = ("left", "0.8,0") if n == 65536 else ("right", "-0.8,0.6")
                    if (method, key) == ("blocked", "bytes"):  # clear of the dashed line of naive softmax
                        side = ("center", "-3,1.4")
                    script += label(title, n, y, METHODS[method], *side)
        script += "plot " + ", ".join(plots) + "\n"
    return script + "unset multiplot\n"


# ---- README ----------------------------------------------------------------------------------------------------------


def number(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def between_marks(text, name, paragraphs):
    """README's text with these paragraphs between the marks of that name, wrapped unless picture or table."""
    fill = textwrap.TextWrapper(width=120, break_long_words=False, break_on_hyphens=False).fill
    body = "\n\n".join(p if p.startswith(("!", "|")) else fill(" ".join(p.split())) for p in paragraphs) + "\n"
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->\n)", re.DOTALL)
    return marks.sub(lambda found: found[1] + body + found[2], text)


def table_of(rows):
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def speed(text, roofline, softmax):
    machine = next(row for family, _, row in roofline["rows"] if family == "BM_machine")
    wanted = dimensions(softmax)
    series = {d: times(softmax, d) for d in wanted}

    def wins(title):
        found = [crossover(series[d][title], series[d]["linear"]) for d in wanted]
        return ["never" if n is None else "any" if n == 1 else number(n) for n in found]

    def both(n):
        return [f"{number(series[d]['tiled softmax'][n])} / {number(series[d]['linear'][n])}" for d in wanted]

    tiled = wins("tiled softmax")
    rows = [["causal, one head, float", *(f"D = M = {d}" for d in wanted)],
            ["linear wins against plain loops from N", *wins("naive softmax")],
            ["linear wins against tiled softmax from N", *tiled],
            *([f"N = {n:,}: tiled softmax / linear, microseconds", *both(n)] for n in (64, 1024, 16384))]
    sizes = ", ".join(f"{n} at D = {d}" for n, d in zip(tiled, wanted))
    paragraphs = [
        "![Useful GFLOP/s against arithmetic intensity](benchmarks/data/roofline.svg)",
        f"""Eight heads. A point's colour is the nearest memory level that holds its inputs, outputs and state; the line
        of that colour, that level's read + write bandwidth, and the FMA peak are the roofs over it.
        {roofline['processor']}, one thread, {roofline['compiler']}, `-O3 -march=native`; the roofs
        ({machine['peak_gflops']:.0f} GFLOP/s are {machine['flops_per_cycle']:.1f} flops a cycle) are measured in the
        same process by `{roofline['command'].split()[0]}`, which also prints every other form and shape.""",
        "![Time against N for linear and softmax attention](benchmarks/data/crossover.svg)",
        table_of(rows),
        f"""The tiled softmax is an online one, without the N x N matrix, from
        [softmax_baselines.hpp](benchmarks/softmax_baselines.hpp); same machine, `{softmax['command'].split()[0]}`. For
        shorter sequences than these ({sizes}) softmax attention is the better choice: it takes less time, and it weighs
        single tokens exactly. `benchmarks/charts.py --measure` renews figures, charts and table.""",
    ]
    return between_marks(text, "charts", paragraphs)


def approximation_table(text, data):
    settings = [(16, 0.5), (32, 0.5), (64, 0.5), (16, 1), (64, 1)]
    features = 1024
    rows = [[f"C = {features:,}, orthogonal", *(f"D = {d}, sigma = {sigma}" for d, sigma in settings)],
            *([f"`{name}`", *(number(median_error(data, name, features, *at)) for at in settings)]
              for name in APPROXIMATIONS),
            ["the mean of all v", *(number(mean_of_v(data, *at)) for at in settings)]]
    return between_marks(text, "approximation", [table_of(rows)])


def median_error(data, name, features, d, sigma):
    return approximation(data, name, "orthogonal", d, sigma)[features][1]


def closeness(text, data):
    features = 1024
    paragraphs = [
        "![Error against C for four random maps](benchmarks/data/approximation.svg)",
        f"""Relative error |out - want| / |want| of the output against softmax attention, normalised, N = {data['N']}, q
        and k ~ N(0, sigma²), v ~ N(0, 1): medians over seeds 1 to 15, none left out, in the chart with quartiles as
        bands; dashed with independent instead of orthogonal directions. Errors fall as 1/√C, but random features fail
        where logits are large: a weight's relative variance is (exp(|q' + k'|²) - 1) / C for `positive_random`,
        q' = q/D^¼, and at D = 64, sigma = 1 that exp is 9 million on average: no practical number of features helps,
        and every map is further off than zeros. Small inputs are no proof of much, either: at D = 64, sigma = 0.5 the
        mean of all v is as close ({number(mean_of_v(data, 64, 0.5))}) as `positive_random` with {features:,} features
        ({number(median_error(data, "positive_random", features, 64, 0.5))}). `build/release/benchmarks/bench_approximation` prints this and
        more in two minutes.""",
    ]
    return between_marks(text, "approximation", paragraphs)


def cost(text, data):
    training = cost_series(data, "forward + vjp")

    def figures(method, key, n, scale):
        found = [f[key] for f in training[method]["figures"] if f["N"] == n]
        return number(found[0] * scale) if found else "-"

    lengths = [512, 2048, 8192, 32768, 65536]
    titles = {"linear": "linear", "blocked": "blocked softmax", "naive": "naive softmax"}
    rows = [["`forward` + `vjp`", "grows as", *(f"N = {n:,}" for n in lengths)]]
    for method, title in titles.items():
        series = training[method]
        rows.append([f"{title}, milliseconds", f"N^{series['time_slope']:.2f}",
                     *(figures(method, "seconds", n, 1e3) for n in lengths)])
    for method, title in titles.items():
        series = training[method]
        rows.append([f"{title}, MB", f"N^{series['bytes_slope']:.2f}",
                     *(figures(method, "bytes", n, 1e-6) for n in lengths)])
    stops = " ".join(f"The {titles[method]} stops: {s['stopped']}." for method, s in training.items() if s["stopped"])
    stops = re.sub(r"\d{4,}", lambda found: f"{int(found[0]):,}", stops)
    beyond = [series["figures"][-1]["beyond"] for series in (training["linear"], training["blocked"])]
    paragraphs = [
        "![Time and memory of one sample against N](benchmarks/data/cost.svg)",
        table_of(rows),
        f"""The paper's figure 1 on a processor: non-causal attention of one sample, H = {data['H']}, D = M = {data['D']},
        float, one thread ({data['processor']}, {data['compiler']}, FMA peak {data['peak_gflops']:.0f} GFLOP/s); dashed
        `forward`, solid with the gradients; bytes with inputs, outputs and their gradients. Beyond these linear
        attention takes {number(beyond[0] * 1e-6)} MB at any N. The naive softmax keeps N x N weights of every head; the
        blocked one, online and with weights computed anew for the gradient, a copy of keys and values
        ({number(beyond[1] * 1e-6)} MB at its longest), and its time still grows as theirs. {stops}
        `{data['command']}` prints the figures, and checks the baselines against the reference and central differences
        first.""",
    ]
    return between_marks(text, "cost", paragraphs)


# ---- main ------------------------------------------------------------------------------------------------------------


def drawn_by(svg):
    """The gnuplot version in a drawing, as `gnuplot --version` says it."""
    found = re.search(r"Produced by GNUPLOT (\S+) patchlevel (\S+)", svg)
    return f"gnuplot {found[1]} patchlevel {found[2]}" if found else "nothing"


def check(drawings, texts):
    wrong = [str(path.relative_to(ROOT)) for path, text in texts.items() if path.read_text() != text]
    compared = "tables and charts agree"
    version = "no gnuplot"
    if shutil.which("gnuplot"):
        version = subprocess.run(["gnuplot", "--version"], stdout=subprocess.PIPE, check=True, text=True).stdout.strip()
    for name, script in drawings.items():
        committed = (DATA / f"{name}.svg").read_text()
        if drawn_by(committed) != version:
            print(f"{name}.svg: drawn by {drawn_by(committed)}, here is {version}: skipped")
            compared = "the tables agree"
        elif gnuplot(script) != committed:
            wrong.append(f"benchmarks/data/{name}.svg")
    if wrong:
        sys.exit("not what benchmarks/charts.py makes of benchmarks/data/*.json: " + ", ".join(wrong))
    print(compared, "with benchmarks/data/*.json")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--measure", nargs="?", const=ROOT / "build" / "release", type=pathlib.Path, metavar="BUILD",
                        help="run the benchmarks of this build directory first")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
    roofline, softmax = load("roofline"), load("vs_softmax")
    errors = json.loads((DATA / "approximation.json").read_text())
    costs = json.loads((DATA / "cost.json").read_text())
    drawings = {"roofline": roofline_script(roofline), "crossover": crossover_script(softmax),
                "approximation": approximation_script(errors), "cost": cost_script(costs)}
    texts = {README: cost(closeness(speed(README.read_text(), roofline, softmax), errors), costs),
             GUIDE: approximation_table(GUIDE.read_text(), errors)}
    if arguments.check:
        return check(drawings, texts)
    for name, script in drawings.items():
        (DATA / f"{name}.svg").write_text(gnuplot(script))
    for path, text in texts.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
