#!/usr/bin/env bash
# Builds the example programs against a libkvrt that is installed in PREFIX, and puts them into
# build/bindings/rust: batching and overhead. The caller sets LD_LIBRARY_PATH to run them.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 PREFIX" >&2; exit 2; }
prefix=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")"
build=$(cd ../.. && pwd)/build/bindings/rust
mkdir -p "$build"
export CARGO_TARGET_DIR=$build/target
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
cargo build --offline --quiet --release -p kvrt --example batching --example overhead
cp "$CARGO_TARGET_DIR/release/examples/batching" "$CARGO_TARGET_DIR/release/examples/overhead" \
    "$build/"
