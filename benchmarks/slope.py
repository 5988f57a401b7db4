#!/usr/bin/env python3
"""Does time grow linearly? Fits log(time) = slope log(N) + c to a benchmark's JSON on stdin, N >= 1,024.

  bench_forward --benchmark_filter=D:64 --benchmark_repetitions=10 --benchmark_format=json | benchmarks/slope.py

Prints a line for each benchmark and shape: the slope over the medians of CPU time, and the median peak_fractions.
Exits with 1 when a slope is outside 1.00 +- 0.05.
"""
import collections
import json
import math
import re
import statistics
import sys

times, fractions = (collections.defaultdict(lambda: collections.defaultdict(list)) for _ in range(2))
for run in json.load(sys.stdin)["benchmarks"]:
    if run.get("run_type") == "iteration" and "error_occurred" not in run:
        name, n, shape = re.match(r"(.*)/N:(\d+)/(.*)", run["name"]).groups()
        times[name + "/" + shape][int(n)].append(run["cpu_time"])
        fractions[name + "/" + shape][int(n)].append(run["peak_fraction"])

linear = True
for name, series in times.items():
    points = [(math.log(n), math.log(statistics.median(t))) for n, t in sorted(series.items()) if n >= 1024]
    if len(points) < 2:
        continue
    mean_x, mean_y = (statistics.fmean(axis) for axis in zip(*points))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    linear = linear and abs(slope - 1) <= 0.05
    shares = ", ".join(f"{n}: {statistics.median(f):.2f}" for n, f in sorted(fractions[name].items()))
    print(f"{name}  slope {slope:.3f}  peak_fraction {shares}")
sys.exit(0 if linear else 1)
