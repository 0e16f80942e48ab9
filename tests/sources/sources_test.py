"""What the text of the sources must keep to, whoever writes it.

Folders of lib/ form a ladder: a file includes from its own folder and from those below it, never
from above. Files stay short enough to be read at one sitting and say at the top what they hold (a
.cpp may leave that to its header). Nothing is left for later in a comment.
"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# From the top to the bottom.
LADDER = ["api", "step", "retention", "sequence", "attention", "model", "format", "memory",
          "device", "base"]
FOLDERS = ["include", "lib", "kernels", "samples", "tests", "bench", "bindings"]
SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh", ".py", ".rs", ".go", ".cs"}
MAX_COLUMNS = 100
MAX_LINES = 600
# The public header is one file that is read from top to bottom, however long.
LONG_FILES = {"include/kvrt/kvrt.h"}
LEFT_FOR_LATER = re.compile(r"\b(TO" r"DO|FIX" r"ME|HA" r"CK)\b")


def sources():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                yield path.relative_to(ROOT).as_posix(), path.read_text().splitlines()


def headers_of(name):
    """The headers that may speak for a source: world.hpp and world_step.hpp for world_step.cpp."""
    if not name.endswith(".cpp"):
        return []
    words = name.removesuffix(".cpp").split("_")
    return ["_".join(words[:count]) + ".hpp" for count in range(1, len(words) + 1)]


class Sources(unittest.TestCase):
    maxDiff = None

    def assert_none(self, findings):
        self.assertEqual(findings, [])

    def test_folders_include_downwards_only(self):
        findings = []
        for name, lines in sources():
            parts = name.split("/")
            if parts[0] != "lib":
                continue
            if parts[1] not in LADDER:
                findings.append(f"{name}: folder has no place on the ladder")
                continue
            for number, line in enumerate(lines, 1):
                include = re.match(r'#include "(\w+)/', line)
                if not include or include[1] == "kvrt":
                    continue
                if include[1] not in LADDER or LADDER.index(include[1]) < LADDER.index(parts[1]):
                    findings.append(f"{name}:{number}: includes upwards: {line}")
        self.assert_none(findings)

    def test_samples_and_abi_tests_see_the_public_header_only(self):
        findings = []
        for name, lines in sources():
            if name.startswith(("samples/", "tests/abi/", "tests/conformance/", "tests/samples/")):
                for number, line in enumerate(lines, 1):
                    include = re.match(r'#include "(\w+)/', line)
                    if include and include[1] in LADDER:
                        findings.append(f"{name}:{number}: {line}")
        self.assert_none(findings)

    def test_lines_fit(self):
        self.assert_none([
            f"{name}:{number}: {len(line)} columns"
            for name, lines in sources()
            for number, line in enumerate(lines, 1)
            if len(line) > MAX_COLUMNS
        ])

    def test_files_are_short(self):
        self.assert_none([
            f"{name}: {len(lines)} lines"
            for name, lines in sources()
            if len(lines) > MAX_LINES and name not in LONG_FILES
        ])

    def test_files_open_with_what_they_hold(self):
        texts = dict(sources())
        self.assert_none([
            name for name, lines in texts.items()
            if not (lines and lines[0].startswith(("//", "/*", '"""', "#!")))
            and not any(header in texts for header in headers_of(name))
        ])

    def test_headers_are_guarded(self):
        self.assert_none([
            name for name, lines in sources()
            if name.endswith((".hpp", ".cuh")) and not name.endswith("-inl.hpp")
            and "#pragma once" not in lines
        ])

    def test_nothing_is_left_for_later(self):
        self.assert_none([
            f"{name}:{number}: {line.strip()}"
            for name, lines in sources()
            for number, line in enumerate(lines, 1)
            if LEFT_FOR_LATER.search(line)
        ])


if __name__ == "__main__":
    unittest.main()
