"""The Debian packages: installed into a throw-away root, used, and removed without a trace.

KVRT_PACKAGES_TREE is the tree in which cpack ran (build/packages if unset; `make packages`).
"""

import os
import pathlib
import shutil
import tempfile
import unittest

from outside import build_with_cmake, build_with_pkg_config, run

ROOT = pathlib.Path(__file__).resolve().parents[2]
TREE = pathlib.Path(os.environ.get("KVRT_PACKAGES_TREE", ROOT / "build" / "packages"))


class Packages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.work = pathlib.Path(tempfile.mkdtemp(prefix="kvrt-debian-"))
        cls.addClassCleanup(shutil.rmtree, cls.work)
        cls.architecture = run("dpkg", "--print-architecture").strip()
        cls.triplet = run("gcc", "-print-multiarch").strip()
        # ldconfig, which the packages call, works on the throw-away root.
        tools = cls.work / "tools"
        tools.mkdir()
        (tools / "ldconfig").write_text('#!/bin/sh\nexec /sbin/ldconfig -r "$DPKG_ROOT" "$@"\n')
        (tools / "ldconfig").chmod(0o755)
        cls.path = f"{tools}:/usr/sbin:/sbin:{os.environ['PATH']}"

    def package(self, name):
        found = sorted((TREE / "packages").glob(f"{name}_*_{self.architecture}.deb"))
        self.assertEqual(len(found), 1, f"{name} in {TREE}/packages: run `make packages`")
        return found[0]

    def new_root(self):
        root = pathlib.Path(tempfile.mkdtemp(dir=self.work))
        admin = root / "var" / "lib" / "dpkg"
        for folder in ("info", "updates", "triggers"):
            (admin / folder).mkdir(parents=True)
        for file in ("status", "available"):
            (admin / file).touch()
        for folder in ("etc", "var/cache/ldconfig"):  # for ldconfig
            (root / folder).mkdir(parents=True)
        return root

    def dpkg(self, root, *arguments):
        """dpkg on a root that holds none of the system's own libraries."""
        as_root = [] if os.getuid() == 0 else ["fakeroot"]
        return run(*as_root, "dpkg", f"--root={root}", f"--log={self.work}/dpkg.log",
                   "--force-script-chrootless",
                   "--ignore-depends=libc6,libgcc-s1,libstdc++6", *arguments,
                   environment={"PATH": self.path})

    @staticmethod
    def files(root):
        """What lies in a root besides the package manager's own notes and ldconfig's cache."""
        return {
            path.relative_to(root).as_posix() for path in root.rglob("*")
            if (path.is_symlink() or path.is_file())
            and not path.relative_to(root).as_posix().startswith(("var/", "etc/"))
        }

    def field(self, name, field):
        return run("dpkg-deb", "--field", self.package(name), field).strip()

    def test_install_use_remove(self):
        root = self.new_root()
        self.dpkg(root, "--install", self.package("libkvrt0"), self.package("libkvrt-dev"))
        library_dir = root / "usr" / "lib" / self.triplet
        self.assertIn(f"usr/lib/{self.triplet}/libkvrt.so.0.1.0", self.files(root))
        self.assertIn("usr/include/kvrt/kvrt.h", self.files(root))
        self.assertTrue((root / "etc" / "ld.so.cache").exists())

        environment = {"LD_LIBRARY_PATH": str(library_dir)}
        shared = build_with_pkg_config(self.work / "shared", library_dir)
        self.assertIn("[libkvrt.so.0]", run("readelf", "-d", shared))
        self.assertIn("consumer ok", run(shared, environment=environment))
        static = build_with_pkg_config(self.work / "static", library_dir, ["--static"], ["-static"])
        self.assertIn("consumer ok", run(static))
        for target in ("kvrt", "kvrt_static"):
            program = build_with_cmake(self.work / target, root / "usr", f"kvrt::{target}")
            self.assertIn("consumer ok", run(program, environment=environment))

        self.dpkg(root, "--purge", "libkvrt-dev", "libkvrt0")
        self.assertEqual(self.files(root), set())
        self.assertFalse((root / "usr" / "include").exists())
        self.assertNotIn("kvrt", (root / "var/lib/dpkg/status").read_text())

    def test_the_library_alone_runs_programs(self):
        root = self.new_root()
        self.dpkg(root, "--install", self.package("libkvrt0"))
        self.assertEqual(
            {name for name in self.files(root) if "doc" not in name},
            {f"usr/lib/{self.triplet}/libkvrt.so.0", f"usr/lib/{self.triplet}/libkvrt.so.0.1.0"})

    def test_the_plugin_comes_as_a_package_of_its_own(self):
        root = self.new_root()
        self.dpkg(root, "--install", self.package("libkvrt0"), self.package("libkvrt-dev"))
        library_dir = root / "usr" / "lib" / self.triplet
        program = build_with_pkg_config(self.work / "asks", library_dir)
        environment = {"LD_LIBRARY_PATH": str(library_dir)}
        before = self.files(root)
        self.assertRegex(run(program, environment=environment),
                         r"no GPU: .*plugin was not found: .*libkvrt_cuda\.so\.0")
        self.dpkg(root, "--install", self.package("libkvrt-cuda0"))
        self.assertEqual(
            {name for name in self.files(root) - before if "doc" not in name},
            {f"usr/lib/{self.triplet}/libkvrt_cuda.so.0{rest}" for rest in ("", ".1.0")})
        self.assertRegex(run(program, environment=environment),
                         r"GPU ok|no GPU: .*CUDA (driver|device)")
        self.dpkg(root, "--purge", "libkvrt-cuda0")
        self.assertEqual(self.files(root), before)

    def test_the_other_packages_need_the_library_of_the_same_version(self):
        version = self.field("libkvrt0", "Version")
        self.assertEqual(self.field("libkvrt-dev", "Depends"), f"libkvrt0 (= {version})")
        # Of the plugin, whose interface is the release's own, as well.
        self.assertIn(f"libkvrt0 (= {version})", self.field("libkvrt-cuda0", "Depends"))
        for name in ("libkvrt-dev", "libkvrt-cuda0"):
            with self.assertRaisesRegex(AssertionError, "libkvrt0"):
                self.dpkg(self.new_root(), "--install", self.package(name))

    def test_the_library_names_what_it_needs(self):
        for name in ("libkvrt0", "libkvrt-cuda0"):
            depends = self.field(name, "Depends")
            for package in ("libc6", "libstdc++6"):
                self.assertIn(package, depends)
        control = pathlib.Path(tempfile.mkdtemp(dir=self.work))
        run("dpkg-deb", "--control", self.package("libkvrt0"), control)
        self.assertRegex((control / "shlibs").read_text(), r"^libkvrt 0 libkvrt0 \(>= 0\.1\.0")

    def test_licences_of_what_is_linked_in_come_along(self):
        for name in ("libkvrt0", "libkvrt-dev", "libkvrt-cuda0"):
            root = pathlib.Path(tempfile.mkdtemp(dir=self.work))
            run("dpkg-deb", "--extract", self.package(name), root)
            text = (root / "usr" / "share" / "doc" / name / "copyright").read_text()
            for part in ("Apache-2.0", "Google", "Microsoft", "Zverovich", "Collet"):
                self.assertIn(part, text)


if __name__ == "__main__":
    unittest.main()
