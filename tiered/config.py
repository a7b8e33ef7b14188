"""What a store is made of; the only file that names concrete parts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from tiered.errors import CapacityError, MisuseError
from tiered.eviction import LRU
from tiered.interfaces import EvictionPolicy, IOBackend, Link, Tier
from tiered.io.posix import PosixBackend, PosixConfig
from tiered.links.disk import DiskConfig, DiskLink
from tiered.tiers.dram import DramConfig, DramTier
from tiered.tiers.nvme import NvmeConfig, NvmeTier

__all__ = ["SMALLEST_DRAM", "Parts", "StoreConfig", "build", "default_dram"]

SMALLEST_DRAM = 1 << 20
"""Bytes: the smallest DRAM budget that a store opens with."""


@dataclass(frozen=True)
class StoreConfig:
    """``dram``: bytes of the pool. ``nvme``: bytes of extents at most (None: what the device has).

    ``depth``: requests in flight; 16 of 1 MiB reach a drive's rate, and more would only make a late demand wait longer.
    """

    path: str | os.PathLike[str]
    dram: int
    nvme: int | None = None
    backend: Literal["auto", "libaio", "posix"] = "auto"
    depth: int = 16


@dataclass(frozen=True)
class Parts:
    """Tiers from the top, links between neighbours, one policy per tier."""

    dram: DramTier
    nvme: NvmeTier
    backend: IOBackend
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    policies: tuple[EvictionPolicy, ...]


def build(config: StoreConfig) -> Parts:
    """Open the parts. Raises MisuseError, CapacityError, StoreLocked, ManifestError; nothing stays open then."""
    if config.dram < SMALLEST_DRAM:
        raise CapacityError(
            f"a DRAM budget of {config.dram:,} bytes is too small: the smallest is {SMALLEST_DRAM:,} bytes"
        )
    nvme = NvmeTier.open(NvmeConfig(config.path, config.nvme))
    try:
        dram = DramTier(DramConfig(config.dram, alignment=nvme.alignment))
        backend = _open_backend(config)
        try:
            link = DiskLink(
                backend,
                address=dram.address,
                fd=nvme.fd,
                path=nvme.path,
                uuid=nvme.uuid,
                alignment=nvme.alignment,
                config=DiskConfig(),
            )
        except BaseException:
            backend.close()
            raise
    except BaseException:
        nvme.close()
        raise
    return Parts(dram, nvme, backend, (dram, nvme), (link,), (LRU(), LRU()))


def _open_backend(config: StoreConfig) -> IOBackend:
    if config.backend not in ("auto", "libaio", "posix"):
        raise MisuseError(f"there is no backend {config.backend!r}; use 'auto', 'libaio' or 'posix'")
    if config.backend != "posix":
        try:
            from tiered.io.libaio import LibaioBackend, LibaioConfig

            return LibaioBackend(LibaioConfig(depth=config.depth))
        except (ImportError, OSError) as error:
            if config.backend == "libaio":
                raise MisuseError(f"the libaio backend does not work here: {error}; use backend='posix'") from error
    return PosixBackend(PosixConfig(depth=config.depth))


def default_dram() -> int:
    """Half of the smaller of available memory and the cgroup's headroom, in bytes."""
    available: int = psutil.virtual_memory().available
    return max(SMALLEST_DRAM, min(available, _cgroup_headroom(available)) // 2)


def _cgroup_headroom(otherwise: int) -> int:
    """Bytes that this process's memory cgroup (v2 or v1) still allows; ``otherwise`` where it sets no limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return otherwise
    headroom = otherwise
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage = "/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        try:
            folder = Path(root + path)
            headroom = min(headroom, int((folder / limit).read_text()) - int((folder / usage).read_text()))
        except (OSError, ValueError):
            continue  # "max", or a hierarchy that is mounted elsewhere
    return max(0, headroom)
