"""scripts/gpu_check.sh over programs that only print, and over a fake compute-sanitizer: what
passes, fails, is not there or takes too long is in its table, and in its exit status. And
bench/gpu_peers.py over packages that stand in for PyTorch and FlashInfer.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

TEST_GPU = """#!/bin/bash
echo "test_gpu $*" >>"$CALLS"
case $1 in
    --device) echo "a card, 0 multiprocessors" ;;
    --fault) exit "${FAULT_STATUS:-0}" ;;
    *)
        [[ -z "${SLOW:-}" ]] || exec sleep 30
        echo "[doctest] test cases:  7 |  7 passed | 0 failed | 3 skipped"
        exit "${TEST_STATUS:-0}" ;;
esac
"""
BENCH_GPU = """#!/bin/bash
cat <<'END'
gpu device a card
gpu shape kv_heads=8 query_heads=32 dim=128
gpu copy bytes=1073741824 us=500.0 gbps=4295
gpu decode bf16 kv=16384 sequences=16 bytes=1073807360 us=300.0 gbps=3579 of_copy=0.850 \
wanted=0.85 met=no
gpu decode bf16 kv=65536 sequences=4 bytes=1073758208 us=250.0 gbps=4295 of_copy=1.000 \
wanted=0.85 met=yes
gpu decode int4 kv=16384 sequences=16 unsupported="no kernel | none"
gpu bookkeeping sequences=256 layers=32 us=20.0 most=25.0 tables=4.0 wanted_below=30 met=yes
gpu triattention offsets=max by=products sequences=64 kv=4096 us=1.0 host=2.0
gpu triattention by=measured sequences=64 kv=4096 chosen=kernel
END
"""
# Records how it was called, runs the program, and fails where it is told to.
SANITIZER = """#!/bin/bash
echo "sanitizer $*" >>"$CALLS"
tool=$2
shift 4
"$@" || exit
[[ "$tool" != "${SANITIZER_FAILS:-}" ]] || { echo "ERROR SUMMARY: 1 error"; exit 9; }
"""


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Temporary(unittest.TestCase):
    def setUp(self):
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="kvrt-gpu-check-"))
        self.addCleanup(shutil.rmtree, self.work)


class GpuCheck(Temporary):
    """The script, with nothing behind it."""

    def setUp(self):
        super().setUp()
        program(self.work / "gpu" / "test_gpu", TEST_GPU)
        program(self.work / "gpu" / "bench_gpu", BENCH_GPU)

    def run_script(self, sanitizer=True, **environment):
        """Its exit status, its table, and the programs' arguments in their order."""
        calls, table = self.work / "calls", self.work / "table.md"
        calls.write_text("")
        tools = self.work / "tools"
        shutil.rmtree(tools, ignore_errors=True)
        if sanitizer:
            program(tools / "compute-sanitizer", SANITIZER)
        path = f"{tools}:/usr/bin:/bin"
        for place in ("/usr/bin", "/bin", "/usr/local/cuda/bin"):
            if not sanitizer and pathlib.Path(place, "compute-sanitizer").exists():
                self.skipTest(f"this machine has one in {place}")
        result = subprocess.run(
            [ROOT / "scripts" / "gpu_check.sh", "--from", self.work / "gpu", table], cwd=ROOT,
            env={**os.environ, "PATH": path, "CALLS": str(calls), "CUDA_HOME": "/nowhere",
                 **environment},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=120)
        self.said = result.stdout
        return result.returncode, table.read_text(), calls.read_text().splitlines()

    def test_all_passes(self):
        status, table, calls = self.run_script()
        self.assertEqual(status, 0, self.said)
        program_of = f"{self.work}/gpu/test_gpu --test-case=short*"
        self.assertEqual([call for call in calls if call.startswith("sanitizer")],
                         [f"sanitizer --tool {tool} --error-exitcode 9 {program_of}"
                          for tool in ("memcheck", "racecheck")])
        for row in (r"\| device tests \| passed, 7 of 7 cases \| \d+ s \|",
                    r"\| a fault is told, and told again \| passed \|",
                    r"\| benchmarks \| passed \|",
                    r"\| compute-sanitizer memcheck \| passed, 7 of 7 cases \|",
                    r"\| compute-sanitizer racecheck \| passed, 7 of 7 cases \|"):
            self.assertRegex(table, row)
        log = self.work / "table.log"
        self.assertIn("gpu copy", log.read_text())

    def test_rows_say_what_is_wanted_and_whether_it_is_there(self):
        _, table, _ = self.run_script()
        for row in (
                # By what the benchmark found, not by its rounded figures.
                "| decode bf16 kv=16384 sequences=16 | bytes 1073807360, us 300.0, gbps 3579, "
                "of_copy 0.850 | at least 0.85 of copy | no |",
                "of_copy 1.000 | at least 0.85 of copy | yes |",
                "| decode int4 kv=16384 sequences=16 | not in this version: no kernel / none | | |",
                "| bookkeeping sequences=256 layers=32 | us 20.0, most 25.0, tables 4.0 "
                "| at most 30 us | yes |",
                "| triattention offsets=max by=products sequences=64 kv=4096 | us 1.0, host 2.0 "
                "|  |  |",
                "| triattention by=measured sequences=64 kv=4096 | chosen kernel |  |  |",
                "| peer flashinfer | not measured: PyTorch "):
            self.assertIn(row, table)
        self.assertRegex(table, r"(?m)^2 of 3 targets are reached\.$")
        self.assertNotIn("kv_heads", table)

    def test_findings_of_a_sanitizer_fail(self):
        for tool, other in (("memcheck", "racecheck"), ("racecheck", "memcheck")):
            with self.subTest(tool):
                status, table, _ = self.run_script(SANITIZER_FAILS=tool)
                self.assertEqual(status, 1, self.said)
                self.assertRegex(table, rf"\| compute-sanitizer {tool} \| failed with status 9")
                self.assertRegex(table, rf"\| compute-sanitizer {other} \| passed")
                self.assertIn("ERROR SUMMARY: 1 error", (self.work / "table.log").read_text())

    def test_without_a_sanitizer_the_table_says_so(self):
        status, table, calls = self.run_script(sanitizer=False)
        self.assertEqual(status, 0, self.said)
        for tool in ("memcheck", "racecheck"):
            self.assertIn(f"| compute-sanitizer {tool} | not run: it is not on this machine | |",
                          table)
        self.assertFalse([call for call in calls if call.startswith("sanitizer")])

    def test_tests_that_fail_fail_and_the_rest_runs(self):
        status, table, _ = self.run_script(TEST_STATUS="1", FAULT_STATUS="2")
        self.assertEqual(status, 1, self.said)
        self.assertRegex(table, r"\| device tests \| failed with status 1, 7 of 7 cases \|")
        self.assertRegex(table, r"\| a fault is told, and told again \| failed with status 2 \|")
        self.assertRegex(table, r"\| benchmarks \| passed \|")

    def test_what_takes_too_long_is_stopped(self):
        text = (ROOT / "scripts" / "gpu_check.sh").read_text()
        hurried = self.work / "scripts" / "gpu_check.sh"
        program(hurried, re.sub(r"all_of_it=\d+", "all_of_it=2", text))
        table = self.work / "table.md"
        result = subprocess.run(
            [hurried, "--from", self.work / "gpu", table], text=True, timeout=60,
            env={**os.environ, "CALLS": os.devnull, "SLOW": "1"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertRegex(table.read_text(),
                         r"\| device tests \| stopped after [12] s \| [123] s \|")
        self.assertIn("| benchmarks | not run: no time is left of 2 s | |", table.read_text())

    def test_limits_of_the_parts_add_up_to_less_than_eight_minutes(self):
        text = (ROOT / "scripts" / "gpu_check.sh").read_text()
        total = int(re.search(r"all_of_it=(\d+)", text)[1])
        limits = {name: int(seconds)
                  for name, seconds in re.findall(r'check "([^"]+)" (\d+) ', text)}
        self.assertEqual(len(limits), 5, limits)
        both = sum(limits.values()) + limits["compute-sanitizer $tool"]
        self.assertLessEqual(both, total)
        # One that does not end when it is told to is killed 5 s later.
        self.assertLessEqual(total + 5, 8 * 60)


# Time passes when something is called: as long as the backend that is chosen takes.
TORCH = """
import os
bfloat16, int32, uint8 = "bfloat16", "int32", "uint8"
clock = 0.0
def pass_time(us):
    global clock
    clock += us / 1000
def randn(*shape, dtype, device):
    assert (dtype, device) == (bfloat16, "cuda")
    return shape
def zeros(count, dtype, device):
    return (count,)
def arange(start, end, step=1, dtype=None, device=None):
    return list(range(start, end, step))
def full(shape, value, dtype, device):
    return [value] * shape[0]
class Event:
    def __init__(self, enable_timing): assert enable_timing
    def record(self): self.at = clock
    def elapsed_time(self, end): return end.at - self.at
class cuda:
    Event = Event
    is_available = staticmethod(lambda: "NO_GPU" not in os.environ)
    synchronize = staticmethod(lambda: None)
from torch import nn
"""
TORCH_FUNCTIONAL = """
def scaled_dot_product_attention(query, keys, values, enable_gqa=False):
    import torch
    from torch.nn import attention
    assert enable_gqa and keys == values
    sequences, kv_heads, tokens, dim = keys
    assert query == (sequences, 32, 1, dim) and (kv_heads, dim) == (8, 128)
    us = {None: 400.0, "flash": 240.0}.get(attention.chosen)
    if us is None: raise RuntimeError("No available kernel.")
    torch.pass_time(us)
"""
TORCH_ATTENTION = """
import contextlib
chosen = None
class SDPBackend: FLASH_ATTENTION, EFFICIENT_ATTENTION = "flash", "efficient"
@contextlib.contextmanager
def sdpa_kernel(backend):
    global chosen
    chosen = backend
    yield
    chosen = None
"""
FLASHINFER = """
import os
import torch
from flashinfer import jit
class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, workspace, layout, use_tensor_cores):
        assert layout == "NHD"
        self.us = 290.0 if use_tensor_cores else 310.0
    def plan(self, starts, indices, last, query_heads, kv_heads, dim, page, q_data_type, data_type):
        assert (query_heads, kv_heads, dim, page) == (32, 8, 128, 16)
        assert starts[-1] == len(indices) and len(starts) == len(last) + 1
        self.pages = len(indices)
        if "NO_KERNELS" in os.environ: raise jit.MissingJITCacheError("not in the cache")
    def run(self, query, cache):
        assert cache == (self.pages, 2, 16, 8, 128) and query[1:] == (32, 128)
        torch.pass_time(self.us)
"""


class Peers(Temporary):
    """bench/gpu_peers.py, whose peers are not here."""

    def peers(self, *packages, **environment):
        lines = self.work / "lines"
        lines.write_text(BENCH_GPU)
        site = self.work / "site"
        texts = {"torch/__init__.py": TORCH,
                 "torch/nn/__init__.py": "from torch.nn import functional\n",
                 "torch/nn/functional.py": TORCH_FUNCTIONAL,
                 "torch/nn/attention.py": TORCH_ATTENTION, "flashinfer/__init__.py": FLASHINFER,
                 "flashinfer/jit.py": "class MissingJITCacheError(RuntimeError): pass\n",
                 "old/flashinfer/__init__.py": "", "old/flashinfer/jit.py": ""}
        for name in texts:
            if name.split("/")[0] in packages:
                program(site / name.removeprefix("old/"), texts[name])
        result = subprocess.run(
            ["python3", ROOT / "bench" / "gpu_peers.py", lines], text=True, timeout=60,
            env={**os.environ, "PYTHONPATH": str(site), **environment}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT)
        self.assertEqual(result.returncode, 0, result.stdout)
        return result.stdout.splitlines()

    def test_the_fastest_way_of_each_is_compared(self):
        self.assertEqual(self.peers("torch", "flashinfer"), [
            "gpu peer torch bf16 kv=16384 sequences=16 us=240.0 way=FLASH_ATTENTION ours=300.0 "
            "of_ours=0.800 wanted_of_ours=1.00 met=no",
            "gpu peer torch bf16 kv=65536 sequences=4 us=240.0 way=FLASH_ATTENTION ours=250.0 "
            "of_ours=0.960 wanted_of_ours=1.00 met=no",
            "gpu peer flashinfer bf16 kv=16384 sequences=16 us=290.0 way=tensor_cores ours=300.0 "
            "of_ours=0.967 wanted_of_ours=1.00 met=no",
            "gpu peer flashinfer bf16 kv=65536 sequences=4 us=290.0 way=tensor_cores ours=250.0 "
            "of_ours=1.160 wanted_of_ours=1.00 met=yes"])

    def test_what_is_absent_is_named(self):
        def reasons(lines):
            return {re.search(r"peer (\w+)", line)[1]: re.search(r'absent="(.*)"$', line)[1]
                    for line in lines if "absent" in line}

        if importlib.util.find_spec("torch") is None:
            lines = self.peers()
            self.assertEqual(reasons(lines), {"torch": "PyTorch is not installed",
                                              "flashinfer": "PyTorch is not installed"})
            self.assertEqual(len(lines), 2)
        self.assertEqual(reasons(self.peers("torch", NO_GPU="1")),
                         {"torch": "PyTorch sees no GPU", "flashinfer": "PyTorch sees no GPU"})
        self.assertEqual(reasons(self.peers("torch")),
                         {"flashinfer": "FlashInfer is not installed"})
        self.assertEqual(reasons(self.peers("torch", "flashinfer", NO_KERNELS="1")),
                         {"flashinfer": "it has no kernel for the shape"})
        self.assertIn("builds kernels as it runs",
                      reasons(self.peers("torch", "old"))["flashinfer"])


if __name__ == "__main__":
    unittest.main()
