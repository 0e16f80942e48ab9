#!/usr/bin/env python3
"""Keeps the promise of docs/abi.md: what a released header said stays true.

  abi_guard.py check TREE     compares the library of a build tree with the released interface; prints
                              each incompatible change and exits with 1 if there is any
  abi_guard.py release TREE   makes the tree's interface the released one: with a release, never to
                              silence the check

The released interface lies in tests/abi/released: kvrt.abi, a dump by abidw of every exported function
with all types that it reaches; layout.txt and constants.txt as in the golden files. abidiff finds the
changes of functions and types; what it does not see is compared here: names of parameters (two of one
type may have changed places), structs that no function takes, constants. The script knows which
changes the ABI allows: new functions and constants, fields added at a struct's end, reserved fields
put to use.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
RELEASED = ROOT / "tests" / "abi" / "released"
GOLDEN = ROOT / "tests" / "abi" / "golden"

SUMMARY = re.compile(r"^(Leaf changes|Changed leaf types|Removed/Changed/Added \w+) summary:")
STRUCT = re.compile(r"^'struct (\w+)[^']*' changed:$")
GROWN = re.compile(r"^type size changed from (\d+) to (\d+) \(in bits\)$")
SAME_SIZE = "type size hasn't changed"
INSERTIONS = re.compile(r"^\d+ data member insertions?:$")
INSERTION = re.compile(r"^'.+', at offset (\d+) \(in bits\)")
RENAMES = "there are data member changes:"
RESERVED_USED = re.compile(r"^name of '\w+::reserved\w*' changed to ")
# What sized structs begin with can never grow: it is no sized struct itself.
FIXED_STRUCTS = {"kv_struct_header"}


class GuardError(Exception):
    """A tool failed, so that nothing is known."""


def dump(library, headers, target):
    """Writes abidw's dump of what `library` exports, free of paths of this machine."""
    result = subprocess.run(
        ["abidw", "--headers-dir", str(headers), "--drop-private-types",
         "--exported-interfaces-only", "--no-corpus-path", "--no-comp-dir-path", "--no-show-locs",
         "--no-elf-needed", "--type-id-style", "hash", "--out-file", str(target), str(library)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    if result.returncode != 0:
        raise GuardError(f"abidw failed on {library}: {result.stdout}")
    text = re.sub(r" path='[^']*/lib/", " path='lib/", target.read_text())
    if "<function-decl" not in text:
        raise GuardError(f"{library} has no debug information: nothing can be compared")
    target.write_text(text)


def is_compatible(struct, details):
    """Whether the lines that abidiff prints under a struct are changes that the ABI allows."""
    old_size = new_size = 0
    for line in details:
        grown = GROWN.match(line)
        insertion = INSERTION.match(line)
        if grown:
            old_size, new_size = int(grown[1]), int(grown[2])
            if new_size < old_size or struct in FIXED_STRUCTS:
                return False
        elif insertion:
            if not new_size or int(insertion[1]) < old_size:
                return False
        elif not (line in (SAME_SIZE, RENAMES) or INSERTIONS.match(line)
                  or RESERVED_USED.match(line)):
            return False
    return bool(details)


def incompatible_changes(old_dump, new_dump):
    """The incompatible changes between two dumps, a text each."""
    result = subprocess.run(
        ["abidiff", "--no-added-syms", "--harmless", "--leaf-changes-only", "--no-show-locs",
         str(old_dump), str(new_dump)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    if result.returncode & 3:
        raise GuardError(f"abidiff failed: {result.stdout}")
    paragraphs = [p.rstrip() for p in re.split(r"\n\s*\n", result.stdout) if p.strip()]
    changes = [p for p in paragraphs if not all(map(SUMMARY.match, p.splitlines()))]
    if result.returncode and not changes:
        raise GuardError(f"abidiff reports a change that is not understood: {result.stdout}")
    findings = []
    for change in changes:
        head, *details = change.splitlines()
        struct = STRUCT.match(head)
        if not (struct and is_compatible(struct[1], [line.strip() for line in details])):
            findings.append(change)
    return findings


def parameters(dump_file):
    """The names of each function's parameters, in order."""
    root = xml.etree.ElementTree.parse(dump_file).getroot()
    return {function.get("name"): [p.get("name", "") for p in function.findall("parameter")]
            for function in root.iter("function-decl")}


def changed_parameters(old_dump, new_dump):
    new = parameters(new_dump)
    return [f"parameters of {name} were ({', '.join(old)}) and are ({', '.join(new[name])})"
            for name, old in parameters(old_dump).items() if name in new and new[name] != old]


def read_layout(path):
    """{struct: (size, [(field, offset, size), ...])} of a golden layout file."""
    structs = {}
    for line in path.read_text().splitlines():
        name, *numbers = line.split()
        values = [int(number.split("=")[1]) for number in numbers]
        if line.startswith(" "):
            fields.append((name, *values))
        else:
            fields = []
            structs[name] = (values[0], fields)
    return structs


def changed_layouts(old, new):
    """Released structs whose fields moved, or that grew elsewhere than at the end."""
    findings = []
    for name, (size, fields) in old.items():
        if name not in new:
            findings.append(f"struct {name} is gone")
            continue
        new_size, new_fields = new[name]
        if new_size < size or (name in FIXED_STRUCTS and new_size != size):
            findings.append(f"struct {name} had {size} bytes and has {new_size}")
        for field, now in zip(fields, new_fields):
            renamed = field[0] != now[0] and not field[0].startswith("reserved")
            if renamed or field[1:] != now[1:]:
                findings.append(f"{name}: field {field} is now {now}")
        if len(new_fields) < len(fields):
            findings.append(f"struct {name} lost fields")
        findings += [f"{name}: new field {field} is not at the end"
                     for field in new_fields[len(fields):] if field[1] < size]
    return findings


def read_constants(path):
    return dict(line.split() for line in path.read_text().splitlines())


def changed_constants(old, new):
    """Released constants that are gone or have another value; the version's may grow."""
    findings = []
    for name, value in old.items():
        if name.startswith("KVRT_VERSION"):
            continue
        if name not in new:
            findings.append(f"constant {name} is gone")
        elif new[name] != value:
            findings.append(f"constant {name} was {value} and is {new[name]}")
    return findings


def check(tree):
    with tempfile.TemporaryDirectory(prefix="kvrt-abi-") as folder:
        current = pathlib.Path(folder) / "current.abi"
        dump(tree / "libkvrt.so", ROOT / "include" / "kvrt", current)
        findings = incompatible_changes(RELEASED / "kvrt.abi", current)
        findings += changed_parameters(RELEASED / "kvrt.abi", current)
    findings += changed_layouts(read_layout(RELEASED / "layout.txt"),
                                read_layout(GOLDEN / "layout.txt"))
    return findings + changed_constants(read_constants(RELEASED / "constants.txt"),
                                        read_constants(GOLDEN / "constants.txt"))


def release(tree):
    RELEASED.mkdir(exist_ok=True)
    dump(tree / "libkvrt.so", ROOT / "include" / "kvrt", RELEASED / "kvrt.abi")
    for name in ("layout.txt", "constants.txt"):
        (RELEASED / name).write_text((GOLDEN / name).read_text())


def main(arguments):
    if len(arguments) != 2 or arguments[0] not in ("check", "release"):
        print("usage: abi_guard.py check|release TREE", file=sys.stderr)
        return 2
    tree = pathlib.Path(arguments[1]).resolve()
    try:
        if arguments[0] == "release":
            release(tree)
            return 0
        findings = check(tree)
    except GuardError as error:
        print(error, file=sys.stderr)
        return 1
    for finding in findings:
        print(f"incompatible: {finding}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
