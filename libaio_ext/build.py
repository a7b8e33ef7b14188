"""Describes the extensions (cffi, API mode) to setup.py: ``tiered.io._aio``, ``tiered.links._disk``, which needs xxhash.h, and
``tiered.packing._unpack`` and ``tiered.tables._rows``, which need a compiler alone.

``TIERED_LIBAIO`` says how libaio comes in: ``static``, ``shared``, ``off``, or ``auto`` (default): static where there is
a libaio.a, else shared, and not at all where its header or the compiler is missing.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
MODULE = "tiered.io._aio"
KERNELS = {"tiered.packing._unpack": ("unpack", "moments"), "tiered.tables._rows": ("rows", "row_cache")}
"""Extension -> the names of its files."""
LINK = "tiered.links._disk"
MODES = ("auto", "static", "shared", "off")

# Compiled, linked and thrown away before the real build, so that what is missing is one line and not a compiler's page.
PROBE = """
#include <Python.h>
#include <libaio.h>
int tiered_probe(void)
{
    io_context_t context = 0;
    return io_setup(1, &context) + io_submit(context, 0, 0) + io_getevents(context, 0, 0, 0, 0) + io_destroy(context);
}
"""
INSTALL = (
    "install a C compiler, Python's headers and libaio (Debian, Ubuntu: apt-get install gcc libc6-dev python3-dev "
    "libaio-dev), then install tiered again"
)
INSTALL_XXHASH = "install xxHash's header (Debian, Ubuntu: apt-get install libxxhash-dev), then install tiered again"


class CannotBuild(Exception):
    """Why there will be no extension, in a few words."""


def mode() -> str:
    chosen = os.environ.get("TIERED_LIBAIO", "auto")
    if chosen not in MODES:
        raise SystemExit(f"TIERED_LIBAIO={chosen}: must be one of {', '.join(MODES)}")
    return chosen


def compiler() -> list[str]:
    """The command that setuptools will use, with the flags that the environment gives it."""
    command = os.environ.get("CC") or str(sysconfig.get_config_var("CC") or "cc")
    return shlex.split(command) + shlex.split(os.environ.get("CFLAGS", ""))


def static_link() -> list[str] | None:
    """Linker arguments that put libaio.a into the extension, or None where there is none."""
    answer = subprocess.run([*compiler(), "-print-file-name=libaio.a"], capture_output=True, text=True, check=False)
    # A path when it is found, the bare name when not.
    archive = answer.stdout.strip()
    if answer.returncode != 0 or not os.path.isabs(archive):
        return None
    return [archive, f"-Wl,--version-script={HERE / 'static.map'}"]


def trial(link: list[str]) -> str | None:
    """What the compiler says against a small program, or None when it builds."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(PROBE)
        includes = [f"-I{sysconfig.get_path(which)}" for which in ("include", "platinclude")]
        command = [*compiler(), "-shared", "-fPIC", *includes, str(source), "-o", str(Path(folder, "probe.so")), *link]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if built.returncode == 0 else built.stderr


def link_arguments() -> list[str]:
    """How to link libaio here, tried out. Raises ``CannotBuild``."""
    chosen = mode()
    if sys.platform != "linux":
        raise CannotBuild(f"there is no libaio on {sys.platform}")
    if chosen == "off":
        raise CannotBuild("TIERED_LIBAIO=off")
    try:
        subprocess.run([*compiler(), "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise CannotBuild(f"there is no C compiler ({compiler()[0]})") from None

    static = None if chosen == "shared" else static_link()
    shared = None if chosen == "static" else ["-laio"]
    complaint = "libaio.a not found"
    for link in (static, shared):
        if link is not None:
            answer = trial(link)
            if answer is None:
                return link
            complaint = answer
    for name in ("Python.h", "libaio.h"):
        if f"{name}: No such file" in complaint or f"'{name}' file not found" in complaint:
            raise CannotBuild(f"{name} not found")
    raise CannotBuild(f"a trial build failed: {complaint.strip().splitlines()[-1]}")


def described(module: str, names: Sequence[str], flags: Sequence[str], **more: list[str]) -> FFI:
    """cffi's side of an extension of the files of ``names``, which are compiled together with the glue that cffi writes."""
    ffi = FFI()
    headers = [name for name in names if (HERE / f"{name}.cdef.h").is_file()]
    for name in headers:
        ffi.cdef((HERE / f"{name}.cdef.h").read_text())
    ffi.set_source(
        module,
        "\n".join(f'#include "{name}.h"' for name in headers),
        sources=[f"libaio_ext/{name}.c" for name in names if (HERE / f"{name}.c").is_file()],
        include_dirs=["libaio_ext"],
        depends=[f"libaio_ext/{name}.{kind}" for name in headers for kind in ("h", "cdef.h")],
        extra_compile_args=["-std=gnu11", "-Wall", "-Wextra", *flags],
        **more,
    )
    return ffi


def ffibuilder(link: list[str]) -> FFI:
    """cffi's side of the ring."""
    return described(MODULE, ("requests", "aio_ring"), (), extra_link_args=link)


def has_compiler() -> bool:
    """Whether there is a C compiler for ``kernels``, and Python's headers."""
    try:
        subprocess.run([*compiler(), "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return any(Path(sysconfig.get_path(which), "Python.h").is_file() for which in ("include", "platinclude"))


def has_xxhash() -> bool:
    """Whether the compiler finds xxHash's header, with XXH3 in it (0.8 or newer)."""
    program = "#define XXH_INLINE_ALL\n#include <xxhash.h>\nint main(void) { return (int)XXH3_128bits(0, 0).low64; }\n"
    command = [*compiler(), "-x", "c", "-", "-o", os.devnull]
    return subprocess.run(command, input=program, capture_output=True, text=True, check=False).returncode == 0


def disk_link() -> FFI:
    """cffi's side of the native disk link. Without it Python does the same, with the same digests."""
    return described(LINK, ("requests", "disk_link", "digest", "digest_avx2"), ("-O3",))


def kernels() -> list[FFI]:
    """cffi's side of the kernels for quantised parameters and encoded moments, and of the copies of rows. Without them torch
    and Python do the same, bit for bit."""
    return [described(module, names, ("-O3", "-ffp-contract=off")) for module, names in KERNELS.items()]
