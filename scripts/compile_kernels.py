#!/usr/bin/env python3
"""Compiles kernels/*.cu for the architectures that are delivered.

  scripts/compile_kernels.py --into FOLDER   a fat binary for each .cu file, and kernel_images.cpp,
                                             which has them in it: what the plugin is built with
  scripts/compile_kernels.py --nvcc          prints the nvcc that is used; 2: there is none

A fat binary has machine code for each architecture, and PTX of the newest for those to come. What
was compiled is kept in build/kernels by a digest of sources and compiler, so that all build trees,
and the table of resources, compile a kernel once.
"""

import argparse
import concurrent.futures
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "kernels"
ARCHITECTURES = ("80", "90a", "100")
# No contraction: bytes that kernels store are those of the CPU.
FLAGS = ("-std=c++20", "-O3", "-fmad=false")
NO_NVCC = "no nvcc: scripts/fetch_cuda.sh puts one into build/cuda"


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


def sources():
    return sorted((ROOT / "kernels").glob("*.cu"))


def digest_of(source, version):
    """Of a source, and of all headers: most of them are in each other."""
    digest = hashlib.sha256(f"{version} {FLAGS} {ARCHITECTURES}".encode())
    headers = [path for path in (ROOT / "kernels").glob("*") if path.suffix in (".hpp", ".cuh")]
    for path in [source, *sorted(headers)]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def compile_one(nvcc, version, source, architecture):
    """Leaves machine code, PTX and what ptxas said in a folder of its own; returns that."""
    folder = CACHE / digest_of(source, version) / f"{source.stem}.sm_{architecture}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        command = [nvcc, *FLAGS, f"-I{ROOT}", f"-arch=sm_{architecture}", "-Xptxas", "-v", "-cubin",
                   "--keep", "--keep-dir", work, "-o", f"{work}/kernel.cubin", str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
        made = pathlib.Path(work) / "made"
        made.mkdir()
        shutil.copy(f"{work}/kernel.cubin", made / "kernel.cubin")
        shutil.copy(f"{work}/{source.stem}.ptx", made / "kernel.ptx")
        (made / "ptxas.txt").write_text(result.stdout + result.stderr)
        try:
            made.rename(folder)
        except OSError:  # another process has been faster
            if not folder.exists():
                raise
    return folder


def compile_all(nvcc, version):
    """{(source, architecture): folder}"""
    jobs = [(source, architecture) for source in sources() for architecture in ARCHITECTURES]
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as workers:
        return dict(zip(jobs, workers.map(lambda job: compile_one(nvcc, version, *job), jobs)))


def link(nvcc, compiled, source, target):
    # What PTX is compiled with on the user's machine, too.
    command = [str(pathlib.Path(nvcc).parent / "fatbinary"), "-64", "--cmdline=--fmad false ",
               f"--create={target}"]
    for architecture in ARCHITECTURES:
        folder = compiled[source, architecture]
        command.append(f"--image3=kind=elf,sm={architecture},file={folder}/kernel.cubin")
    newest = ARCHITECTURES[-1]
    command.append(f"--image3=kind=ptx,sm={newest},file={compiled[source, newest]}/kernel.ptx")
    subprocess.run(command, check=True)


def images_source(names, folder):
    lines = ["// Made by scripts/compile_kernels.py.", '#include "driver/images.hpp"', ""]
    for name in names:
        lines += ["asm(", '    ".pushsection .rodata, \\"a\\"\\n"', '    ".balign 64\\n"',
                  f'    "kvrt_image_{name}:\\n"',
                  f'    ".incbin \\"{folder}/{name}.fatbin\\"\\n"', '    ".popsection\\n");',
                  f'extern "C" const char kvrt_image_{name}[] '
                  '__attribute__((visibility("hidden")));']
    lines += ["", "namespace kvrt::cuda {", "",
              "static const kernel_image images[] = {"]
    lines += [f'    {{"{name}", kvrt_image_{name}}},' for name in names]
    lines += ["};", f"const kernel_images built_images = {{images, {len(names)}}};", "",
              "}  // namespace kvrt::cuda", ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nvcc", action="store_true")
    parser.add_argument("--into", metavar="FOLDER", type=pathlib.Path)
    options = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        print(NO_NVCC, file=sys.stderr)
        return 2
    if options.nvcc or options.into is None:
        print(nvcc)
        return 0
    folder = options.into.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    compiled = compile_all(nvcc, version_of(nvcc))
    for source in sources():
        link(nvcc, compiled, source, folder / f"{source.stem}.fatbin")
    names = [source.stem for source in sources()]
    (folder / "kernel_images.cpp").write_text(images_source(names, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
