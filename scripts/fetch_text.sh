#!/usr/bin/env bash
# Makes build/texts/debian-handbook.txt: the prose of The Debian Administrator's Handbook (English,
# some 990 KB), out of Debian's package; nothing is installed. Prints the text's path. Does nothing
# when the file is there and whole.
set -euo pipefail
cd "$(dirname "$0")/.."

# Numbers measured on the text hold for this text alone: another version needs another checksum.
package=debian-handbook
version=11.20220922
sum=0ba71b88442b751be29858b8f183d03e379a90af561f304618c2ae88c045ed5a
text=$PWD/build/texts/$package.txt
first_page=usr/share/doc/debian-handbook/html/en-US/preface.html

is_whole() { [[ -f "$1" ]] && echo "$sum  $1" | sha256sum --check --status; }

if is_whole "$text"; then
    echo "$text"
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p build/texts

echo "fetching $package $version" >&2
if ! (cd "$work" && apt-get download --quiet --quiet "$package=$version") >"$work/log" 2>&1; then
    cat "$work/log" >&2
    echo "no $package $version to be had: run apt-get update on a Debian 12 machine, or give" \
        "another text to evaluate --text" >&2
    exit 1
fi
dpkg-deb --extract "$work"/*.deb "$work/package"
python3 scripts/html_prose.py "$work/package/$first_page" >"$text.part"

if ! is_whole "$text.part"; then
    rm -f "$text.part"
    echo "the text of $package $version does not have the expected checksum $sum" >&2
    exit 1
fi
mv "$text.part" "$text"
echo "$text"
