"""The programs for a GPU, run over what stands in for its driver (tests/gpu/stand_in.cpp):
test_gpu, bench_gpu, scripts/gpu_check.sh and samples/generate, as whole processes that find plugin
and driver themselves. And what they say where there is neither.

KVRT_BUILD_TREE names the tree (a release one). KVRT_TEST_MODEL is the model for generate.
"""

import collections
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NO_GPU = 3


def setUpModule():
    global tree, work, has_gpu
    tree = pathlib.Path(os.environ["KVRT_BUILD_TREE"]).resolve()
    work = pathlib.Path(tempfile.mkdtemp(prefix="kvrt-stand-in-"))
    unittest.addModuleCleanup(shutil.rmtree, work)
    has_gpu = run(tree / "gpu" / "test_gpu", "--device", stand_in=False).status == 0


# `said`: what it printed to both streams; totals of launches and waits; a line for each violation.
Run = collections.namedtuple("Run", "status out said totals violations")


def run(*command, stand_in=True, environment=None):
    """What became of it, and what the stand-in had to report."""
    report = pathlib.Path(tempfile.mkstemp(dir=work)[1])
    extra = {"KVRT_STAND_IN_REPORT": str(report)}
    if stand_in:
        extra.update(LD_LIBRARY_PATH=str(tree / "stand_in"),
                     KVRT_CUDA_PLUGIN=str(tree / "stand_in" / "plugin.so"))
    result = subprocess.run([str(word) for word in command], cwd=ROOT, text=True,
                            env={**os.environ, **extra, **(environment or {})},
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, timeout=900)
    lines = report.read_text().splitlines()
    numbers = [line.split() for line in lines if not line.startswith("violation: ")]
    totals = {}
    for name, number in numbers:
        totals[name] = totals.get(name, 0) + int(number)
    return Run(result.returncode, result.stdout, result.stdout + result.stderr, totals,
               [line for line in lines if line.startswith("violation: ")])


class OverTheStandIn(unittest.TestCase):
    def test_the_cases_for_a_gpu_pass(self):
        status, _, said, totals, violations = run(
            tree / "gpu" / "test_gpu", "--quick", "--test-case-exclude=long:*")
        self.assertEqual(status, 0, said)
        self.assertEqual(violations, [])
        self.assertGreater(totals["launches"], 500)
        self.assertRegex(said, r"test cases: *\d+ *\| *[1-9]\d* passed *\| *0 failed")

    def test_what_a_launch_does_wrong_is_found(self):
        # The stand-in's kernels keep to what they are told: they are told something else.
        for defect, cases in (("write", "short: a prompt*"), ("compact", "short: rounds*"),
                              ("seal", "short: blocks*"), ("tables", "streams*")):
            with self.subTest(defect):
                status, _, said, _, _ = run(
                    tree / "gpu" / "test_gpu", "--quick", f"--test-case={cases}",
                    environment={"KVRT_STAND_IN_DEFECT": defect})
                self.assertEqual(status, 1, said)
                # Tables that were never uploaded may also lead out of the arena.
                self.assertRegex(said, "differences|positions|wrong_tables_"
                                 + ("|ILLEGAL_ADDRESS" if defect == "tables" else ""), said)

    def test_a_fault_is_shown(self):
        status, _, said, _, violations = run(tree / "gpu" / "test_gpu", "--fault")
        self.assertEqual(status, 0, said)
        self.assertIn("CUDA_ERROR_ILLEGAL_ADDRESS", said)
        self.assertEqual(said.count("kv_write: KV_DEVICE: "), 2, said)
        self.assertTrue(any("an access outside" in each for each in violations), violations)

    def test_benchmarks_print_their_lines(self):
        status, _, said, _, violations = run(tree / "gpu" / "bench_gpu", "--quick")
        self.assertEqual(status, 0, said)
        self.assertEqual(violations, [])
        for case in ("copy", "triattention by=products sequences", "triattention by=tf32 sequences",
                     "triattention offsets=max sequences", "triattention offsets=max by=products"):
            self.assertRegex(said, rf"(?m)^gpu {case}.* us=[\d.]+", said)
        # Every target, and whether it is reached.
        for case in (*(f"decode {name} kv={kv}" for name in ("bf16", "fp8", "int4")
                       for kv in (64, 128)), "compact f16 kept=0.10", "compact f16 kept=0.50"):
            self.assertRegex(said, rf"(?m)^gpu {case} .*bytes=[1-9]\d* us=[\d.]+ gbps=\d+ "
                                   rf"of_copy=[\d.]+ wanted=0.(85|60) met=(yes|no)$", said)
        for case in ("bookkeeping", "triattention sequences=2"):
            self.assertRegex(said, rf"(?m)^gpu {case} .*us=[\d.]+ .*wanted_below=(30|1000) "
                                   rf"met=(yes|no)$", said)
        # 2 sequences of 65 tokens, keys and values of 2 heads: 64 numbers of 2 bytes; of 1 and a
        # scale of 4 bytes; of half a byte, and as much.
        for name, row in (("bf16", 128), ("fp8", 68), ("int4", 36)):
            self.assertRegex(said,
                             rf"gpu decode {name} kv=64 sequences=2 bytes={2 * 65 * 4 * row} ")
        # Of two sequences' rounds nothing is known yet.
        self.assertRegex(said, r"(?m)^gpu triattention by=measured .* chosen=nothing_yet", said)

    def test_gpu_check_writes_its_table(self):
        table = work / "table.md"
        status, _, said, _, violations = run(
            ROOT / "scripts" / "gpu_check.sh", "--quick", "--from", tree / "gpu", table)
        self.assertEqual(status, 0, said)
        # The fault is one on purpose.
        self.assertTrue(all("an access outside" in each for each in violations), violations)
        text = table.read_text()
        self.assertIn("a fake device", text)
        for row in (r"\| device tests \| passed, (\d+) of \1 cases \|",
                    r"\| a fault is told, and told again \| passed \|",
                    r"\| compute-sanitizer memcheck \| (passed|not run)",
                    r"\| benchmarks \| passed \|",
                    r"\| others at the same shapes \| passed \|",
                    r"\| decode bf16 kv=64 sequences=2 \| bytes \d+, us [\d.]+, .*of_copy [\d.]+ "
                    r"\| at least 0.85 of copy \| (yes|no) \|",
                    r"\| bookkeeping sequences=3 layers=2 \| us [\d.]+, most [\d.]+, "
                    r"tables [\d.]+ \| at most 30 us \| (yes|no) \|",
                    r"\d+ of \d+ targets are reached"):
            self.assertRegex(text, row)

    def test_generate_writes_the_cpus_text(self):
        model = os.environ.get("KVRT_TEST_MODEL")
        if not model:
            print("generate on the stand-in: skipped, KVRT_TEST_MODEL is not set")
            self.skipTest("KVRT_TEST_MODEL is not set")

        def text(device):
            words = ["--model", model, "--prompt", "The lighthouse", "--raw", "--tokens", "6",
                     "--drafts", "2", "--threads", "2", "--device", device]
            status, out, said, totals, violations = run(tree / "bin" / "generate", *words)
            self.assertEqual(status, 0, said)
            self.assertEqual(violations, [])
            self.assertEqual(totals.get("launches", 0) > 100, device == "cuda", totals)
            self.assertEqual("the cache is on a fake device" in said, device == "cuda")
            self.assertGreater(len(out.strip()), 5)
            return out

        self.assertEqual(text("cuda"), text("cpu"))


