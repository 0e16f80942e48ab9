#!/usr/bin/env python3
"""What driving the library from another language costs: one decode step of 32 layers and 64 sequences,
as a ratio to the same loop in C.

The programs run one after the other in rounds, each round in another order, so that whatever else the
machine does meets all of them; a language's figure is the median over the rounds of its ratio to C in
the same round. A line per language:

  overhead language=rust ratio=1.003 least=0.998 most=1.010 median_us=... c_median_us=... rounds=...

  bench_bindings.py TREE [--rounds N]    TREE: a release build tree; the bindings' programs are built
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys

import run_bindings

ROOT = pathlib.Path(__file__).resolve().parent.parent
MEDIAN = re.compile(r"^overhead language=\S+ layers=32 sequences=64 median_us=([\d.]+)$", re.M)


def programs(tree):
    found = {"c": tree / "bin" / "overhead_c"}
    for language in run_bindings.TOOLS:
        folder = ROOT / "build" / "bindings" / language
        found[language] = folder / "overhead"
        if language == "csharp" and "KVRT_DOTNET_ROOT" in os.environ:
            found["csharp"] = folder / "overhead-dotnet"
            found["csharp_mono"] = folder / "overhead"
    return found


def measure(program):
    output = subprocess.run([str(program)], check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(MEDIAN.search(output)[1])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tree", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    tree = options.tree.resolve()

    run_bindings.install(tree)
    run_bindings.find_dotnet()
    for language in run_bindings.TOOLS:
        status, output = run_bindings.run_script(language, "build_programs.sh")
        if status != 0:
            print(output, file=sys.stderr)
            return 1

    found = programs(tree)
    names = list(found)
    times = {name: [] for name in names}
    for round_number in range(options.rounds):
        turn = round_number % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(measure(found[name]))
    for name in names[1:]:
        ratios = sorted(mine / c for mine, c in zip(times[name], times["c"]))
        print(f"overhead language={name} ratio={statistics.median(ratios):.3f} "
              f"least={ratios[0]:.3f} most={ratios[-1]:.3f} "
              f"median_us={statistics.median(times[name]):.1f} "
              f"c_median_us={statistics.median(times['c']):.1f} rounds={options.rounds}",
              flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
