#!/usr/bin/env python3
"""Builds and tests the bindings, and prints `N passed, M failed` as its last line.

An installed library (build/prefix, from the given build tree) is all that they see. Each language has
bindings/<language>/run_tests.sh PREFIX, which builds everything, runs its tests and ends with its
totals, and build_programs.sh PREFIX, which makes build/bindings/<language>/{batching,overhead}. The
tests of tests/bindings then compare the languages with each other and with C++.

A missing toolchain is an error. With KVRT_ALLOW_MISSING_TOOLCHAINS=1 its language is left out, with a
line that says so; CI (CI=true) does not accept that.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PREFIX = ROOT / "build" / "prefix"
TIMEOUT_SECONDS = 1200
TOTALS = re.compile(r"^(\d+) passed, (\d+) failed$", re.MULTILINE)
TOOLS = {"rust": ["cargo", "rustc"], "go": ["go"], "csharp": ["mcs", "mono"]}


def install(tree):
    """The tree's library under build/prefix, with nothing else there."""
    shutil.rmtree(PREFIX, ignore_errors=True)
    subprocess.run(["cmake", "--install", str(tree), "--prefix", str(PREFIX)], check=True,
                   stdout=subprocess.DEVNULL)
    # As CI of another project would find it: by the loader's and pkg-config's own variables.
    library_dir = next(PREFIX.rglob("libkvrt.so")).parent
    os.environ["LD_LIBRARY_PATH"] = str(library_dir)
    os.environ["PKG_CONFIG_PATH"] = str(library_dir / "pkgconfig")


def find_dotnet():
    """Lets the C# binding run on .NET too, where a runtime can be had."""
    if "KVRT_DOTNET_ROOT" not in os.environ:
        result = subprocess.run([str(ROOT / "scripts" / "fetch_dotnet.sh")], check=True,
                                stdout=subprocess.PIPE, text=True)
        if result.stdout.strip():
            os.environ["KVRT_DOTNET_ROOT"] = result.stdout.strip()


def missing_tools(language):
    return [tool for tool in TOOLS[language] if not shutil.which(tool)]


def run_script(language, script):
    """Returns (exit status, output)."""
    command = [str(ROOT / "bindings" / language / script), str(PREFIX)]
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, errors="replace",
                                timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode(errors="replace")
        return 1, f"{output}\nstopped after {TIMEOUT_SECONDS} s"
    return result.returncode, result.stdout


def run_language(language):
    """Returns (passed, failed) of a language's own tests; its programs count as one case."""
    start = time.monotonic()
    status, output = run_script(language, "run_tests.sh")
    totals = list(TOTALS.finditer(output))
    passed, failed = map(int, totals[-1].groups()) if totals else (0, 0)
    if failed == 0 and (status != 0 or passed == 0):
        failed = 1
    if failed:
        print(f"{output}\nexit status {status}", flush=True)
    for line in output.splitlines():
        if re.search(r"(^|: )skipped[:,]", line):  # nothing is left out in silence
            print(f"bindings/{language}: {line.strip()}", flush=True)
    status, output = run_script(language, "build_programs.sh")
    if status != 0:
        failed += 1
        print(f"{output}\nexit status {status}", flush=True)
    else:
        passed += 1
    seconds = time.monotonic() - start
    print(f"bindings/{language}: {passed} passed, {failed} failed ({seconds:.1f} s)", flush=True)
    return passed, failed


def run_comparisons(tree, languages):
    os.environ["KVRT_BUILD_TREE"] = str(tree)
    os.environ["KVRT_BINDINGS"] = " ".join(languages)
    suite = unittest.TestLoader().discover(str(ROOT / "tests" / "bindings"), "*_test.py")
    start = time.monotonic()
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=0).run(suite)
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    passed = max(0, result.testsRun - failed)
    seconds = time.monotonic() - start
    print(f"bindings: {passed} passed, {failed or not passed:d} failed ({seconds:.1f} s)",
          flush=True)
    return passed, failed or int(not passed)


def run(tree):
    """Everything; returns (passed, failed)."""
    allowed = os.environ.get("KVRT_ALLOW_MISSING_TOOLCHAINS") == "1"
    if allowed and os.environ.get("CI") == "true":
        print("KVRT_ALLOW_MISSING_TOOLCHAINS is not for CI: every binding is tested there")
        return 0, 1
    install(tree)
    find_dotnet()
    passed = failed = 0
    languages = []
    for language in TOOLS:
        missing = missing_tools(language)
        if missing and allowed:
            print(f"bindings/{language}: skipped, {' and '.join(missing)} not found", flush=True)
        elif missing:
            print(f"bindings/{language}: {' and '.join(missing)} not found; run "
                  "scripts/install_deps.sh --bindings, or set KVRT_ALLOW_MISSING_TOOLCHAINS=1 to "
                  "leave this language out", flush=True)
            failed += 1
        else:
            good, bad = run_language(language)
            passed += good
            failed += bad
            languages.append(language)
    good, bad = run_comparisons(tree, languages)
    return passed + good, failed + bad


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tree", type=pathlib.Path, help="a release build tree")
    passed, failed = run(parser.parse_args().tree.resolve())
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
