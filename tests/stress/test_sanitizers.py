"""Promise 19: no report of a sanitizer in our own C, over the whole native suite, with the faults of its shim, and over
tests that use the kernels.

The extensions and the shimmed ring are built anew with -fsanitize, and the suite runs in a process that has its runtime loaded.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from libaio_ext import build
from tests.stress.tally import Tally
from tiered.io.probe import libaio_unavailable

PROMISE = "19 (tests under sanitizers)"
ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "address": ("libasan.so", {"ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=0:exitcode=99"}),
    "undefined": ("libubsan.so", {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=99"}),
    "thread": ("libtsan.so", {"TSAN_OPTIONS": "halt_on_error=0:exitcode=99:report_signal_unsafe=0"}),
}
SUITE = ["tests/io/test_libaio.py", "tests/links/test_disk.py"]
QUICK = ["tests/io/test_libaio.py", "-k", "not strace and not under and not refuses_aio"]
COPIES_AND_CODES = ["tests/tables/test_tables.py", "tests/zero/test_few_bytes.py", "tests/zero/paging/test_quantised.py"]
KERNEL_TESTS = "is_a_tensor or sums_are or kernel_gives_the_bits or in_c_and_torch or unpacked_alike or zeros_stay"
QUICK_KERNELS = [*COPIES_AND_CODES, "-k", KERNEL_TESTS]
pytestmark = pytest.mark.skipif(libaio_unavailable() is not None, reason=f"no libaio here: {libaio_unavailable()}")


def runtime(kind: str) -> str:
    """Path of the sanitizer's library. Skips where there is none, or where it does not run."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    name, options = KINDS[kind]
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip(f"no {name}")
    trial = subprocess.run(
        launch(kind, "-c", "print(1)"), env=environment(found, options), capture_output=True, text=True, check=False
    )
    if trial.returncode:
        pytest.skip(f"{name} does not run here: {trial.stderr.strip().splitlines()[:1]}")
    return found


def environment(library: str, options: dict[str, str]) -> dict[str, str]:
    """With C++'s library loaded as well: else the sanitizer does not find how to throw, and ends at torch's first exception."""
    asked = ["gcc", "-print-file-name=libstdc++.so.6"]
    thrower = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    preloaded = f"{os.path.realpath(library)} {os.path.realpath(thrower)}"
    return {**os.environ, **options, "LD_PRELOAD": preloaded, "OMP_NUM_THREADS": "1"}


def launch(kind: str, *words: str) -> list[str]:
    """TSan wants addresses where older kernels put them."""
    return [*(["setarch", "-R"] if kind == "thread" else []), sys.executable, *words]


def built(kind: str, folder: Path) -> dict[str, Path]:
    """The extensions by their modules, with the sanitizer in them."""
    flags = ["-O1", "-g", f"-fsanitize={kind}", "-fno-omit-frame-pointer"]
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from libaio_ext import build\n"
        "from setuptools import Distribution\n"
        "found = [build.ffibuilder(build.link_arguments()), build.disk_link(), *build.kernels()]\n"
        "extensions = [one.distutils_extension(tmpdir=sys.argv[1]) for one in found]\n"
        "for extension in extensions:\n"
        "    extension.extra_compile_args += sys.argv[2:]\n"
        "    extension.extra_link_args = [*(extension.extra_link_args or []), *sys.argv[2:]]\n"
        "made = Distribution({'ext_modules': extensions}).get_command_obj('build_ext')\n"
        "made.build_lib, made.build_temp, made.inplace = sys.argv[1], sys.argv[1] + '/objects', 0\n"
        "made.ensure_finalized(); made.run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), *flags], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made = {}
    for module in (build.MODULE, build.LINK, *build.KERNELS):
        (made[module],) = folder.glob(f"{module.replace('.', '/')}*.so")
    return made


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Path]]:
    """``built``, once for each sanitizer."""

    @functools.cache
    def made(kind: str) -> dict[str, Path]:
        return built(kind, tmp_path_factory.mktemp(kind))

    return made


def passed(kind: str, extensions: Callable[[str], dict[str, Path]], suite: list[str]) -> int:
    """Run tests under the sanitizer and return how many passed. All have to, without a report."""
    library = runtime(kind)
    files = extensions(kind)
    modules = [f"{module}={file}" for module, file in files.items()]
    options, reports = KINDS[kind][1], next(iter(files.values())).parent / "report"
    options = {key: f"{value}:log_path={reports}" for key, value in options.items()}  # else they go where pytest puts output
    done = subprocess.run(
        launch(kind, "-m", "tests.stress.sanitized", *modules, "--", *suite),
        env={**environment(library, options), "TIERED_RING_FLAGS": f"-fsanitize={kind} -fno-omit-frame-pointer"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    output = done.stdout + done.stderr + "".join(file.read_text() for file in sorted(reports.parent.glob("report.*")))
    assert "Sanitizer" not in output, output[-20_000:]
    assert "runtime error" not in output, output[-20_000:]
    assert done.returncode == 0, output[-20_000:]
    found = re.search(r"(\d+) passed", output)
    assert found, output[-5000:]
    return int(found[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suite", ["quick", pytest.param("whole", marks=pytest.mark.soak)])
def test_the_native_suite(extensions: Callable[[str], dict[str, Path]], kind: str, suite: str, tally: Tally) -> None:
    if suite == "quick" and kind != "address":
        pytest.skip("the long run has all of them")
    for _ in range(passed(kind, extensions, QUICK if suite == "quick" else SUITE)):
        tally.ran()


@pytest.mark.parametrize("kind", ["address", "undefined"])
@pytest.mark.parametrize("suite", ["quick", pytest.param("whole", marks=pytest.mark.soak)])
def test_the_kernels(extensions: Callable[[str], dict[str, Path]], kind: str, suite: str, tally: Tally) -> None:
    if suite == "quick" and kind != "address":
        pytest.skip("the long run has both of them")
    for _ in range(passed(kind, extensions, QUICK_KERNELS if suite == "quick" else COPIES_AND_CODES)):
        tally.ran()
