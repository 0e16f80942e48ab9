#!/usr/bin/env bash
# Runs every benchmark program of a build tree, one after the other. Each prints a line per case:
# words that name the case, then key=value figures.
set -euo pipefail
tree=${1:?usage: run_bench.sh BUILD_TREE}

shopt -s nullglob
for program in "$tree"/bin/bench_*; do
    "$program"
done
