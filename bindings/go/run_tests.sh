#!/usr/bin/env bash
# Formats, vets and tests the binding against a libkvrt that is installed in PREFIX. Every test runs
# twice: with the strict checks of pointers between Go and C, and with the race detector. The last
# line is "N passed, M failed"; a skipped test has failed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
passed=0
failed=0

# check NAME COMMAND...: one case, which passes when the command succeeds and prints nothing.
check() {
    local name=$1 said
    shift
    if said=$("$@" 2>&1) && [ -z "$said" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        printf -- '--- FAIL: %s\n%s\n' "$name" "$said"
    fi
}

# run_suite NAME ARGUMENTS...: go test, whose cases are counted from its log.
run_suite() {
    local name=$1 log=$build/$1.log status=0 bad
    shift
    go test -v -count=1 "$@" ./... >"$log" 2>&1 || status=$?
    passed=$((passed + $(grep -c '^ *--- PASS' "$log" || true)))
    bad=$(grep -cE '^ *--- (FAIL|SKIP)' "$log" || true)
    # A build that fails, a crash or a timeout have no line of their own.
    [ "$status" -eq 0 ] || [ "$bad" -gt 0 ] || bad=1
    failed=$((failed + bad))
    grep -E ': skipped: ' "$log" || true # nothing is left out in silence
    if [ "$bad" -gt 0 ]; then
        printf 'suite %s, whole log in %s\n' "$name" "$log"
        grep -vE '^ *(=== |--- PASS)' "$log" | tail -n 200
    fi
}

check gofmt gofmt -l .
check vet go vet ./...
GODEBUG=cgocheck=2 run_suite cgocheck
run_suite race -race
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
