"""The backends that are shipped, by their names: how each is opened, and why it does not work here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, get_args

from tiered.errors import MisuseError, TieredError, one_of
from tiered.interfaces import IOBackend
from tiered.io.posix import PosixBackend, PosixConfig
from tiered.io.probe import libaio_unavailable
from tiered.types import BackendName

__all__ = ["BACKENDS", "Shipped", "open_backend", "refuse_unknown", "unavailable"]


class Shipped(NamedTuple):
    """A backend. ``open`` makes one with so many requests in flight, and imports what it needs; ``unavailable`` says why it
    does not work here, or None (no function: opening it says that)."""

    open: Callable[[int], IOBackend]
    unavailable: Callable[[], str | None] | None = None


def _libaio(depth: int) -> IOBackend:
    from tiered.io.libaio import LibaioBackend, LibaioConfig

    return LibaioBackend(LibaioConfig(depth=depth))


def _aiofiles(depth: int) -> IOBackend:
    from tiered.io.aiofiles import AiofilesBackend, AiofilesConfig

    return AiofilesBackend(AiofilesConfig(depth=depth))


BACKENDS: Mapping[str, Shipped] = {
    "libaio": Shipped(_libaio, libaio_unavailable),
    "aiofiles": Shipped(_aiofiles),
    "posix": Shipped(lambda depth: PosixBackend(PosixConfig(depth=depth))),
}
"""Beside "auto", all that ``BackendName`` has."""


def refuse_unknown(backend: object) -> None:
    """Raise MisuseError for what is neither a name of a backend nor a function that makes one."""
    if not callable(backend):
        one_of("backend, where it is no function that makes one,", backend, get_args(BackendName))


def open_backend(backend: BackendName | Callable[[], IOBackend], depth: int) -> IOBackend:
    """Open a backend with ``depth`` requests in flight. "auto" is libaio, or posix where libaio is not built or the kernel
    refuses it.

    Raises MisuseError for one that is unknown or does not work here, CapacityError where the kernel has no room for it,
    TieredError where the process has no descriptor or thread left for it.
    """
    refuse_unknown(backend)
    if not isinstance(backend, str):
        return backend()
    if backend == "auto":
        try:
            return open_backend("libaio", depth)
        except TieredError:  # not built, no AIO in this kernel or container, or no room for another ring
            backend = "posix"
    try:
        return BACKENDS[backend].open(depth)
    except ImportError as error:
        raise MisuseError(f"the {backend} backend does not work here: {error}; use backend='posix'") from error
    except (OSError, RuntimeError) as error:  # no descriptor, no thread
        raise TieredError(f"the {backend} backend cannot be opened: {error}; raise this process's limits (ulimit)") from error


def unavailable() -> dict[str, str | None]:
    """Return each backend with the reason why it does not work here, None where it works."""
    return {name: _why(one) for name, one in BACKENDS.items()}


def _why(backend: Shipped) -> str | None:
    try:
        if backend.unavailable is not None:
            return backend.unavailable()
        backend.open(1).close()
    except Exception as error:  # any error is a reason why the backend does not work
        return " ".join(str(error).split()) or type(error).__name__
    return None
