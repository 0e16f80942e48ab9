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
# Go's build cache does not look into headers that lie elsewhere; a flag makes it see a new one.
header_sum=$(cat "$prefix"/include/kvrt/*.h | cksum | cut -d ' ' -f 1)
export CGO_CFLAGS="-O2 -g -DKVRT_GO_HEADER_SUM=$header_sum"
export CGO_ENABLED=1 GOCACHE=$build/cache GOFLAGS=-mod=mod GOPROXY=off GOTOOLCHAIN=local
