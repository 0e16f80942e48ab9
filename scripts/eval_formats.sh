#!/usr/bin/env bash
# Measures every storage format on a real model and writes what docs/formats.md shows: the table
# between its markers, and docs/formats.svg. The full numbers go to build/formats.json.
#
#   scripts/eval_formats.sh BUILD_FOLDER [further options of evaluate]
#
# BUILD_FOLDER holds bin/evaluate. Takes an hour to an hour and a half on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:?"give the build folder, such as build/release"}
shift

model=$(scripts/fetch_model.sh)
text=$(scripts/fetch_text.sh)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$build/bin/evaluate" --model "$model" --text "$text" --tasks --contexts 4 \
    --report "$work/formats.json" --plot "$work/formats.svg" "$@" >"$work/table.md"
python3 scripts/evaluation_table.py docs/formats.md "$work/table.md" "$work/formats.json" \
    eval-formats
cp "$work/formats.json" build/formats.json
cp "$work/formats.svg" docs/formats.svg
