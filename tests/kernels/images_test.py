"""The fat binaries that are built into the plugin have code for each delivered architecture,
and PTX, with the flags that bytes depend on, for those to come."""

import pathlib
import struct
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import compile_kernels  # noqa: E402

PTX, MACHINE_CODE = 1, 2


def entries(image):
    """[(kind, architecture, its header)] of a fat binary."""
    magic, _, header, size = struct.unpack_from("<IHHQ", image, 0)
    assert magic == 0xBA55ED50 and header + size == len(image)
    found, at = [], header
    while at < len(image):
        kind, _, header, size = struct.unpack_from("<HHIQ", image, at)
        architecture, = struct.unpack_from("<I", image, at + 28)
        found.append((kind, architecture, image[at:at + header]))
        at += header + size
    return found


class Images(unittest.TestCase):
    def test_all_architectures_are_in_every_image(self):
        nvcc = compile_kernels.find_nvcc()
        if nvcc is None:
            print("kernels not compiled: " + compile_kernels.NO_NVCC)
            self.skipTest(compile_kernels.NO_NVCC)
        compiled = compile_kernels.compile_all(nvcc, compile_kernels.version_of(nvcc))
        numbers = [int(each.rstrip("a")) for each in compile_kernels.ARCHITECTURES]
        self.assertGreater(len(compile_kernels.sources()), 3)
        for source in compile_kernels.sources():
            with self.subTest(source=source.name), tempfile.TemporaryDirectory() as folder:
                image = pathlib.Path(folder) / "image.fatbin"
                compile_kernels.link(nvcc, compiled, source, image)
                found = entries(image.read_bytes())
                self.assertEqual([each[:2] for each in found],
                                 [(MACHINE_CODE, number) for number in numbers] +
                                 [(PTX, numbers[-1])])
                self.assertIn(b"--fmad false", found[-1][2])


if __name__ == "__main__":
    unittest.main()
