# What both scripts share; sourced with PREFIX as $1. Builds lie under the repository's
# build/bindings/go, and nothing is fetched from anywhere.
[ $# -eq 1 ] || { echo "usage: $0 PREFIX" >&2; exit 2; }
prefix=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")"
repository=$(cd ../.. && pwd)
build=$repository/build/bindings/go
mkdir -p "$build"
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
export LD_LIBRARY_PATH=$prefix/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export KVRT_GOLDEN_DIR=$repository/tests/abi/golden
export CGO_ENABLED=1 GOCACHE=$build/cache GOFLAGS=-mod=mod GOPROXY=off GOTOOLCHAIN=local
