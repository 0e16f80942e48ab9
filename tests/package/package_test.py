"""The library as others get it: installs a build tree into a throw-away prefix and looks at it from
outside. What the files export and need, whether programs find and link them through pkg-config and
CMake, shared and static, whether the library finds its CUDA plugin, and whether the header compiles
as every C and C++ of both compilers.

KVRT_BUILD_TREE names the tree (a release one: it has both libraries).
"""

import os
import pathlib
import re
import shutil
import tempfile
import unittest

from outside import build_with_cmake, build_with_pkg_config, run

HERE = pathlib.Path(__file__).resolve().parent
OURS = re.compile(r"^(kv|kvrt)_[a-z0-9_]+$")


def setUpModule():
    global work, prefix, library_dir, shared, static, plugin
    work = pathlib.Path(tempfile.mkdtemp(prefix="kvrt-package-"))
    unittest.addModuleCleanup(shutil.rmtree, work)
    prefix = work / "prefix"
    run("cmake", "--install", os.environ["KVRT_BUILD_TREE"], "--prefix", prefix)
    shared = next(prefix.rglob("libkvrt.so")).resolve()
    static = next(prefix.rglob("libkvrt.a"))
    library_dir = static.parent
    plugin = library_dir / "libkvrt_cuda.so.0"


def defined_globals(*arguments):
    """(kind, name, version) of the defined global symbols that nm lists."""
    symbols = []
    for line in run("nm", "--defined-only", *arguments).splitlines():
        fields = line.split()
        if len(fields) == 3:
            name, _, version = fields[2].partition("@@")
            symbols.append((fields[1], name, version))
    return symbols


class SharedLibrary(unittest.TestCase):
    def test_soname_and_links(self):
        self.assertIn("[libkvrt.so.0]", run("readelf", "-d", shared))
        self.assertEqual(shared.name, "libkvrt.so.0.1.0")
        for link in ("libkvrt.so", "libkvrt.so.0"):
            self.assertEqual((library_dir / link).resolve(), shared)

    def test_exports_only_our_names_under_the_version_node(self):
        symbols = [s for s in defined_globals("-D", "--extern-only", shared) if s[0] != "A"]
        self.assertIn("kv_pool_create", [name for _, name, _ in symbols])
        for _, name, version in symbols:
            self.assertRegex(name, OURS)
            self.assertRegex(version, r"^KVRT_\d+\.\d+$", name)

    def test_exports_exactly_what_the_header_declares(self):
        headers = sorted((prefix / "include" / "kvrt").glob("*.h"))
        self.assertEqual([path.name for path in headers], ["kv_cuda.h", "kvrt.h"])
        header = "".join(path.read_text() for path in headers)
        declared = set(re.findall(r"^KV_API[^;(]*?\b(kv[a-z0-9_]*)\(", header, re.MULTILINE))
        exported = {n for k, n, _ in defined_globals("-D", "--extern-only", shared) if k != "A"}
        self.assertEqual(exported, declared)

    def test_needs_only_system_libraries(self):
        needed = set(re.findall(r"NEEDED.*\[(.+?)\.so", run("readelf", "-d", shared)))
        self.assertLessEqual(needed, {"libstdc++", "libm", "libgcc_s", "libc", "ld-linux-x86-64"})

    def test_can_be_loaded_late(self):
        # Static thread-local storage may be used up when a program loads us with dlopen.
        dynamic = run("readelf", "-d", shared)
        self.assertNotIn("STATIC_TLS", dynamic)
        self.assertNotIn("TEXTREL", dynamic)

    def test_does_not_replace_malloc(self):
        program = work / "malloc_owner"
        run("gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", HERE / "malloc_owner.c", "-o",
            program, "-ldl")
        self.assertIn("malloc ok", run(program, shared))
        # Preloaded, a library comes before the C library in every look-up.
        self.assertIn("malloc ok", run(program, shared, environment={"LD_PRELOAD": str(shared)}))


class StaticLibrary(unittest.TestCase):
    def test_defines_only_our_names(self):
        symbols = defined_globals("--extern-only", static)
        self.assertIn("kv_pool_create", [name for _, name, _ in symbols])
        for _, name, _ in symbols:
            self.assertRegex(name, OURS)

    def test_carries_its_private_parts(self):
        undefined = run("nm", "--undefined-only", static)
        self.assertNotRegex(undefined, r"\b(mi_|_mi_|_ZN3hwy|_ZN3fmt|XXH)")

    def test_lives_beside_the_hosts_own_copies(self):
        program = work / "clash"
        run("gcc", "-std=c99", f"-I{prefix}/include", HERE / "consumer.c", HERE / "clashing_host.c",
            static, "-o", program, "-lstdc++", "-lm", "-pthread")
        self.assertIn("consumer ok", run(program))


