"""Documents that show code: every block of C in docs/ and README.md compiles against the public
header, as the body of a function; links between documents lead somewhere."""

import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

PRELUDE = """
#include <stdio.h>
#include <stdlib.h>
#include "kvrt/kv_cuda.h"
#include "kvrt/kvrt.h"
static void check(kv_status status) { if (status < 0) exit(1); }
static int snippet(kv_pool *pool, kv_seq seq, kv_step *step, uint32_t layer, uint32_t layer_count,
                   const uint32_t *prompt, uint32_t prompt_tokens, uint32_t chunk, uint32_t rows,
                   kv_tensor keys, kv_tensor values, kv_tensor queries, kv_tensor out,
                   const kv_seq *sequences, uint32_t running, const uint32_t *next_tokens,
                   uint32_t *first_rows, kv_seq prefilling, const uint32_t *drafts, void *qkv,
                   int32_t *indptr, int32_t *indices, int32_t *last_page_len,
                   int64_t *slot_mapping, int32_t *kv_len, float *k, float *v, float *q, float *o,
                   struct CUstream_st *stream) {
    {
%s
    }
    return 0;
}
"""

# What surrounds a piece is given as parameters, of which most pieces use few; a piece that shows a
# declaration does not use what it declares.
FLAGS = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wno-unused-function",
         "-Wno-unused-parameter", "-Wno-unused-variable", "-Wno-unused-but-set-variable",
         "-fsyntax-only"]


def documents():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")),
            *sorted((ROOT / "bindings").glob("*/README.md"))]


def compile_error(body):
    """What the compiler says about a piece of code, or an empty string."""
    with tempfile.NamedTemporaryFile("w", suffix=".c") as source:
        source.write(PRELUDE % body)
        source.flush()
        result = subprocess.run(["gcc", *FLAGS, f"-I{ROOT}/include", source.name],
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return result.stdout if result.returncode else ""


class Documents(unittest.TestCase):
    def test_code_compiles(self):
        pieces = 0
        for document in documents():
            for body in re.findall(r"^```c\n(.*?)^```", document.read_text(), re.M | re.S):
                pieces += 1
                with self.subTest(document=document.name, code=body.splitlines()[0]):
                    self.assertEqual(compile_error(body), "")
        self.assertGreater(pieces, 10)

    def test_a_wrong_name_would_be_found(self):
        self.assertIn("kv_seq_append_all", compile_error("kv_seq_append_all(step, seq);"))

    def test_links_lead_somewhere(self):
        missing = []
        for document in documents():
            for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
                if "://" not in link and not (document.parent / link).exists():
                    missing.append(f"{document.name}: {link}")
        self.assertEqual(missing, [])


if __name__ == "__main__":
    unittest.main()
