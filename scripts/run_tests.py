#!/usr/bin/env python3
"""Runs all tests of the given build trees and prints `N passed, M failed` as its last line.

As many at once as there are processors: test programs (doctest, <tree>/bin/test_*) of every tree,
and, once, on the first tree, suites of Python (tests/{package,sources,kernels,gpu}/*_test.py: of
the package, the sources' text, what CUDA kernels take, and the programs for a GPU) and the
bindings (run_bindings.py). N and M count test cases. What ends without its totals, or with an
error that they do not show (a sanitizer's report at exit), counts as one failed case more.

Environment for the programs: KVRT_TEST_TREE (release, asan, tsan: property tests run shorter under
sanitizers), KVRT_TEST_MODEL (path of the model, where fetched), KVRT_UPDATE_GOLDEN.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 1800
# Bindings have a limit for each of their steps.
BINDINGS_TIMEOUT_SECONDS = 3600
TOTALS = re.compile(
    r"^\[doctest\] test cases:\s*\d+\s*\|\s*(\d+) passed\s*\|\s*(\d+) failed"
    r"|^(\d+) passed, (\d+) failed$", re.MULTILINE
)
# The longest first, so that nothing runs alone at the end.
SUITES = ("gpu", "package", "kernels", "sources")
# Minutes long under sanitizers: unit tests of one thread, of which the thread sanitizer has nothing
# to say; whole pools on emulated blocks, whose kernels tests/kernels runs under both; and pools of
# all formats, whose kernels the unit tests run under the address sanitizer.
ALL_FORMATS = "lanes per head: the bits of*,observations: in every format*"
EMULATED_POOLS = ("*attention_test.cpp,*seal_test.cpp,*round_sets_test.cpp,*observe_test.cpp,"
                  "*score_products_test.cpp,*queries_test.cpp,*sealed_rounds_test.cpp,"
                  "*replay_test.cpp")
LEFT_OUT = {
    "asan/test_conformance": [f"-tce={ALL_FORMATS}"],
    "tsan/test_conformance": [f"-tce={ALL_FORMATS}"],
    "asan/test_device": [f"-sfe={EMULATED_POOLS}",
                         "-tce=a CUDA pool writes*,what a wrong*,layouts that foreign*,"
                         "a graph of a step*,rounds on the device*,a captured decode step*,"
                         "lanes whose rows*,steps at random*,whenever*own kernels*,"
                         "heads of a layer compete*"],
    "tsan/test_device": [f"-sfe={EMULATED_POOLS},*verbs_test.cpp,*rounds*_test.cpp,"
                         "*fit_test.cpp,*cuda_stream_test.cpp,*given_test.cpp,*debug_test.cpp"],
    "tsan/test_unit": ["-tce=*definition says*"],
}
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "second_deadlock_stack=1",
}


def fixed_addresses():
    """A command prefix that switches address randomisation off, where that is allowed: the thread
    sanitizer of GCC 12 cannot place its shadow when the kernel randomises too many bits."""
    setarch = shutil.which("setarch")
    if not setarch:
        return []
    attempt = subprocess.run([setarch, "-R", "true"], stderr=subprocess.DEVNULL)
    return [setarch, "-R"] if attempt.returncode == 0 else []


def run_command(name, command, environment, timeout):
    """Returns (name, passed, failed, output, seconds)."""
    start = time.monotonic()
    try:
        result = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )
        output, code = result.stdout.decode(errors="replace"), result.returncode
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode(errors="replace")
        output += f"\nstopped after {timeout} s\n"
        code = -1
    totals = list(TOTALS.finditer(output))
    numbers = [int(number) for number in totals[-1].groups() if number] if totals else [0, 0]
    passed, failed = numbers
    if passed + failed == 0 or (code != 0 and failed == 0):
        failed += 1
        output += f"\nexit status {code}\n"
    return name, passed, failed, output, time.monotonic() - start


def run_program(program, tree, arguments):
    prefix = fixed_addresses() if tree.name == "tsan" else []
    left_out = LEFT_OUT.get(f"{tree.name}/{program.name}", [])
    command = [*prefix, str(program), *arguments, *left_out]
    environment = {**SANITIZER_OPTIONS, **os.environ, "KVRT_TEST_TREE": tree.name}
    return run_command(f"{tree.name}/{program.name}", command, environment, TIMEOUT_SECONDS)


def run_outside(name, tree):
    """What is no program of a tree, in a process of its own."""
    if name == "bindings":
        command = [sys.executable, str(ROOT / "scripts" / "run_bindings.py"), str(tree)]
        return run_command(name, command, os.environ, BINDINGS_TIMEOUT_SECONDS)
    command = [sys.executable, __file__, str(tree), "--suite", name]
    return run_command(name, command, os.environ, TIMEOUT_SECONDS)


def run_suite(folder, tree):
    """One of SUITES, in this process."""
    os.environ["KVRT_BUILD_TREE"] = str(tree)
    suite = unittest.TestLoader().discover(str(ROOT / "tests" / folder), "*_test.py")
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=0).run(suite)
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    return max(0, result.testsRun - failed), failed


def run_all(trees, arguments, programs_only):
    passed = failed = 0
    lock = threading.Lock()
    jobs = []
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as workers:
        if not programs_only:
            for name in ("bindings", *SUITES):
                jobs.append(workers.submit(run_outside, name, trees[0]))
        for tree in reversed(trees):  # sanitizers take longest
            programs = sorted((tree / "bin").glob("test_*"))
            if not programs:
                print(f"{tree}: no test programs", flush=True)
                failed += 1
            for program in programs:
                jobs.append(workers.submit(run_program, program, tree, arguments))
        for job in concurrent.futures.as_completed(jobs):
            name, good, bad, output, seconds = job.result()
            with lock:
                # What the others leave out, and why, is in their output.
                if bad or "/" not in name:
                    print(output, flush=True)
                print(f"{name}: {good} passed, {bad} failed ({seconds:.1f} s)", flush=True)
            passed += good
            failed += bad
    return passed, failed


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("trees", nargs="+", type=pathlib.Path, help="build trees, the release first")
    add("--programs-only", action="store_true", help="only the test programs")
    add("--suite", choices=SUITES, help="only this one, of the first tree")
    add("--doctest", nargs=argparse.REMAINDER, default=[], help="arguments for the programs")
    options = parser.parse_args()

    trees = [tree.resolve() for tree in options.trees]
    if options.suite:
        passed, failed = run_suite(options.suite, trees[0])
    else:
        passed, failed = run_all(trees, options.doctest, options.programs_only)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