class WithoutADriver(unittest.TestCase):
    def setUp(self):
        if has_gpu:
            print("what is said without a driver: skipped, this machine has one")
            self.skipTest("this machine has a GPU")

    def test_programs_say_what_is_missing_and_end(self):
        for program in ("test_gpu", "bench_gpu"):
            with self.subTest(program):
                status, _, said, _, _ = run(tree / "gpu" / program, stand_in=False)
                self.assertEqual(status, NO_GPU, said)
                self.assertRegex(said, r"^no GPU here: .*(libcuda\.so\.1|device)")

    def test_gpu_check_has_an_exit_status_for_it(self):
        table = work / "none.md"
        status, _, said, _, _ = run(ROOT / "scripts" / "gpu_check.sh", "--from", tree / "gpu",
                                    table, stand_in=False)
        self.assertEqual(status, NO_GPU, said)
        self.assertIn("no GPU here: ", said)
        self.assertFalse(table.exists())

    def test_generate_refuses_before_it_reads_the_model(self):
        status, _, said, _, _ = run(tree / "bin" / "generate", "--model", "/nowhere", "--prompt",
                                    "x", "--device", "cuda", stand_in=False)
        self.assertEqual(status, 1)
        self.assertRegex(said, r"generate: --device cuda needs NVIDIA's driver.*libcuda\.so\.1|"
                               r"generate: --device cuda: cuInit")


class Arguments(unittest.TestCase):
    def test_gpu_check_refuses_what_it_does_not_know(self):
        status, _, said, _, _ = run(ROOT / "scripts" / "gpu_check.sh", "--fast", stand_in=False)
        self.assertEqual(status, 2)
        self.assertIn("usage:", said)

    def test_gpu_check_says_what_is_missing(self):
        status, _, said, _, _ = run(ROOT / "scripts" / "gpu_check.sh", "--from", work / "empty",
                                    stand_in=False)
        self.assertEqual(status, 1)
        self.assertIn("--bundle", said)


if __name__ == "__main__":
    unittest.main()
