#!/usr/bin/env bash
# Everything that only a GPU can show, in at most 8 minutes: tests of pools on it against pools on
# the CPU, compute-sanitizer on short ones, what a fault looks like, and benchmarks; one table in
# Markdown.
#
#   scripts/gpu_check.sh --bundle                   on any machine: builds what is needed into
#                                                   build/gpu (30 MB): no GPU, but nvcc
#   scripts/gpu_check.sh [--quick] [--from FOLDER] [FILE]
#                                                   on the one with the GPU: runs that, and writes
#                                                   the table to FILE (build/gpu_check.md)
#
# The second machine needs bash, awk, a driver, and the working tree with build/gpu in it (or FOLDER,
# which holds the same files); nothing is downloaded or built there unless build/gpu is missing. It
# has to run programs of the first one: the same processor architecture, and a C and C++ library that
# are not older. --quick runs a short test and small benchmarks, to try the script itself.
#
# Exit status: 0 all is well, 1 something failed, 2 wrong arguments, 3 there is no GPU here.
set -uo pipefail
cd "$(dirname "$0")/.."

readonly no_gpu=3
programs=(test_gpu bench_gpu)

bundle() {
    scripts/install_deps.sh &&
        scripts/fetch_cuda.sh >/dev/null &&
        cmake --preset release -DKVRT_CUDA=ON >/dev/null &&
        cmake --build --preset release --target "${programs[@]}" kvrt_cuda || return 1
    rm -rf build/gpu
    mkdir -p build/gpu
    local program
    for program in "${programs[@]}"; do
        strip -o "build/gpu/$program" "build/release/gpu/$program" || return 1
    done
    strip --strip-unneeded -o build/gpu/libkvrt_cuda.so.0 build/release/libkvrt_cuda.so.0 &&
        du -sh build/gpu
}

folder=build/gpu
table=build/gpu_check.md
quick=()
selected=()
while (($# > 0)); do
    case $1 in
        --bundle)
            bundle
            exit
            ;;
        --quick) quick=(--quick) selected=(--test-case="short*") ;;
        --from)
            folder=${2:?--from needs a folder}
            shift
            ;;
        -*)
            echo "usage: gpu_check.sh --bundle | [--quick] [--from FOLDER] [FILE]" >&2
            exit 2
            ;;
        *) table=$1 ;;
    esac
    shift
done
command="scripts/gpu_check.sh${quick:+ --quick}"

if [[ ! -x "$folder/test_gpu" && "$folder" == build/gpu ]]; then
    echo "build/gpu is missing: building it" >&2
    bundle >&2 || exit 1
fi
for program in "${programs[@]}"; do
    if [[ ! -x "$folder/$program" ]]; then
        echo "$folder/$program is missing: scripts/gpu_check.sh --bundle makes it" >&2
        exit 1
    fi
done
device=$("$folder/test_gpu" --device)
status=$?
if ((status != 0)); then
    # The program has said why.
    exit "$status"
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
mkdir -p "$(dirname "$table")"
checks=()
failed=0

# check NAME SECONDS COMMAND...: its output to the terminal, its outcome to the table.
check() {
    local name=$1 seconds=$2 start=$SECONDS outcome
    shift 2
    echo "== $name" >&2
    timeout "$seconds" "$@" >"$log" 2>&1
    local status=$?
    cat "$log" >&2
    case $status in
        0) outcome=passed ;;
        124) outcome="stopped after $seconds s" ;;
        *) outcome="failed with status $status" ;;
    esac
    ((status == 0)) || failed=1
    local cases
    cases=$(sed -n 's/^\[doctest\] test cases: *\([0-9]*\) *| *\([0-9]*\) passed.*/\2 of \1 cases/p' \
        "$log")
    checks+=("| $name | $outcome${cases:+, $cases} | $((SECONDS - start)) s |")
}

find_sanitizer() {
    local place
    for place in "$(command -v compute-sanitizer)" "${CUDA_HOME:-/usr/local/cuda}"/bin/compute-sanitizer \
        /usr/local/cuda/bin/compute-sanitizer /usr/local/cuda/compute-sanitizer/compute-sanitizer; do
        if [[ -x "$place" ]]; then
            echo "$place"
            return
        fi
    done
}

check "device tests" 150 "$folder/test_gpu" "${selected[@]}"
check "a fault is told, and told again" 30 "$folder/test_gpu" --fault
sanitizer=$(find_sanitizer)
for tool in memcheck racecheck; do
    if [[ -n "$sanitizer" ]]; then
        check "compute-sanitizer $tool" 75 "$sanitizer" --tool "$tool" --error-exitcode 9 \
            "$folder/test_gpu" --test-case="short*"
    else
        checks+=("| compute-sanitizer $tool | not run: it is not on this machine | |")
    fi
done
check "benchmarks" 140 "$folder/bench_gpu" "${quick[@]}"

# A line of the benchmarks is a row: its case, its figures, what is wanted, and whether it is there.
rows() {
    awk '$1 == "gpu" && $2 != "device" {
        name = figures = wanted = met = ""
        if (match($0, / unsupported="/)) {
            name = substr($0, 5, RSTART - 5)
            figures = "not in this version: " substr($0, RSTART + 14, length($0) - RSTART - 14)
            gsub(/\|/, "/", figures)
            printf "| %s | %s | | |\n", name, figures
            next
        }
        for (i = 2; i <= NF; ++i) {
            split($i, pair, "=")
            if (pair[1] == "wanted") {
                wanted = "at least " pair[2] " of copy"
                met = share >= pair[2] ? "yes" : "no"
            } else if (pair[1] == "wanted_below") {
                wanted = "at most " pair[2] " us"
                met = time <= pair[2] ? "yes" : "no"
            } else if (pair[1] ~ /^(us|most|gbps|of_copy|bytes|chosen)$/) {
                if (pair[1] == "of_copy") share = pair[2] + 0
                if (pair[1] == "us") time = pair[2] + 0
                figures = figures (figures == "" ? "" : ", ") pair[1] " " pair[2]
            } else {
                name = name (name == "" ? "" : " ") $i
            }
        }
        printf "| %s | %s | %s | %s |\n", name, figures, wanted, met
    }' "$log"
}

{
    echo "# A run on a GPU"
    echo
    echo "- chip and driver: $device"
    echo "- command: \`$command\`, $(date -u +%Y-%m-%d), version $(git rev-parse --short HEAD 2>/dev/null ||
        echo unknown)"
    echo "- all of it took $SECONDS s"
    echo
    echo "| check | outcome | time |"
    echo "| --- | --- | --- |"
    printf '%s\n' "${checks[@]}"
    echo
    echo "| case | measured | wanted | reached |"
    echo "| --- | --- | --- | --- |"
    rows
} >"$table"
cat "$table"
exit "$failed"
