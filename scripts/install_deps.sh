#!/usr/bin/env bash
# Installs the Debian packages that building needs, if any is missing, then builds the private
# static libraries (scripts/build_deps.sh). Quick when everything is there.
#
#   scripts/install_deps.sh          to build everything
#   scripts/install_deps.sh --test   also what the tests run
#   scripts/install_deps.sh --tools  also clang-format and clang-tidy
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(
    build-essential cmake ninja-build pkg-config ca-certificates
    doctest-dev libfmt-dev libxxhash-dev libopenblas-pthread-dev
    python3 python3-venv # model download
)
case "${1:-}" in
"") ;;
--test) packages+=(clang) ;; # the header is compiled by both compilers
--tools) packages+=(clang-format clang-tidy) ;;
*)
    echo "unknown argument: $1" >&2
    exit 2
    ;;
esac

if ! command -v dpkg-query >/dev/null; then
    echo "this is not a Debian system; install the equivalents of: ${packages[*]}" >&2
    exit 1
fi

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
    [[ "$status" == installed ]] || missing+=("$package")
done

if ((${#missing[@]})); then
    as_root=()
    if (($(id -u) != 0)); then
        if ! command -v sudo >/dev/null; then
            echo "missing packages, and neither root nor sudo to install them: ${missing[*]}" >&2
            exit 1
        fi
        as_root=(sudo)
    fi
    echo "installing: ${missing[*]}"
    "${as_root[@]}" apt-get update -q
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends "${missing[@]}"
fi

exec scripts/build_deps.sh
