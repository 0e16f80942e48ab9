"""Programs outside the tree, built against an installed library as their authors would."""

import os
import pathlib
import shutil
import subprocess

HERE = pathlib.Path(__file__).resolve().parent


def run(*command, cwd=None, environment=None):
    """Runs a command and returns what it printed; fails the test with its output otherwise."""
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    if result.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: {result.returncode}\n{result.stdout}")
    return result.stdout


def build_with_pkg_config(program, library_dir, pkg_config_flags=(), compiler_flags=()):
    """Builds consumer.c with what pkg-config says of the library in `library_dir`."""
    environment = {"PKG_CONFIG_PATH": str(library_dir / "pkgconfig")}
    words = run("pkg-config", "--cflags", "--libs", *pkg_config_flags, "kvrt >= 0.1",
                environment=environment).split()
    run("gcc", "-std=c99", *compiler_flags, HERE / "consumer.c", "-o", program, *words)
    return program


def build_with_cmake(source, prefix, target, version="0.1"):
    """Builds consumer.c in the new folder `source`, with what find_package finds in `prefix`."""
    source.mkdir()
    shutil.copy(HERE / "consumer.c", source)
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\n"
        "project(consumer LANGUAGES C)\n"
        f"find_package(kvrt {version} REQUIRED)\n"
        "add_executable(consumer consumer.c)\n"
        f"target_link_libraries(consumer PRIVATE {target})\n"
    )
    run("cmake", "-G", "Ninja", "-S", source, "-B", source / "build",
        f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", source / "build")
    return source / "build" / "consumer"
