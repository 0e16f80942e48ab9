#!/usr/bin/env bash
# Builds the example programs against a libkvrt that is installed in PREFIX, and puts launchers into
# build/bindings/csharp: batching and overhead, which run under mono, and with KVRT_DOTNET_ROOT
# batching-dotnet and overhead-dotnet. The caller sets LD_LIBRARY_PATH to run them.
. "$(dirname "${BASH_SOURCE[0]}")/compile.sh"

# write_launcher NAME COMMAND
write_launcher() {
    printf '#!/bin/sh\nexec %s "$@"\n' "$2" >"$build_dir/$1"
    chmod +x "$build_dir/$1"
}

for runtime in $(runtimes); do
    compile_binding "$runtime"
    compile_program "$runtime" Batching "$source_dir"/examples/Batching/*.cs
    compile_program "$runtime" Overhead "$source_dir"/examples/Overhead/*.cs
done
write_launcher batching "mono '$build_dir/mono/Batching.exe'"
write_launcher overhead "mono '$build_dir/mono/Overhead.exe'"
if [ -n "$dotnet_root" ]; then
    write_launcher batching-dotnet "'$dotnet_root/dotnet' exec '$build_dir/dotnet/Batching.dll'"
    write_launcher overhead-dotnet "'$dotnet_root/dotnet' exec '$build_dir/dotnet/Overhead.dll'"
else
    echo "KVRT_DOTNET_ROOT is not set: no batching-dotnet and overhead-dotnet"
fi
