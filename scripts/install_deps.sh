#!/usr/bin/env bash
# Installs the Debian packages that building needs, if any is missing, then builds the private
# static libraries (scripts/build_deps.sh). Quick when everything is there.
#
#   scripts/install_deps.sh              to build everything
#   scripts/install_deps.sh --test       also what the tests run
#   scripts/install_deps.sh --bindings   also the toolchains of Rust, Go and C#, and a .NET runtime
#   scripts/install_deps.sh --tools      also clang-format and clang-tidy
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(
    build-essential cmake ninja-build pkg-config ca-certificates
    doctest-dev libfmt-dev libxxhash-dev libopenblas-pthread-dev
    python3 python3-venv # model download
)
# Debian 12's own Rust is older than the bindings allow, the one for its browsers is not. Whoever has
# a newer one keeps it.
rust_is_missing() {
    local version
    version=$(rustc --version 2>/dev/null | cut -d' ' -f2) || return 0
    command -v cargo >/dev/null || return 0
    ! printf '1.75.0\n%s\n' "$version" | sort --version-sort --check=quiet
}

with_bindings=false
for option in "$@"; do
    case "$option" in
    --test) packages+=(clang abigail-tools fakeroot dpkg-dev ccache) ;; # both compilers, ABI, packages
    --bindings)
        with_bindings=true
        packages+=(golang-go mono-mcs mono-runtime)
        if rust_is_missing; then
            packages+=(rustc-web cargo-web)
        fi
        ;;
    --tools) packages+=(clang-format clang-tidy) ;;
    *)
        echo "unknown argument: $option" >&2
        exit 2
        ;;
    esac
done

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

if $with_bindings; then
    scripts/fetch_dotnet.sh >/dev/null
fi

exec scripts/build_deps.sh
