#!/usr/bin/env python3
"""What each CUDA kernel takes of a multiprocessor: registers, stack, spills, static shared memory.

  scripts/kernel_resources.py           prints the table
  scripts/kernel_resources.py --check   compares it with docs/kernels.md; 1: it differs, or a kernel
                                        spills; 2: there is no nvcc
  scripts/kernel_resources.py --write   writes it there

Kernels are compiled for the architectures that are delivered, with the flags that they are delivered
with. Other versions of nvcc may choose other registers: the table names its version, and with any
other only spills are looked at. Results are kept in build/kernels by a digest of sources and compiler.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "kernels.md"
CACHE = ROOT / "build" / "kernels"
ARCHITECTURES = ("80", "90a", "100")
# No contraction: bytes that kernels store are those of the CPU.
FLAGS = ("-std=c++20", "-O3", "-fmad=false")
BEGIN, END = "<!-- resources: begin -->\n", "<!-- resources: end -->\n"
NO_NVCC = "no nvcc: scripts/fetch_cuda.sh puts one into build/cuda"

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def find_nvcc():
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", str(ROOT / "build" / "cuda")]
    for home in filter(None, homes):
        nvcc = pathlib.Path(home) / "bin" / "nvcc"
        if nvcc.exists():
            return str(nvcc)
    return shutil.which("nvcc")


def version_of(nvcc):
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release [\d.]+, V([\d.]+)", said)[1]


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


def compile_one(nvcc, source, architecture):
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, *FLAGS, f"-I{ROOT}", f"-arch=sm_{architecture}", "-Xptxas", "-v", "-cubin",
                   "-o", f"{folder}/kernel.cubin", str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    return parse(result.stdout + result.stderr)


def digest_of(version):
    digest = hashlib.sha256(f"{version} {FLAGS} {ARCHITECTURES}".encode())
    for path in sorted((ROOT / "kernels").glob("*.*")) + [pathlib.Path(__file__)]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def measure(nvcc, version):
    """{kernel: {architecture: [registers, stack, spilled, shared]}}"""
    cached = CACHE / f"{digest_of(version)}.json"
    if cached.exists():
        return json.loads(cached.read_text())
    jobs = [(source, architecture) for source in sorted((ROOT / "kernels").glob("*.cu"))
            for architecture in ARCHITECTURES]
    table = {}
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as workers:
        results = workers.map(lambda job: compile_one(nvcc, *job), jobs)
        for (_, architecture), kernels in zip(jobs, results):
            for name, numbers in kernels.items():
                table.setdefault(name, {})[architecture] = numbers
    CACHE.mkdir(parents=True, exist_ok=True)
    cached.write_text(json.dumps(table))
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
