# Compiles the binding and programs over it with mono's compiler, for mono and, when the folder of a
# .NET runtime is known, for that. Sourced by run_tests.sh and build_programs.sh.
#
#   PREFIX            where libkvrt is installed (the first argument of those scripts)
#   KVRT_DOTNET_ROOT  a folder with `dotnet` and shared/Microsoft.NETCore.App/; unset: mono alone
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: $0 PREFIX" >&2; exit 2; }
prefix=$(cd "$1" && pwd)
source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$source_dir/../.." && pwd)
build_dir=$repository/build/bindings/csharp
dotnet_root=${KVRT_DOTNET_ROOT:-}
compiler=(mcs -langversion:latest -unsafe -optimize -warn:4 -warnaserror)

if [ -n "$dotnet_root" ]; then
    dotnet_root=$(cd "$dotnet_root" && pwd)
    chmod +x "$dotnet_root/dotnet" 2>/dev/null || true # a wheel unpacks without this bit
    "$dotnet_root/dotnet" --list-runtimes >/dev/null || {
        echo "KVRT_DOTNET_ROOT=$dotnet_root holds no working dotnet" >&2
        exit 1
    }
    framework=$(echo "$dotnet_root"/shared/Microsoft.NETCore.App/*/)
    dotnet_references=(-nostdlib -noconfig -nowarn:1701,1702
        -d:NETCOREAPP,NETCOREAPP3_0_OR_GREATER,NETCOREAPP3_1_OR_GREATER)
    for assembly in "$framework"System.*.dll; do
        dotnet_references+=("-r:$assembly")
    done
fi

# compile RUNTIME TARGET NAME ARGUMENT...: NAME.dll or, for mono's programs, NAME.exe.
compile() {
    local runtime=$1 target=$2 name=$3 output=$build_dir/$1/$3.dll
    shift 3
    mkdir -p "$build_dir/$runtime"
    if [ "$runtime" = mono ]; then
        [ "$target" = library ] || output=$build_dir/mono/$name.exe
        "${compiler[@]}" -target:"$target" -out:"$output" "$@"
    else
        "${compiler[@]}" "${dotnet_references[@]}" -target:"$target" -out:"$output" "$@"
        [ "$target" = library ] || write_runtime_config "$build_dir/dotnet/$name.runtimeconfig.json"
    fi
}

# Invariant globalization: the programs need no ICU.
write_runtime_config() {
    cat >"$1" <<EOF
{
  "runtimeOptions": {
    "tfm": "netcoreapp3.1",
    "framework": { "name": "Microsoft.NETCore.App", "version": "3.1.0" },
    "configProperties": { "System.Globalization.Invariant": true }
  }
}
EOF
}

compile_binding() {
    local documentation=()
    [ "$1" = dotnet ] || documentation=(-doc:"$build_dir/mono/Kvrt.xml")
    mkdir -p "$build_dir/$1"
    compile "$1" library Kvrt "${documentation[@]}" "$source_dir"/Kvrt/*.cs \
        "$source_dir"/Kvrt/Native/*.cs
    cp "$source_dir/Kvrt/Kvrt.dll.config" "$build_dir/$1/"
}

# compile_program RUNTIME NAME ARGUMENT...
compile_program() {
    local runtime=$1 name=$2
    shift 2
    compile "$runtime" exe "$name" -r:"$build_dir/$runtime/Kvrt.dll" "$@"
}

# runtimes: the names of those to build for.
runtimes() {
    echo mono
    [ -z "$dotnet_root" ] || echo dotnet
}
