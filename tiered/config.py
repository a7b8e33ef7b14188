"""What a store is made of; the only file that names concrete parts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from tiered.errors import CapacityError, MisuseError, TieredError
from tiered.eviction import LRU
from tiered.interfaces import EvictionPolicy, IOBackend, Link, Memory, Tier
from tiered.io.posix import PosixBackend, PosixConfig
from tiered.links.disk import DiskConfig, DiskLink
from tiered.memory import cgroup_room, headroom
from tiered.tiers.dram import DramConfig, DramTier
from tiered.tiers.hbm import HbmConfig, HbmTier
from tiered.tiers.nvme import NvmeConfig, NvmeTier
from tiered.types import BackendName

__all__ = ["SMALLEST_DRAM", "BackendName", "Parts", "StoreConfig", "build", "default_dram", "open_backend"]

SMALLEST_DRAM = 1 << 20
"""Bytes: the smallest DRAM budget that a store opens with."""
BESIDE_OPEN = 8 << 20
TABLES_SHARE = 256
"""So many bytes, and this fraction of the pool, are taken beside it by whoever opens a store and does no more than use it."""


@dataclass(frozen=True)
class StoreConfig:
    """``path``: the store's folder, None for no disk; ``paths``: folders for its data files, none for that one; ``disk`` opens
    them in another way than to be written to. ``dram``: bytes of the pool. ``hbm``: bytes on ``device``, 0 for none. ``nvme``:
    bytes of extents at most (None: what the disks have).

    ``backend`` is the name of one of ours, or makes another. ``eviction`` makes one policy per tier. ``depth``: requests in
    flight; many small tensors need them, of large ones ``DiskConfig`` bounds the bytes.
    """

    path: str | os.PathLike[str] | None
    dram: int
    nvme: int | None = None
    hbm: int = 0
    device: str = "cuda"
    backend: BackendName | Callable[[], IOBackend] = "auto"
    eviction: Callable[[], EvictionPolicy] = LRU
    depth: int = 64
    paths: Sequence[str | os.PathLike[str]] = ()
    disk: Callable[[], NvmeTier] | None = None


@dataclass(frozen=True)
class Parts:
    """Tiers from the top, links between neighbours, one policy per tier. ``memories`` are the tiers that tensors can lie in;
    ``backend`` and ``nvme`` are None where there is no disk."""

    memories: tuple[Memory, ...]
    nvme: NvmeTier | None
    backend: IOBackend | None
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    policies: tuple[EvictionPolicy, ...]

    @property
    def dram(self) -> int:
        """Index of the host's memory."""
        return len(self.memories) - 1

    def close(self) -> None:
        """Let go of the tiers; the links are the engine's to close, before. Idempotent."""
        if self.nvme is not None:
            self.nvme.close()
        for memory in self.memories:
            memory.close()


def build(config: StoreConfig) -> Parts:
    """Open the parts. Raises MisuseError, CapacityError, StoreLocked, ManifestError; nothing stays open then."""
    if config.dram < SMALLEST_DRAM:
        raise CapacityError(
            f"a DRAM budget of {config.dram:,} bytes is too small: the smallest is {SMALLEST_DRAM:,} bytes"
        )
    _refuse_beyond_cgroup(config.dram)
    with contextlib.ExitStack() as undo:
        nvme = backend = hbm = None
        if config.hbm:
            hbm = HbmTier(HbmConfig(config.hbm, config.device))
            undo.callback(hbm.close)
        if config.path is not None:  # the last that can be refused for what was asked: no folder is made for nothing
            backend = open_backend(config.backend, config.depth)
            undo.callback(backend.close)
            opened = NvmeConfig(config.path, config.nvme, paths=config.paths)
            nvme = NvmeTier.open(opened) if config.disk is None else config.disk()
            undo.callback(nvme.close)
        dram = DramTier(DramConfig(config.dram, alignment=nvme.alignment if nvme else 64))
        undo.callback(dram.close)
        memories: tuple[Memory, ...] = (dram,)
        links: tuple[Link, ...] = ()
        if hbm is not None:
            memories = (hbm, dram)
            links = (_device_link(hbm, dram),)
            undo.callback(links[0].close)
        if nvme is not None and backend is not None:
            disk = DiskLink(
                backend,
                address=dram.address,
                locate=nvme.locate,
                uuid=nvme.uuid,
                alignment=nvme.alignment,
                config=DiskConfig(),
            )
            links = (*links, disk)
        undo.pop_all()
    tiers: tuple[Tier, ...] = memories if nvme is None else (*memories, nvme)
    return Parts(memories, nvme, backend, tiers, links, tuple(config.eviction() for _ in tiers))


def _device_link(hbm: HbmTier, dram: DramTier) -> Link:
    if hbm.device.type == "cuda":
        from tiered.links.cuda import CudaLink

        return CudaLink(hbm, dram)
    from tiered.links.memory import MemoryLink

    return MemoryLink(hbm, dram)


def open_backend(backend: BackendName | Callable[[], IOBackend], depth: int) -> IOBackend:
    """One with ``depth`` requests in flight. "auto" is libaio, or posix where that is not built or the kernel refuses it.

    Raises MisuseError for one that is unknown or does not work here, CapacityError where the kernel has no room for it,
    TieredError where the process has no descriptor or thread left for it.
    """
    if not isinstance(backend, str):
        return backend()
    if backend not in get_args(BackendName):
        known = ", ".join(repr(name) for name in get_args(BackendName))
        raise MisuseError(f"there is no backend {backend!r}; use one of {known}, or a function that makes one")
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
            from tiered.io.aiofile import AiofilesBackend, AiofilesConfig

            return AiofilesBackend(AiofilesConfig(depth=depth))
        return PosixBackend(PosixConfig(depth=depth))
    except (OSError, RuntimeError) as error:  # no descriptor, no thread
        name = "posix" if backend == "auto" else backend
        raise TieredError(f"the {name} backend cannot be opened: {error}; raise this process's limits (ulimit)") from error


def default_dram() -> int:
    """Half of the smaller of available memory and the cgroup's headroom, in bytes."""
    return max(SMALLEST_DRAM, headroom() // 2)


def _refuse_beyond_cgroup(dram: int) -> None:
    """Raises CapacityError for a pool that would end in the kernel's killing the process: its pages come at first touch. The
    engine's thread, and the kernel's tables of these pages, take some room, too."""
    room, beside = cgroup_room(), BESIDE_OPEN + dram // TABLES_SHARE
    if room is not None and dram + beside > room.headroom:
        raise CapacityError(
            f"a DRAM budget of {dram:,} bytes, and {beside:,} for what serves it, are more than the memory cgroup "
            f"{room.folder} can hold: of its limit of {room.limit:,} bytes {room.headroom:,} are left; ask for less, or raise "
            "the limit"
        )
