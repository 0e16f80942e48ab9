#!/usr/bin/env bash
# Fetches a .NET runtime (no SDK, 27 MB) into build/dotnet, so that the C# binding is tested and timed
# on .NET too and not on mono alone. It travels inside a Python package. Prints the folder of the
# `dotnet` program; prints nothing where there is no such package for the machine. Does nothing when
# it is there.
set -euo pipefail
cd "$(dirname "$0")/.."

package=dotnetcore2==3.1.23
sum=5f076ddc39da0c685e7de20ecb91ee81185928918ec86fbeb3bffc55dd867ab5
folder=$PWD/build/dotnet/bin

if [[ "$(uname -sm)" != "Linux x86_64" ]]; then
    echo "no .NET runtime to fetch for $(uname -sm): C# is tested on mono alone" >&2
    exit 0
fi
if [[ "$(cat build/dotnet/.sum 2>/dev/null)" == "$sum" ]]; then
    echo "$folder"
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "fetching a .NET runtime" >&2
scripts/fetch_wheel.sh "$package" "$sum" "$work"
python3 -m zipfile -e "$work"/*.whl "$work/out"
rm -rf build/dotnet
mkdir -p build
mv "$work/out/dotnetcore2" build/dotnet
chmod +x "$folder/dotnet"
"$folder/dotnet" --list-runtimes >/dev/null
echo "$sum" >build/dotnet/.sum
echo "$folder"
