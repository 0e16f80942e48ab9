"""The CUDA kernels compile for all architectures that are delivered, none of them spills, and the
table of what they take, in docs/kernels.md, is right."""

import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import kernel_resources  # noqa: E402

SAID = """ptxas info    : Compiling entry function 'kvrt_one' for 'sm_80'
ptxas info    : Function properties for kvrt_one
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 688 bytes cmem[0]
ptxas info    : Compiling entry function 'kvrt_two' for 'sm_80'
ptxas info    : Function properties for kvrt_two
    48 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, 1024 bytes smem, 376 bytes cmem[0]
"""


class Resources(unittest.TestCase):
    def test_what_ptxas_says_is_understood(self):
        table = kernel_resources.parse(SAID)
        self.assertEqual(table, {"kvrt_one": [40, 0, 0, 0], "kvrt_two": [255, 48, 40, 1024]})
        spills = kernel_resources.spills_of({name: {"80": of} for name, of in table.items()})
        self.assertEqual(spills, ["kvrt_two for sm_80: 40 bytes spilled, 48 of stack"])

    def test_kernels_compile_do_not_spill_and_are_listed(self):
        nvcc = kernel_resources.find_nvcc()
        if nvcc is None:
            print("kernels not compiled: " + kernel_resources.NO_NVCC)
            self.skipTest(kernel_resources.NO_NVCC)
        version = kernel_resources.version_of(nvcc)
        table = kernel_resources.measure(nvcc, version)
        self.assertEqual(kernel_resources.check(table, version), [])


if __name__ == "__main__":
    unittest.main()
