"""The guard of the ABI: the library keeps what the released header promised, and the guard notices
every kind of change that breaks a program which is already compiled, and no other.

KVRT_BUILD_TREE names the tree.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import abi_guard  # noqa: E402

HEADER = """
#include <stdint.h>
typedef struct kv_struct_header { uint32_t struct_size, flags; const void *next; } kv_struct_header;
typedef struct kv_one { uint32_t struct_size, flags; const void *next; uint32_t x, y; } kv_one;
typedef struct kv_two {
    uint32_t struct_size, flags; const void *next; uint32_t u, reserved0; float v, w;
} kv_two;
typedef struct kv_pool kv_pool;
int32_t kv_first(kv_pool *pool, const kv_one *one, uint32_t count);
int32_t kv_second(const kv_two *two, kv_struct_header *header);
"""
SOURCE = """
#include "released.h"
struct kv_pool { int %s; };
int32_t kv_first(kv_pool *pool, const kv_one *one, uint32_t count) {
    return pool->%s + (int32_t)one->x + (int32_t)count;
}
int32_t kv_second(const kv_two *two, kv_struct_header *header) {
    return (int32_t)two->u + (int32_t)header->flags;
}
"""


class Guard(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="kvrt-abi-test-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.released = cls.build("released", HEADER, SOURCE % ("a", "a"))

    @classmethod
    def build(cls, name, header, source):
        """Builds a library as described and dumps its interface."""
        folder = cls.folder / name
        folder.mkdir()
        (folder / "released.h").write_text(header)
        (folder / "library.c").write_text(source)
        library = folder / "library.so"
        subprocess.run(["gcc", "-g", "-shared", "-fPIC", "-o", str(library),
                        str(folder / "library.c")], check=True)
        abi_guard.dump(library, folder, folder / "library.abi")
        return folder / "library.abi"

    def findings(self, old, new, source=SOURCE % ("a", "a")):
        """What the guard says when `old` in the header, or else in the source, becomes `new`."""
        self.assertIn(old, HEADER + source)
        changed = self.build(self.id().rsplit(".", 1)[1] + str(len(list(self.folder.iterdir()))),
                             HEADER.replace(old, new), source.replace(old, new))
        return "\n".join(abi_guard.incompatible_changes(self.released, changed))

    def test_nothing_changed(self):
        self.assertEqual(self.findings("uint32_t x, y;", "uint32_t x, y;"), "")

    def test_what_is_allowed(self):
        for name, old, new in [
            ("field at the end", "uint32_t x, y;", "uint32_t x, y; uint64_t z;"),
            ("two fields at the end", "float v, w;", "float v, w; uint32_t a, b; double c;"),
            ("reserved field used", "reserved0", "window"),
            ("inside of an opaque struct", "struct kv_pool { int a; }",
             "struct kv_pool { long b; int a; }"),
            ("new function", "int32_t kv_second(const",
             "int32_t kv_third(void);\nint32_t kv_second(const"),
        ]:
            with self.subTest(name):
                source = SOURCE % ("a", "a")
                if name == "new function":
                    source += "\nint32_t kv_third(void) { return 0; }\n"
                    changed = self.build("third", HEADER.replace(old, new), source)
                    found = "\n".join(abi_guard.incompatible_changes(self.released, changed))
                else:
                    found = self.findings(old, new)
                self.assertEqual(found, "")

    def test_what_breaks_programs(self):
        for name, old, new, word in [
            ("fields swapped", "uint32_t x, y;", "uint32_t y, x;", "kv_one"),
            ("field in the middle", "uint32_t x, y;", "uint64_t z; uint32_t x, y;", "kv_one"),
            ("field of another type", "float v, w;", "float v; uint32_t w;", "kv_two"),
            ("field of another size", "float v, w;", "float v; double w;", "kv_two"),
            ("field renamed", "float v, w;", "float v, ww;", "ww"),
            ("last field gone", "float v, w;", "float v;", "kv_two"),
            ("reserved field of another type", "u, reserved0;", "u; float reserved0;", "kv_two"),
            ("the header of structs grows", "const void *next; } kv_struct_header",
             "const void *next; uint64_t more; } kv_struct_header", "kv_struct_header"),
            ("parameter of another type", "uint32_t count)", "int64_t count)", "kv_first"),
            ("parameter more", "uint32_t count)", "uint32_t count, uint32_t more)", "kv_first"),
            ("parameter less", "const kv_two *two, kv_struct_header *header)",
             "const kv_two *two)", "kv_second"),
            ("result of another type", "int32_t kv_first(", "int64_t kv_first(", "kv_first"),
            ("function gone", "kv_second(", "kv_seconded(", "kv_second"),
        ]:
            with self.subTest(name):
                source = SOURCE % ("a", "a")
                if name == "parameter less":
                    source = source.replace(" + (int32_t)header->flags", "")
                found = self.findings(old, new, source)
                self.assertIn(word, found)

    def test_growth_does_not_hide_another_change(self):
        found = self.findings("uint32_t x, y;", "uint32_t y, x; uint64_t z;")
        self.assertIn("kv_one", found)

    def test_parameters_that_change_places(self):
        header = HEADER.replace("const kv_one *one, uint32_t count);",
                                "const kv_one *one, uint32_t count);\n"
                                "int32_t kv_range(uint64_t first, uint64_t count);")
        body = "\nint32_t kv_range(uint64_t first, uint64_t count) { return first < count; }\n"
        old = self.build("range", header, SOURCE % ("a", "a") + body)
        swapped = "uint64_t count, uint64_t first"
        new = self.build("swapped", header.replace("uint64_t first, uint64_t count", swapped),
                         SOURCE % ("a", "a")
                         + body.replace("uint64_t first, uint64_t count", swapped))
        self.assertEqual(abi_guard.incompatible_changes(old, new), [])  # which abidiff cannot see
        found = abi_guard.changed_parameters(old, new)
        self.assertEqual(
            found, ["parameters of kv_range were (first, count) and are (count, first)"])
        self.assertEqual(abi_guard.changed_parameters(old, old), [])

    def test_layouts(self):
        head = [("struct_size", 0, 4), ("flags", 4, 4), ("next", 8, 8)]
        old = {"kv_struct_header": (16, head), "kv_one": (24, head + [("x", 16, 4),
                                                                      ("reserved0", 20, 4)])}
        def findings(**changed):
            return abi_guard.changed_layouts(old, {**old, **changed})
        self.assertEqual(findings(), [])
        used = head + [("x", 16, 4), ("window", 20, 4)]
        self.assertEqual(findings(kv_one=(32, used + [("y", 24, 8)])), [])
        self.assertEqual(findings(kv_new=(16, head)), [])
        for changed in [
            {"kv_struct_header": (24, head + [("more", 16, 8)])},
            {"kv_struct_header": (16, [("flags", 0, 4), ("struct_size", 4, 4), ("next", 8, 8)])},
            {"kv_one": (24, head + [("reserved0", 16, 4), ("x", 20, 4)])},
            {"kv_one": (24, head + [("renamed", 16, 4), ("reserved0", 20, 4)])},
            {"kv_one": (24, head + [("x", 16, 8)])},
            {"kv_one": (16, head)},
        ]:
            with self.subTest(changed):
                self.assertNotEqual(findings(**changed), [])
        without = dict(old)
        del without["kv_one"]
        self.assertEqual(abi_guard.changed_layouts(old, without), ["struct kv_one is gone"])

    def test_constants(self):
        old = {"KV_OK": "0", "KV_INVALID": "-100", "KVRT_VERSION": "100"}
        more = {**old, "KV_NEW": "7", "KVRT_VERSION": "200"}
        self.assertEqual(abi_guard.changed_constants(old, more), [])
        self.assertIn("KV_INVALID was -100 and is -101",
                      abi_guard.changed_constants(old, {**old, "KV_INVALID": "-101"})[0])
        self.assertIn("KV_OK is gone", abi_guard.changed_constants(
            old, {"KV_INVALID": "-100", "KVRT_VERSION": "100"})[0])

    def test_a_library_without_debug_information_is_an_error(self):
        library = self.folder / "stripped.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library),
                        str(self.folder / "released" / "library.c")], check=True)
        with self.assertRaises(abi_guard.GuardError):
            abi_guard.dump(library, self.folder / "released", self.folder / "stripped.abi")


class Library(unittest.TestCase):
    def test_the_library_keeps_the_released_interface(self):
        self.assertEqual(abi_guard.check(pathlib.Path(os.environ["KVRT_BUILD_TREE"])), [])

    def test_every_released_function_is_still_in_the_golden_list(self):
        dump = (abi_guard.RELEASED / "kvrt.abi").read_text()
        released = set(re.findall(r"<elf-symbol name='(kv\w+)'", dump))
        described = set(re.findall(r"<function-decl name='(kv\w+)'", dump))
        golden = set((abi_guard.GOLDEN / "symbols.txt").read_text().split())
        self.assertGreater(len(released), 30)
        self.assertEqual(described, released)
        self.assertLessEqual(released, golden)


if __name__ == "__main__":
    unittest.main()
