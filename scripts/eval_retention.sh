#!/usr/bin/env bash
# Judges methods of eviction on a real model and writes what docs/retention.md shows: its tables,
# each between markers, and docs/retention.svg. The full numbers go to build/retention*.json.
#
#   scripts/eval_retention.sh BUILD_FOLDER [NAME ...]
#
# BUILD_FOLDER holds bin/evaluate. NAME is a table: all, long, int8 or int4; without, all four are
# made. That takes about two hours on two threads.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:?"give the build folder, such as build/release"}
shift
tables=("$@")
((${#tables[@]})) || tables=(all long int8 int4)

model=$(scripts/fetch_model.sh)
text=$(scripts/fetch_text.sh)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# judge NAME OPTION...: evaluates, and puts the table where the page has its place.
judge() {
    local name=$1
    shift
    "$build/bin/evaluate" --retention --model "$model" --text "$text" \
        --report "$work/$name.json" "$@" >"$work/$name.md"
    python3 scripts/evaluation_table.py docs/retention.md "$work/$name.md" "$work/$name.json" \
        "eval-retention, $name"
    cp "$work/$name.json" "build/retention-$name.json"
}

for table in "${tables[@]}"; do
    case "$table" in
    all)
        judge all --tokens 4096 --contexts 3 --prompts 2 --written 512 --plot "$work/all.svg"
        cp "$work/all.svg" docs/retention.svg
        ;;
    long) judge long --tokens 0 --contexts 2 --context-tokens 3072,7680 --together 1 --prompts 0 ;;
    int8 | int4)
        judge "$table" --format "${table}_token+rotate" --tokens 2048 --contexts 3 \
            --context-tokens 1024 --prompts 0
        ;;
    *)
        echo "no table is called $table: all, long, int8 or int4" >&2
        exit 2
        ;;
    esac
done
