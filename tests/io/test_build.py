"""The package is built with what there is: libaio linked in, libaio beside it, or none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiler import quick_compiler

ROOT = Path(__file__).resolve().parents[2]
USE = """
import sys
sys.path.insert(0, sys.argv[1])
from tiered.io.posix import PosixBackend
PosixBackend().close()
from tiered.io.probe import libaio_unavailable
print(libaio_unavailable() is None)
try:
    from tiered.io.libaio import LibaioBackend
    LibaioBackend().close()
except ImportError as error:
    print(error)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What setup.py needs, alone."""
    target = tmp_path / "checkout"
    built = shutil.ignore_patterns("*.so", "__pycache__")
    for folder in ("libaio_ext", "tiered/io"):
        shutil.copytree(ROOT / folder, target / folder, ignore=built)
    for name in ("errors.py", "types.py"):
        shutil.copy(ROOT / "tiered" / name, target / "tiered")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in"):
        shutil.copy(ROOT / name, target)
    (target / "README.md").write_text("")
    (target / "tiered" / "__init__.py").write_text('__version__ = "0"\n')  # where pyproject.toml looks for it
    return target


def build(checkout: Path, **environment: str) -> tuple[Path, str]:
    """The folder that the package was built into, and what the build said."""
    done = subprocess.run(
        [sys.executable, "setup.py", "build", "--build-lib", "out"],
        cwd=checkout,
        env=os.environ | {"CC": quick_compiler(checkout), "PYTHONWARNINGS": ""} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return checkout / "out", done.stdout + done.stderr


def use(package: Path) -> list[str]:
    child = subprocess.run([sys.executable, "-c", USE, str(package)], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"TIERED_LIBAIO": "off"}, "TIERED_LIBAIO=off"),
        ({"CC": "/nowhere/gcc"}, r"there is no C compiler \(/nowhere/gcc\)"),
        ({"CFLAGS": "-D__LIBAIO_H"}, r"a trial build failed|\.h not found"),  # the header's own guard makes it empty
    ],
    ids=["off", "no compiler", "no header"],
)
def test_without_libaio_the_rest_is_built(checkout: Path, environment: dict[str, str], why: str) -> None:
    package, said = build(checkout, **environment)
    lines = [line for line in said.splitlines() if "libaio backend is not built" in line]
    assert len(lines) == 1
    assert re.search(why, lines[0])
    assert "libaio-dev" in lines[0]
    assert not list(package.rglob("_aio*.so"))
    works, reason = use(package)
    assert works == "False"
    assert "libaio-dev" in reason


def test_a_header_that_is_not_there_is_named(checkout: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(
        f'#!/bin/sh\necho "$@" | grep -q -- -shared || exec {quick_compiler(checkout)} "$@"\n'
        'echo "probe.c:3:10: fatal error: libaio.h: No such file or directory" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    _, said = build(checkout, CC=str(compiler))
    assert "is not built: libaio.h not found;" in said


@pytest.mark.parametrize("mode", ["auto", "shared"])
def test_with_libaio_the_backend_works(checkout: Path, mode: str) -> None:
    if shutil.which("gcc") is None or not Path("/usr/include/libaio.h").exists():
        pytest.skip("no gcc or no libaio.h")
    package, said = build(checkout, TIERED_LIBAIO=mode)
    assert "not built" not in said
    assert use(package) == ["True"]
    (extension,) = package.rglob("_aio*.so")
    needed = subprocess.run(["ldd", str(extension)], capture_output=True, text=True, check=False).stdout
    archive = subprocess.run(["gcc", "-print-file-name=libaio.a"], capture_output=True, text=True, check=False)
    is_static = mode == "auto" and os.path.isabs(archive.stdout.strip())
    assert ("libaio.so" in needed) is not is_static


def test_an_unknown_mode_is_refused(checkout: Path) -> None:
    with pytest.raises(AssertionError, match="TIERED_LIBAIO=sometimes: must be one of auto"):
        build(checkout, TIERED_LIBAIO="sometimes")


def test_the_ring_compiles_without_a_warning(tmp_path: Path) -> None:
    if shutil.which("gcc") is None or not Path("/usr/include/libaio.h").exists():
        pytest.skip("no gcc or no libaio.h")
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-Wconversion", "-Wshadow", "-Wstrict-prototypes"]
    done = subprocess.run(
        ["gcc", *flags, "-c", str(ROOT / "libaio_ext" / "aio_ring.c"), "-o", str(tmp_path / "aio_ring.o")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
