"""The batching examples of all languages: the same table as C++ for recorded traces, for pools that
are too small for all at once, and an error, never a crash, for whatever is wrong with a trace.

KVRT_BUILD_TREE names the tree with the C++ program, KVRT_BINDINGS the languages that were built.
"""

import os
import pathlib
import shutil
import struct
import subprocess
import tempfile
import unittest

import traces

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRACE = ROOT / "samples" / "batching" / "smollm2.trace"


def programs():
    """Name and path of every batching program that this run has built."""
    found = {"c++": pathlib.Path(os.environ["KVRT_BUILD_TREE"]) / "bin" / "batching"}
    for language in os.environ["KVRT_BINDINGS"].split():
        folder = ROOT / "build" / "bindings" / language
        found[language] = folder / "batching"
        if language == "csharp" and "KVRT_DOTNET_ROOT" in os.environ:
            found["csharp on .NET"] = folder / "batching-dotnet"
    return found


def replay(program, *arguments):
    return subprocess.run([str(program), *map(str, arguments)], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)


class Batching(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="kvrt-batching-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)

    def write(self, name, data):
        path = self.folder / name
        path.write_bytes(data)
        return path

    def tables(self, trace, *arguments):
        """What each program prints, which must be a success and the same in every language."""
        tables = {}
        for language, program in programs().items():
            result = replay(program, trace, *arguments)
            self.assertEqual(result.returncode, 0, f"{language}: {result.stderr}{result.stdout}")
            tables[language] = result.stdout
        for language, table in tables.items():
            self.assertEqual(table, tables["c++"], language)
        return tables["c++"]

    def test_recorded_trace(self):
        table = self.tables(TRACE)
        rows = [line.split() for line in table.splitlines()[1:-1]]
        self.assertGreaterEqual(len(rows), 3)
        self.assertEqual({row[-1] for row in rows}, {"equal"})
        self.assertGreater(sum(int(row[3]) for row in rows), 0, "drafts are rolled back")
        self.assertGreater(sum(int(row[6]) for row in rows), 0, "rounds of compaction run")
        self.assertGreater(int(table.split("returned ")[1].split(",")[0]), 0)

    def test_neither_slots_nor_threads_change_a_request(self):
        requests = {tuple(self.tables(TRACE, "--slots", slots, "--threads", threads)
                          .splitlines()[:-1])
                    for slots in (1, 2, 4) for threads in (1, 2)}
        self.assertEqual(len(requests), 1)

    def test_a_pool_too_small_for_all_at_once(self):
        trace = self.write("crowded.trace", traces.crowded())
        small = self.tables(trace, "--slots", 4, "--arena-mib", 2)
        large = self.tables(trace, "--slots", 4, "--arena-mib", 64)
        self.assertEqual(small.splitlines()[:-1], large.splitlines()[:-1])
        steps = [int(t.split("steps ")[1].split(",")[0]) for t in (small, large)]
        self.assertGreater(steps[0], steps[1], "some had to wait")

    def test_a_request_too_large_for_the_pool(self):
        trace = self.write("large.trace", traces.crowded(requests=1, rows=200))
        for language, program in programs().items():
            result = replay(program, trace, "--arena-mib", 2)
            self.assertEqual(result.returncode, 1, f"{language}: {result.stdout}")
            self.assertNotEqual(result.stderr.strip(), "", language)

    def test_a_wrong_output_is_noticed(self):
        data = bytearray(TRACE.read_bytes()[:-8])
        data[-2] ^= 0x40  # the exponent of the last recorded output
        trace = self.write("wrong.trace", traces.seal(bytes(data)))
        for language, program in programs().items():
            result = replay(program, trace)
            self.assertEqual(result.returncode, 1, f"{language}: {result.stderr}")
            self.assertIn("DIFFERENT", result.stdout, language)

    def test_damaged_traces_are_errors(self):
        whole = TRACE.read_bytes()
        body = whole[:-8]
        damaged = {"empty": b"", "magic": b"KVTRACE2" + whole[8:], "cut": whole[:-1],
                   "half": whole[: len(whole) // 2], "longer": whole + b"\0",
                   "checksum": whole[:-1] + bytes([whole[-1] ^ 1]),
                   "bit": whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]}
        for field in range(8, 8 + 4 * 16, 4):  # every count and number of the head
            for value in (0xFFFFFFFF, 0x10000):
                damaged[f"field at {field} is {value}"] = traces.seal(
                    body[:field] + struct.pack("<I", value) + body[field + 4:])
        harmless = 0
        for name, data in damaged.items():
            trace = self.write("damaged.trace", data)
            expected = None
            for language, program in programs().items():
                result = replay(program, trace)
                with self.subTest(name, language=language):
                    # Some numbers, such as a budget, may be large: then all programs agree.
                    if expected is None:
                        expected = result.returncode
                        harmless += expected == 0
                    self.assertIn(result.returncode, (0, 1), result.stderr)
                    self.assertEqual(result.returncode, expected, result.stderr)
                    if result.returncode == 1:
                        self.assertNotEqual(result.stderr.strip(), "")
        self.assertLess(harmless, 12)

    def test_wrong_arguments(self):
        for arguments in ([], ["--slots"], [TRACE, "--slots", "0"], [TRACE, "--slots", "x"],
                          [TRACE, "--arena-mib", "-1"], [TRACE, "--wrong", "1"], [TRACE, TRACE]):
            for language, program in programs().items():
                with self.subTest(arguments, language=language):
                    result = replay(program, *arguments)
                    self.assertEqual(result.returncode, 2, result.stderr)
                    self.assertNotEqual(result.stderr.strip(), "")

    def test_missing_file(self):
        for language, program in programs().items():
            result = replay(program, self.folder / "nothing.trace")
            self.assertEqual(result.returncode, 1, language)
            self.assertIn("nothing.trace", result.stderr, language)


if __name__ == "__main__":
    unittest.main()
