#!/usr/bin/env bash
# Builds private static copies of mimalloc and Highway from Debian's source packages into build/deps
# (or $KVRT_DEPS_DIR): position independent, hidden visibility, no override of malloc.
#
# Why not Debian's binaries: libmimalloc.so defines malloc, free and operator new for the whole
# process, and libhwy comes as a shared library only, which libkvrt.a could not carry inside.
#
# Source packages come through apt with its usual signature checks, from the archives that this
# machine is already set up for; the deb-src lines live in a temporary folder, the system's own
# configuration is not touched. Needs no root.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=${KVRT_DEPS_DIR:-$PWD/build/deps}
recipe=$(sha256sum scripts/build_deps.sh | cut -d' ' -f1)

mkdir -p "$prefix"
exec 9>"$prefix/.lock"
flock 9 # several builds may share the folder

is_current() {
    [[ "$(cat "$prefix/.recipe" 2>/dev/null)" == "$recipe" &&
        -f "$prefix/lib/libmimalloc.a" && -f "$prefix/lib/libhwy.a" ]]
}
if is_current; then
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$work/log

run() { # runs quietly, shows its output when it fails
    if ! "$@" >"$log" 2>&1; then
        cat "$log" >&2
        echo "failed: $*" >&2
        exit 1
    fi
}

# ---- Source packages -----------------------------------------------------------------------------

codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
apt-get indextargets --format 'deb-src $(REPO_URI) $(RELEASE) $(COMPONENT)' \
    'Created-By: Packages' | sort -u |
    awk -v name="$codename" 'index($3, name) == 1' >"$work/sources.list"
if [[ ! -s "$work/sources.list" ]]; then
    echo "apt has no archive for '$codename' to take source packages from" >&2
    exit 1
fi

mkdir -p "$work"/{lists,cache/archives,source}/partial
apt_options=(-q
    -o "Dir::Etc::SourceList=$work/sources.list" -o "Dir::Etc::SourceParts=/dev/null"
    -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache"
    -o "APT::Get::List-Cleanup=0" -o "APT::Update::Post-Invoke-Success::="
    -o "Acquire::Languages=none" -o "APT::Sandbox::User=$(id -un)" -o "Acquire::Retries=3")

echo "building private mimalloc and Highway into $prefix"
run apt-get "${apt_options[@]}" update
cd "$work/source"
run apt-get "${apt_options[@]}" source mimalloc highway
cd "$OLDPWD"

# ---- Build ---------------------------------------------------------------------------------------

common=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_POSITION_INDEPENDENT_CODE=ON
    -DCMAKE_C_VISIBILITY_PRESET=hidden -DCMAKE_CXX_VISIBILITY_PRESET=hidden
    -DCMAKE_VISIBILITY_INLINES_HIDDEN=ON -DBUILD_SHARED_LIBS=OFF "-DCMAKE_INSTALL_PREFIX=$work/out"
    -DCMAKE_INSTALL_LIBDIR=lib)

# MI_LOCAL_DYNAMIC_TLS: libkvrt.so may be loaded with dlopen, when the room for static thread-local
# storage can be used up.
run cmake -S "$work"/source/mimalloc-*/ -B "$work/mimalloc" "${common[@]}" -DMI_OVERRIDE=OFF \
    -DMI_BUILD_SHARED=OFF -DMI_BUILD_OBJECT=OFF -DMI_BUILD_TESTS=OFF -DMI_LOCAL_DYNAMIC_TLS=ON \
    -DMI_INSTALL_TOPLEVEL=ON
run cmake --build "$work/mimalloc" --target install

run cmake -S "$work"/source/highway-*/ -B "$work/highway" "${common[@]}" -DBUILD_TESTING=OFF \
    -DHWY_ENABLE_TESTS=OFF -DHWY_ENABLE_EXAMPLES=OFF -DHWY_ENABLE_CONTRIB=OFF
run cmake --build "$work/highway" --target install

mkdir -p "$prefix/include" "$prefix/lib"
cp -Rp "$work/out/include/hwy" "$prefix/include/"
find "$work/out" -name 'mimalloc.h' -exec cp -p {} "$prefix/include/" \;
find "$work/out" -name 'libmimalloc*.a' -exec cp {} "$prefix/lib/libmimalloc.a" \;
cp "$work/out/lib/libhwy.a" "$prefix/lib/"

symbols=$(nm --defined-only "$prefix/lib/libmimalloc.a")
if grep -qE ' [TWtw] (malloc|free|calloc|_Znwm)$' <<<"$symbols"; then
    echo "the private mimalloc defines malloc: its override must be off" >&2
    exit 1
fi
echo "$recipe" >"$prefix/.recipe"
is_current
