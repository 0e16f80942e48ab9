#!/usr/bin/env bash
# Everything that only a GPU can show, in at most 8 minutes: tests of pools on it against pools on
# the CPU, what a fault looks like, benchmarks, others' attention at the same shapes where PyTorch or
# FlashInfer is installed, and compute-sanitizer on short tests; one table in Markdown, and all that
# was printed in a .log beside it.
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
# Exit status: 0 all is well (targets that are missed are in the table, and no failure), 1 something
# failed, 2 wrong arguments, 3 there is no GPU here.
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
# Seconds from here on: parts get what is left of it, and at most their own limits, which add up to
# no more.
readonly all_of_it=470
SECONDS=0
device=$(timeout -k 5 30 "$folder/test_gpu" --device)
status=$?
if ((status != 0)); then
    # The program has said why, if it came to that.
    ((status != 124)) || echo "the driver gives no answer in 30 s" >&2
    exit "$status"
fi

log=$(mktemp)
lines=$(mktemp)
trap 'rm -f "$log" "$lines"' EXIT
mkdir -p "$(dirname "$table")"
full_log="${table%.md}.log"
: >"$full_log"
checks=()
failed=0

skip() { checks+=("| $1 | not run: $2 | |"); }

# check NAME SECONDS COMMAND...: its output to the terminal and the log, its outcome to the table.
check() {
    local name=$1 seconds=$2 start=$SECONDS outcome
    shift 2
    local left=$((all_of_it - SECONDS))
    if ((left < 1)); then
        skip "$name" "no time is left of $all_of_it s"
        failed=1
        : >"$log"
        return
    fi
    ((seconds <= left)) || seconds=$left
    echo "== $name" | tee -a "$full_log" >&2
    timeout -k 5 "$seconds" "$@" >"$log" 2>&1
    local status=$?
    # 137: it had to be killed, or somebody else has.
    ((status == 137 && SECONDS - start >= seconds)) && status=124
    tee -a "$full_log" <"$log" >&2
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
check "a fault is told, and told again" 20 "$folder/test_gpu" --fault
check "benchmarks" 110 "$folder/bench_gpu" "${quick[@]}"
cp "$log" "$lines"
if command -v python3 >/dev/null; then
    check "others at the same shapes" 60 python3 bench/gpu_peers.py "$lines"
    cat "$log" >>"$lines"
else
    skip "others at the same shapes" "there is no python3 on this machine"
fi
sanitizer=$(find_sanitizer)
for tool in memcheck racecheck; do
    if [[ -n "$sanitizer" ]]; then
        check "compute-sanitizer $tool" 65 "$sanitizer" --tool "$tool" --error-exitcode 9 \
            "$folder/test_gpu" --test-case="short*"
    else
        skip "compute-sanitizer $tool" "it is not on this machine"
    fi
done

# A line of the benchmarks is a row: its case, its figures, what is wanted, and whether it is there,
# which the benchmarks know better than their rounded figures. Behind them, how many are.
rows() {
    awk '$1 == "gpu" && $2 != "device" && $2 != "shape" {
        name = figures = wanted = met = ""
        if (match($0, / (unsupported|absent)="/)) {
            name = substr($0, 5, RSTART - 5)
            figures = substr($0, RSTART + RLENGTH, length($0) - RSTART - RLENGTH)
            figures = (substr($0, RSTART + 1, 1) == "u" ? "not in this version: " : \
                "not measured: ") figures
            gsub(/\|/, "/", figures)
            printf "| %s | %s | | |\n", name, figures
            next
        }
        for (i = 2; i <= NF; ++i) {
            if (split($i, pair, "=") < 2) pair[1] = ""
            if (pair[1] == "wanted") {
                wanted = "at least " pair[2] " of copy"
            } else if (pair[1] == "wanted_below") {
                wanted = "at most " pair[2] " us"
            } else if (pair[1] == "wanted_of_ours") {
                wanted = "at least " pair[2] " of ours"
            } else if (pair[1] == "met") {
                met = pair[2]
            } else if (pair[1] ~ \
                       /^(us|most|tables|host|gbps|of_copy|bytes|chosen|way|ours|of_ours)$/) {
                figures = figures (figures == "" ? "" : ", ") pair[1] " " pair[2]
            } else {
                name = name (name == "" ? "" : " ") $i
            }
        }
        targets += met != ""
        reached += met == "yes"
        printf "| %s | %s | %s | %s |\n", name, figures, wanted, met
    }
    END { printf "\n%d of %d targets are reached.\n", reached, targets }' "$lines"
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
