#!/usr/bin/env bash
# Builds the binding against a libkvrt that is installed in PREFIX and runs all its tests, under
# build/bindings/rust. The last line of the output counts test cases, and checks as one each.
set -uo pipefail
[ $# -eq 1 ] || { echo "usage: $0 PREFIX" >&2; exit 2; }
prefix=$(cd "$1" && pwd) || exit 2
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2
root=$(cd ../.. && pwd)
build=$root/build/bindings/rust
mkdir -p "$build/empty"
export CARGO_TARGET_DIR=$build/target
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
export LD_LIBRARY_PATH=$prefix/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export KVRT_GOLDEN_DIR=$root/tests/abi/golden
# Warnings are errors here, but not for those who use the crates.
export RUSTFLAGS="-D warnings" RUSTDOCFLAGS="-D warnings"
unset KVRT_LIB_DIR
passed=0
failed=0
log=$build/check.log

# check NAME COMMAND...: one case; the output is shown when it fails.
check() {
    local name=$1
    shift
    if "$@" >"$log" 2>&1; then
        echo "check $name ... ok"
        passed=$((passed + 1))
    else
        cat "$log"
        echo "check $name ... FAILED"
        failed=$((failed + 1))
    fi
}

# skip NAME REASON: no case; whoever runs this script shows such lines.
skip() {
    echo "skipped: check $1: $2"
}

# The build script must fail, and say these words.
build_fails_with() {
    local words=$1
    shift
    local output
    output=$(env "$@" cargo build --offline -p kvrt-sys --target-dir "$build/search" 2>&1) && {
        echo "the build did not fail: $output"
        return 1
    }
    [[ $output == *"$words"* ]] || { echo "'$words' is not in: $output"; return 1; }
}

build_succeeds() {
    env "$@" cargo build --offline -p kvrt-sys --target-dir "$build/search"
}

overhead_prints_its_line() {
    ./build_programs.sh "$prefix" || return 1
    local output
    output=$("$build/overhead") || return 1
    grep -Exq 'overhead language=rust layers=32 sequences=64 median_us=[0-9]+\.[0-9]' \
        <<<"$output" && [ "$(wc -l <<<"$output")" = 1 ] || { echo "$output"; return 1; }
}

cargo test --offline --workspace 2>&1 | tee "$build/test.log"
status=${PIPESTATUS[0]}
read -r passed failed < <(awk '/^test result:/ { passed += $4; failed += $6 }
    END { print passed + 0, failed + 0 }' "$build/test.log")
# A test program that did not build, or died, has no result of its own.
if [ "$status" -ne 0 ] && [ "$failed" -eq 0 ]; then failed=1; fi

check "the example programs are built, overhead prints its line" overhead_prints_its_line
check "documentation without warnings" cargo doc --offline --no-deps --quiet
if cargo fmt --version >/dev/null 2>&1; then
    check "formatted" cargo fmt --check
else
    skip "formatted" "cargo fmt is not installed"
fi
if cargo clippy --version >/dev/null 2>&1; then
    check "clippy, which also knows what Rust 1.75 lacks" \
        cargo clippy --offline --all-targets --quiet
else
    skip "clippy" "cargo clippy is not installed"
fi
# Cargo unpacks and builds a crate of one version once, and would take those of yesterday.
rm -rf "$build/cargo-home" "$build/packages"
check "both packages, from which the crates are built" \
    env CARGO_HOME="$build/cargo-home" CARGO_TARGET_DIR="$build/packages" \
    cargo package --workspace --offline --allow-dirty
check "a library folder given by hand" build_succeeds KVRT_LIB_DIR="$prefix/lib" PKG_CONFIG=false
check "a library folder set to nothing counts as not set" build_succeeds KVRT_LIB_DIR=
check "a wrong library folder is named" \
    build_fails_with "$build/empty/libkvrt.so: no such file" KVRT_LIB_DIR="$build/empty"
check "what pkg-config says is passed on" build_fails_with "Package kvrt was not found" \
    PKG_CONFIG_PATH="$build/empty" PKG_CONFIG_LIBDIR="$build/empty"
check "a missing pkg-config is named" \
    build_fails_with "$build/empty/pkg-config --libs" PKG_CONFIG="$build/empty/pkg-config"

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
