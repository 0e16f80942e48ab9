#!/usr/bin/env bash
# Builds the binding, its examples and its tests against a libkvrt that is installed in PREFIX, and
# runs the tests under mono and, with KVRT_DOTNET_ROOT, under .NET. The last line counts test cases
# over both runtimes.
. "$(dirname "${BASH_SOURCE[0]}")/compile.sh"

export LD_LIBRARY_PATH=$prefix/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export KVRT_GOLDEN_DIR=$repository/tests/abi/golden
unset KVRT_LIBRARY # tests of the loader set it
passed=0
failed=0

# The program in the README, which a test runs.
mkdir -p "$build_dir"
sed -n '/^```csharp$/,/^```$/p' "$source_dir/README.md" | sed '/^```/d' >"$build_dir/Readme.cs"

# run_tests RUNTIME COMMAND...
run_tests() {
    local runtime=$1 output last status=0
    shift
    compile_binding "$runtime"
    compile_program "$runtime" Readme "$build_dir/Readme.cs"
    compile_program "$runtime" Batching "$source_dir"/examples/Batching/*.cs
    compile_program "$runtime" Overhead "$source_dir"/examples/Overhead/*.cs
    compile_tests "$runtime"
    output=$("$@") || status=$?
    last=$(tail -n 1 <<<"$output")
    echo "$output" | sed "s/^/$runtime: /"
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
        passed=$((passed + BASH_REMATCH[1]))
        failed=$((failed + BASH_REMATCH[2]))
    else
        echo "$runtime: the tests did not run to their end (exit status $status)"
        failed=$((failed + 1))
    fi
}

compile_tests() {
    local references=("-r:$build_dir/dotnet/Batching.dll")
    [ "$1" = dotnet ] || references=("-r:$build_dir/mono/Batching.exe" -r:System.Xml.dll)
    compile_program "$1" Tests "${references[@]}" "$source_dir"/tests/*.cs
}

run_tests mono mono --debug "$build_dir/mono/Tests.exe"
if [ -n "$dotnet_root" ]; then
    run_tests dotnet "$dotnet_root/dotnet" exec "$build_dir/dotnet/Tests.dll"
else
    echo "dotnet: skipped, KVRT_DOTNET_ROOT is not set (a folder with dotnet and its runtime)"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -ne 0 ]
