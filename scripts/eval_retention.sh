#!/usr/bin/env bash
# Judges methods of eviction on a real model and writes what docs/retention.md shows: the table
# between its markers, and docs/retention.svg. The full numbers go to build/retention.json.
#
#   scripts/eval_retention.sh BUILD_FOLDER [further options of evaluate --retention]
#
# BUILD_FOLDER holds bin/evaluate. Takes about an hour on two threads.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:?"give the build folder, such as build/release"}
shift

model=$(scripts/fetch_model.sh)
text=$(scripts/fetch_text.sh)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$build/bin/evaluate" --retention --model "$model" --text "$text" \
    --tokens 4096 --contexts 3 --prompts 2 --written 512 \
    --report "$work/retention.json" --plot "$work/retention.svg" "$@" >"$work/table.md"
python3 scripts/evaluation_table.py docs/retention.md "$work/table.md" "$work/retention.json" \
    eval-retention
cp "$work/retention.json" build/retention.json
cp "$work/retention.svg" docs/retention.svg
