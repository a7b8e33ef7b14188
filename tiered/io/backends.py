"""Backends by their names. The only file that names concrete ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from tiered.errors import MisuseError, TieredError, one_of
from tiered.interfaces import IOBackend
from tiered.io.posix import PosixBackend, PosixConfig
from tiered.types import BackendName

__all__ = ["open_backend"]


def open_backend(backend: BackendName | Callable[[], IOBackend], depth: int) -> IOBackend:
    """Open a backend with ``depth`` requests in flight. "auto" is libaio, or posix where libaio is not built or the kernel
    refuses it.

    Raises MisuseError for one that is unknown or does not work here, CapacityError where the kernel has no room for it,
    TieredError where the process has no descriptor or thread left for it.
    """
    if callable(backend):
        return backend()
    one_of("backend, where it is no function that makes one,", backend, get_args(BackendName))
    if backend in ("auto", "libaio"):
        try:
            from tiered.io.libaio import LibaioBackend, LibaioConfig

            return LibaioBackend(LibaioConfig(depth=depth))
        except (ImportError, OSError) as error:
            if backend == "libaio":
                raise MisuseError(f"the libaio backend does not work here: {error}; use backend='posix'") from error
        except TieredError:  # no AIO in this kernel or container, or no room for another ring
            if backend == "libaio":
                raise
    try:
        if backend == "aiofiles":
            from tiered.io.aiofiles import AiofilesBackend, AiofilesConfig

            return AiofilesBackend(AiofilesConfig(depth=depth))
        return PosixBackend(PosixConfig(depth=depth))
    except (OSError, RuntimeError) as error:  # no descriptor, no thread
        name = "posix" if backend == "auto" else backend
        raise TieredError(f"the {name} backend cannot be opened: {error}; raise this process's limits (ulimit)") from error