class Consumers(unittest.TestCase):
    """Programs outside the tree, built as their authors would."""

    def test_pkg_config_shared(self):
        program = build_with_pkg_config(work / "pkg-shared", library_dir)
        self.assertIn("[libkvrt.so.0]", run("readelf", "-d", program))
        output = run(program, environment={"LD_LIBRARY_PATH": str(library_dir)})
        self.assertIn("consumer ok", output)

    def test_pkg_config_static(self):
        program = build_with_pkg_config(work / "pkg-static", library_dir, ["--static"],
                                        ["-static"])
        self.assertNotIn("NEEDED", run("readelf", "-d", program))
        # The C library of a static program crashes when it loads the plugin.
        plugin = {"KVRT_CUDA_PLUGIN": str(shared)}
        self.assertRegex(run(program, environment=plugin),
                         r"no GPU: .*linked statically.*\nconsumer ok")

    def test_find_package_shared(self):
        program = build_with_cmake(work / "cmake-shared", prefix, "kvrt::kvrt")
        self.assertIn("[libkvrt.so.0]", run("readelf", "-d", program))
        self.assertIn("consumer ok", run(program))

    def test_find_package_static(self):
        program = build_with_cmake(work / "cmake-static", prefix, "kvrt::kvrt_static")
        self.assertNotIn("libkvrt", run("readelf", "-d", program))
        self.assertIn("consumer ok", run(program))

    def test_find_package_refuses_another_minor_version(self):
        with self.assertRaisesRegex(AssertionError, r"compatible\s+with requested version"):
            build_with_cmake(work / "cmake-version", prefix, "kvrt::kvrt", version="0.2")


class CudaPlugin(unittest.TestCase):
    """What is opened when a pool is made on a CUDA device, and at no other time."""

    def test_lies_beside_the_library_with_no_name_to_link_to(self):
        self.assertEqual(plugin.resolve().name, "libkvrt_cuda.so.0.1.0")
        self.assertIn("[libkvrt_cuda.so.0]", run("readelf", "-d", plugin))
        self.assertFalse((library_dir / "libkvrt_cuda.so").exists())

    def test_exports_one_function(self):
        symbols = [s[1:] for s in defined_globals("-D", "--extern-only", plugin) if s[0] != "A"]
        self.assertEqual(symbols, [("kvrt_cuda_plugin", "KVRT_CUDA_0.1")])

    def test_needs_no_driver_and_no_toolkit_to_be_loaded(self):
        needed = set(re.findall(r"NEEDED.*\[(.+?)\.so", run("readelf", "-d", plugin)))
        self.assertLessEqual(needed, {"libstdc++", "libm", "libgcc_s", "libc", "ld-linux-x86-64"})
        self.assertEqual(re.findall(r" U (cu[A-Z]\w+|cuda[A-Z]\w+)",
                                    run("nm", "-D", "--undefined-only", plugin)), [])

    def test_is_found_by_the_installed_library(self):
        # What is refused, if anything, is the driver or the device: the plugin was there.
        program = build_with_pkg_config(work / "cuda-shared", library_dir)
        said = run(program, environment={"LD_LIBRARY_PATH": str(library_dir)})
        self.assertIn("consumer ok", said)
        self.assertRegex(said, r"GPU ok|no GPU: .*CUDA (driver|device)")
        self.assertNotIn("plugin was not found", said)

    def test_is_missed_with_the_places_where_it_was_looked_for(self):
        program = build_with_pkg_config(work / "cuda-missed", library_dir)
        nowhere = work / "nowhere" / "libkvrt_cuda.so.0"
        said = run(program, environment={"LD_LIBRARY_PATH": str(library_dir),
                                         "KVRT_CUDA_PLUGIN": str(nowhere)})
        self.assertRegex(said, rf"no GPU: .*plugin was not found: .*{nowhere}")

    def test_pkg_config_says_where_it_is(self):
        said = run("pkg-config", "--variable=cuda_plugin", "kvrt",
                   environment={"PKG_CONFIG_PATH": str(library_dir / "pkgconfig")})
        self.assertEqual(pathlib.Path(said.strip()).resolve(), plugin.resolve())

    def test_find_package_says_where_it_is(self):
        source = work / "cmake-plugin"
        source.mkdir()
        (source / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(asks LANGUAGES C)\n"
            "find_package(kvrt REQUIRED)\nmessage(STATUS \"plugin=<${kvrt_CUDA_PLUGIN}>\")\n")

        def answer():
            said = run("cmake", "-S", source, "-B", source / "build",
                       f"-DCMAKE_PREFIX_PATH={prefix}")
            return re.search(r"plugin=<(.*)>", said)[1]

        self.assertEqual(pathlib.Path(answer()).resolve(), plugin.resolve())
        hidden = plugin.with_name("hidden")
        plugin.rename(hidden)
        self.addCleanup(hidden.rename, plugin)
        self.assertEqual(answer(), "")


class Header(unittest.TestCase):
    """The header alone, in every language version, with klib's macros around it."""

    def compile(self, compiler, language, standard, *definitions):
        run(compiler, "-x", language, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic",
            "-Wshadow", "-Wconversion", "-Werror", "-fsyntax-only", f"-I{prefix}/include",
            *definitions, HERE / "header_use.h")


def add_header_tests():
    """One test case per compiler and standard, with and without klib's macros."""
    languages = {"c": ("gcc", "clang"), "c++": ("g++", "clang++")}
    standards = {"c": ("c99", "c11", "c17"), "c++": ("c++11", "c++17", "c++20")}
    macros = {"": (), "_beside_klib": ("-DWITH_KLIB_MACROS",)}
    for language, compilers in languages.items():
        for compiler in compilers:
            for standard in standards[language]:
                for suffix, definitions in macros.items():
                    def test(self, arguments=(compiler, language, standard, *definitions)):
                        self.compile(*arguments)

                    name = f"test_{compiler}_{standard}{suffix}".replace("+", "p")
                    setattr(Header, name, test)


add_header_tests()

if __name__ == "__main__":
    unittest.main()
