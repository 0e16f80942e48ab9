"""Every binding reaches every function of the headers: a second look from outside at what the tests
of each binding check from within."""

import os
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = {"rust": ["bindings/rust/kvrt-sys/**/*.rs"],
           "go": ["bindings/go/*.c", "bindings/go/*.go"],
           "csharp": ["bindings/csharp/**/*.cs"]}
# What a call or declaration of a raw function looks like in each language.
MENTION = {"rust": r"\bfn (kv\w+)\s*\(", "go": r"\b(kv_\w+|kvrt_\w+)\s*\(",
           "csharp": r"\bextern\b[^;]*?\b(kv\w+)\s*\("}


class Coverage(unittest.TestCase):
    def test_raw_layers_hold_every_function(self):
        golden = ROOT / "tests/abi/golden"
        symbols = {name for file in ("symbols.txt", "cuda_symbols.txt")
                   for name in (golden / file).read_text().split()}
        self.assertGreater(len(symbols), 35)
        for language in os.environ["KVRT_BINDINGS"].split():
            with self.subTest(language):
                text = "\n".join(path.read_text() for pattern in SOURCES[language]
                                 for path in ROOT.glob(pattern))
                self.assertEqual(symbols - set(re.findall(MENTION[language], text)), set())


if __name__ == "__main__":
    unittest.main()
