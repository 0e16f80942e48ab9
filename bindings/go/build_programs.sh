#!/usr/bin/env bash
# Builds the example programs against a libkvrt that is installed in PREFIX, and puts them into
# build/bindings/go: batching and overhead. The caller sets LD_LIBRARY_PATH to run them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
go build -o "$build/" ./examples/batching ./examples/overhead
