#!/usr/bin/env python3
"""What each CUDA kernel takes of a multiprocessor: registers, stack, spills, static shared memory.

  scripts/kernel_resources.py           prints the table
  scripts/kernel_resources.py --check   compares it with docs/kernels.md; 1: it differs, or a kernel
                                        spills; 2: there is no nvcc
  scripts/kernel_resources.py --write   writes it there

Kernels are compiled for the architectures that are delivered, with the flags that they are delivered
with. Other versions of nvcc may choose other registers: the table names its version, and with any
other only spills are looked at.
"""

import argparse
import pathlib
import re
import sys

import compile_kernels
from compile_kernels import ARCHITECTURES, FLAGS, NO_NVCC, find_nvcc, version_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- resources: begin -->\n", "<!-- resources: end -->\n"

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def parse(output):
    """{kernel: [registers, stack, spilled, shared]} of what ptxas -v says."""
    kernels, name = {}, None
    for line in output.splitlines():
        if found := ENTRY.search(line):
            name = found[1]
            kernels[name] = [0, 0, 0, 0]
        elif name and (found := FRAME.search(line)):
            kernels[name][1] = int(found[1])
            kernels[name][2] = int(found[2]) + int(found[3])
        elif name and (found := USED.search(line)):
            kernels[name][0] = int(found[1])
            shared = SHARED.search(line)
            kernels[name][3] = int(shared[1]) if shared else 0
    return kernels


def measure(nvcc, version):
    """{kernel: {architecture: [registers, stack, spilled, shared]}}"""
    table = {}
    for (_, architecture), folder in compile_kernels.compile_all(nvcc, version).items():
        for name, numbers in parse((folder / "ptxas.txt").read_text()).items():
            table.setdefault(name, {})[architecture] = numbers
    return table


def format_table(table, version):
    heads = [f"sm_{each}" for each in ARCHITECTURES]
    lines = [f"nvcc {version}, `{' '.join(FLAGS)}`; registers of a thread / bytes spilled / bytes of "
             "static shared memory:", "", f"| kernel | {' | '.join(heads)} |",
             "| --- |" + " ---: |" * len(heads)]
    for name in sorted(table):
        cells = []
        for architecture in ARCHITECTURES:
            registers, _, spilled, shared = table[name][architecture]
            cells.append(f"{registers} / {spilled} / {shared}")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def spills_of(table):
    """What no kernel may have: spills, and arrays that ended on the stack."""
    return [f"{name} for sm_{architecture}: {numbers[2]} bytes spilled, {numbers[1]} of stack"
            for name, by in sorted(table.items()) for architecture, numbers in by.items()
            if numbers[1] or numbers[2]]


def committed():
    text = PAGE.read_text()
    return text[text.index(BEGIN) + len(BEGIN):text.index(END)]


def check(table, version):
    """What is wrong, as lines."""
    findings = spills_of(table)
    expected = committed()
    if f"nvcc {version}," in expected and expected != format_table(table, version):
        findings.append("docs/kernels.md has other numbers: scripts/kernel_resources.py --write")
    return findings


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        print(NO_NVCC, file=sys.stderr)
        return 2
    version = version_of(nvcc)
    table = measure(nvcc, version)
    if options.write:
        text = PAGE.read_text()
        first, last = text.index(BEGIN) + len(BEGIN), text.index(END)
        PAGE.write_text(text[:first] + format_table(table, version) + text[last:])
    elif options.check:
        findings = check(table, version)
        print("\n".join(findings))
        return 1 if findings else 0
    else:
        print(format_table(table, version), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
