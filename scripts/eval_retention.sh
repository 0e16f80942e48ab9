#!/usr/bin/env bash
# Judges methods of eviction on a real model and writes what docs/retention.md shows: its tables,
# each between markers, and docs/retention.svg. The full numbers go to build/retention*.json.
#
#   scripts/eval_retention.sh BUILD_FOLDER [NAME ...]
#
# BUILD_FOLDER holds bin/evaluate. NAME is a table: all, long, int8, int4, endless or endless-text;
# without, all six are made. That takes about four hours on two threads, one of them for endless.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:?"give the build folder, such as build/release"}
shift
tables=("$@")
((${#tables[@]})) || tables=(all long int8 int4 endless endless-text)

model=$(scripts/fetch_model.sh)
text=$(scripts/fetch_text.sh)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# judge NAME WHAT OPTION...: evaluates, and puts the table where the page has its place. WHAT is the
# program's first argument.
judge() {
    local name=$1 what=$2
    shift 2
    "$build/bin/evaluate" "$what" --model "$model" --text "$text" \
        --report "$work/$name.json" "$@" >"$work/$name.md"
    python3 scripts/evaluation_table.py docs/retention.md "$work/$name.md" "$work/$name.json" \
        "eval-retention, $name"
    cp "$work/$name.json" "build/retention-$name.json"
}

for table in "${tables[@]}"; do
    case "$table" in
    all)
        judge all --retention --tokens 4096 --contexts 3 --prompts 2 --written 512 \
            --plot "$work/all.svg"
        cp "$work/all.svg" docs/retention.svg
        ;;
    long)
        judge long --retention --tokens 0 --contexts 2 --context-tokens 3072,7680 --together 1 \
            --prompts 0
        ;;
    int8 | int4)
        judge "$table" --retention --format "${table}_token+rotate" --tokens 2048 --contexts 3 \
            --context-tokens 1024 --prompts 0
        ;;
    endless) judge endless --endless --tokens 1048576 --stretches 16 ;;
    endless-text) judge endless-text --endless --tokens 65536 --stretches 16 --positions text ;;
    *)
        echo "no table is called $table: all, long, int8, int4, endless or endless-text" >&2
        exit 2
        ;;
    esac
done
