"""What ``TieredStore.open`` does: checks what it was asked for, opens the parts, finds the generation."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tiered.commits import Commits
from tiered.config import Parts, StoreConfig, build, default_dram
from tiered.engine import Engine, EngineConfig
from tiered.errors import MisuseError, TieredError
from tiered.interfaces import EvictionPolicy, IOBackend
from tiered.residency import Copy
from tiered.sizes import parse_size
from tiered.types import Access, BackendName, Slot

__all__ = ["Durability", "Newer", "Wishes", "access_of", "assemble", "begin", "config_of", "refuse", "warn_buffered"]

Durability = Literal["commit", "none"]
Newer = Literal["keep", "drop"]

_ACCESS: dict[str | Access, Access] = {name: access for access in Access for name in (access, access.value)}


@dataclass(frozen=True)
class Wishes:
    """The arguments of ``TieredStore.open``, as they were given."""

    path: str | os.PathLike[str] | None
    dram: int | str | None
    hbm: int | str | None
    device: str | torch.device
    nvme: int | str | None
    generation: int | None
    durability: Durability
    backend: BackendName | Callable[[], IOBackend]
    eviction: Callable[[], EvictionPolicy]
    keep: int
    deadline: float
    paths: Sequence[str | os.PathLike[str]] | None
    newer: Newer = "keep"

    @property
    def scratch(self) -> bool:
        return self.durability == "none"


def assemble(wishes: Wishes) -> tuple[Parts, Engine, Commits | None]:
    """The parts, the engine that moves between them (not started), and what commits; None where there is no disk.

    Raises as ``TieredStore.open`` says; nothing stays open then.
    """
    refuse(wishes)
    parts, engine = begin(wishes, config_of(wishes))
    try:
        commits = None
        if parts.nvme is not None:
            commits = Commits(engine, parts.nvme, wishes.keep, _duplicator(parts, engine))
            commits.restore(wishes.generation, drop_newer=wishes.newer == "drop")
            if wishes.scratch and commits.newest is not None:
                raise MisuseError(
                    f"{parts.nvme.folder} holds a store with commits, which durability='none' would write over: "
                    "name another folder"
                )
            if not wishes.scratch:
                commits.encode_early()
            for number, why in commits.unreadable.items():
                warnings.warn(f"generation {number} is damaged, and nobody can go back to it: {why}", stacklevel=3)
            if not parts.nvme.direct:
                warn_buffered(next(file.folder for file in parts.nvme.files if not file.direct))
    except BaseException:  # a warning may be made an error
        engine.stop()
        parts.close()
        raise
    return parts, engine, None if wishes.scratch else commits


def begin(wishes: Wishes, config: StoreConfig) -> tuple[Parts, Engine]:
    """The parts and the engine, not started. Raises as ``TieredStore.open`` says; nothing stays open then."""
    try:
        parts = build(config)
    except OSError as error:  # what the parts do not expect of a healthy filesystem
        where = error.filename or wishes.path
        raise TieredError(f"cannot open the store: {where}: {error.strerror} (errno {error.errno})") from error
    try:
        limits = EngineConfig(deadline=wishes.deadline, eviction=wishes.eviction)
        return parts, Engine(parts.tiers, parts.links, parts.policies, limits)
    except BaseException as error:
        for link in parts.links:
            link.close()
        parts.close()
        if isinstance(error, OSError):
            raise TieredError(f"cannot open the store: {error.strerror} (errno {error.errno})") from error
        raise


def warn_buffered(folder: str) -> None:
    warnings.warn(
        f"the filesystem of {folder} has no O_DIRECT: I/O goes through the page cache, "
        "slower and with memory that is not in the budget",
        stacklevel=4,  # where TieredStore.open is called
    )


def refuse(wishes: Wishes) -> None:
    """Raise MisuseError for arguments that mean nothing."""
    path, keep, deadline, generation = wishes.path, wishes.keep, wishes.deadline, wishes.generation
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise MisuseError(f"at least one generation must be kept, not {keep!r}")
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not deadline >= 0:
        raise MisuseError(f"a deadline is a number of seconds, not {deadline!r}")
    if not callable(wishes.eviction):
        raise MisuseError(f"eviction makes a tier's policy, as tiered.eviction.LRU does; {wishes.eviction!r} cannot")
    if wishes.durability not in ("commit", "none"):
        raise MisuseError(f"durability is 'commit' or 'none', not {wishes.durability!r}")
    if generation is not None and (path is None or wishes.scratch):
        raise MisuseError("there are no generations without a disk or with durability='none'")
    if generation is not None and type(generation) is not int:
        raise MisuseError(f"a generation is an int, not {generation!r}")
    if wishes.newer not in ("keep", "drop") or (wishes.newer == "drop" and generation is None):
        raise MisuseError(f"newer is 'keep' or 'drop' (with generation=: those after it), not {wishes.newer!r}")
    if path is None and wishes.nvme is not None:
        raise MisuseError("a store without a disk (path None) has no nvme=: leave it out, or name a folder")
    if path is not None and not _is_path(path):
        raise MisuseError(f"the path of a store's folder is a str or a pathlib.Path, or None, not {path!r}")
    if wishes.paths is not None:
        if path is None:
            raise MisuseError("a store without a disk (path None) has no paths=: leave them out, or name a folder")
        if not isinstance(wishes.paths, list | tuple) or not wishes.paths or not all(map(_is_path, wishes.paths)):
            raise MisuseError(f"paths is a list of folders, one on each drive, not {wishes.paths!r}")


def access_of(access: Access | str) -> Access:
    found = _ACCESS.get(access) if isinstance(access, str | Access) else None
    if found is None:
        raise MisuseError(f"access is 'read' or 'write', not {access!r}")
    return found


def _is_path(path: object) -> bool:
    return isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str)


def config_of(wishes: Wishes) -> StoreConfig:
    return StoreConfig(
        wishes.path if wishes.path is None else os.path.expanduser(wishes.path),
        default_dram() if wishes.dram is None else parse_size(wishes.dram),
        None if wishes.nvme is None else parse_size(wishes.nvme),
        0 if wishes.hbm is None else parse_size(wishes.hbm),
        str(wishes.device),
        wishes.backend,
        wishes.eviction,
        paths=[os.path.expanduser(folder) for folder in wishes.paths or ()],
    )


def _duplicator(parts: Parts, engine: Engine) -> Callable[[Copy, Slot, int], None]:
    """Copies a copy's bytes to another slot of its tier, on the stream that is current: under the engine's lock."""

    def duplicate(copy: Copy, target: Slot, nbytes: int) -> None:
        memory = parts.memories[copy.tier]
        engine.enter([copy], copy.tier)
        engine.guard(copy.tier, target)
        memory.tensor(target, nbytes)[0].copy_(memory.tensor(copy.slot, nbytes)[0])
        copy.fences += engine.fences(copy.tier)

    return duplicate
