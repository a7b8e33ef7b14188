"""``TieredStore.open``: checks the options, opens the parts of a store and recovers the generation.

The only file that names concrete tiers and links.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from tiered.engine.engine import Engine, EngineConfig
from tiered.engine.policy import LRU
from tiered.engine.residency import Copy
from tiered.errors import CapacityError, MisuseError, TieredError, expect_type, one_of, path_of, quoted, whole_number
from tiered.format.folder import cannot_open, mend_of
from tiered.format.generations import generations
from tiered.interfaces import EvictionPolicy, IOBackend, Link, Memory, Tier
from tiered.io.backends import open_backend, refuse_unknown
from tiered.links.disk import DiskConfig
from tiered.links.native import open_disk_link
from tiered.store.at_rest import StoreAtRest
from tiered.store.commit import Commits, Generations
from tiered.store.reading import DiskAtRest, OneGeneration
from tiered.system import cgroup_room, headroom
from tiered.tiers.dram import DramConfig, DramTier
from tiered.tiers.hbm import DEVICE_ALIGNMENT, HbmConfig, HbmTier, device_named
from tiered.tiers.nvme import NvmeConfig, NvmeTier
from tiered.types import SMALLEST_DRAM, Access, BackendName, Slot, parse_size, with_unit

__all__ = [
    "SMALLEST_DRAM",
    "BackendName",
    "Durability",
    "Eviction",
    "Generation",
    "Newer",
    "OpenOptions",
    "Parts",
    "access_of",
    "assemble",
    "budget_of",
    "build",
    "default_dram",
]


BESIDE_OPEN = 8 << 20
TABLES_SHARE = 256
"""Bytes that a store takes beside its pool: BESIDE_OPEN, and one TABLES_SHAREth of the pool for the kernel's page tables."""
DEPTH = 64
"""Requests in flight. It bounds many small tensors; the bytes of large ones are bounded by ``DiskConfig``."""


@dataclass(frozen=True)
class Parts:
    """The opened parts: tiers from the top, links between neighbours, one policy per tier. ``memories`` are the tiers that
    tensors can lie in; ``backend`` and ``nvme`` are None where there is no disk."""

    memories: tuple[Memory, ...]
    nvme: NvmeTier | DiskAtRest | None
    backend: IOBackend | None
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    policies: tuple[EvictionPolicy, ...]

    @property
    def dram(self) -> int:
        """Index of the DRAM tier."""
        return len(self.memories) - 1

    def close(self) -> None:
        """Close the tiers, after the engine has closed the links. Idempotent."""
        if self.nvme is not None:
            self.nvme.close()
        for memory in self.memories:
            memory.close()


def build(options: OpenOptions, at_rest: DiskAtRest | None = None) -> Parts:
    """Open the parts; ``at_rest`` is a disk that is open for reading already. Raises MisuseError, CapacityError, StoreLocked,
    ManifestError; then nothing stays open."""
    size = default_dram() if options.dram is None else budget_of("a DRAM", options.dram, SMALLEST_DRAM)
    _refuse_beyond_cgroup(size)
    with contextlib.ExitStack() as undo:
        backend = hbm = None
        nvme: NvmeTier | DiskAtRest | None = None
        if options.hbm is not None and parse_size(options.hbm):
            size_there = budget_of("an HBM", options.hbm, DEVICE_ALIGNMENT)
            hbm = HbmTier(HbmConfig(size_there, str(options.device or HbmConfig.device)))
            undo.callback(hbm.close)
        policies = tuple(_policy(options.eviction) for _ in range(1 + (hbm is not None) + (options.path is not None)))
        if options.path is not None:  # the last part that may be refused, so that no folder is made in vain
            backend = open_backend(options.backend, DEPTH)
            undo.callback(backend.close)
            folders = [os.path.expanduser(folder) for folder in options.paths or ()]
            capacity = None if options.nvme is None else parse_size(options.nvme)
            nvme = at_rest or NvmeTier.open(NvmeConfig(os.path.expanduser(options.path), capacity, paths=folders))
            undo.callback(nvme.close)
        dram = DramTier(DramConfig(size, alignment=nvme.alignment if nvme else 64))
        undo.callback(dram.close)
        memories: tuple[Memory, ...] = (dram,)
        links: tuple[Link, ...] = ()
        if hbm is not None:
            memories = (hbm, dram)
            links = (_device_link(hbm, dram),)
            undo.callback(links[0].close)
        if nvme is not None and backend is not None:
            disk = open_disk_link(
                backend,
                address=dram.address,
                locate=nvme.locate,
                uuid=nvme.uuid,
                alignment=nvme.alignment,
                config=DiskConfig(),
            )
            links = (*links, disk)
        tiers: tuple[Tier, ...] = memories if nvme is None else (*memories, nvme)
        undo.pop_all()
    return Parts(memories, nvme, backend, tiers, links, policies)


def budget_of(named: str, asked: int | str, smallest: int) -> int:
    """Return the bytes of a budget; ``named`` says of which memory. Raises CapacityError where it is below ``smallest``."""
    size = parse_size(asked)
    if size < smallest:
        raise CapacityError(
            f"{named} budget of {size:,} bytes is too small: the smallest is {smallest:,} bytes{with_unit(asked)}"
        )
    return size


def _policy(eviction: Eviction) -> EvictionPolicy:
    found = eviction.policy()
    expect_type(found, EvictionPolicy, "policy makes a tier's policy, a tiered.EvictionPolicy with its three methods")
    return found


def _device_link(hbm: HbmTier, dram: DramTier) -> Link:
    if hbm.device.type == "cuda":
        from tiered.links.cuda import CudaLink

        return CudaLink(hbm, dram)
    from tiered.links.stand_in import MemoryLink

    return MemoryLink(hbm, dram)


def default_dram() -> int:
    """Return half of the smaller of available memory and the cgroup's headroom, in bytes."""
    return max(SMALLEST_DRAM, headroom() // 2)


def _refuse_beyond_cgroup(dram: int) -> None:
    """Raise CapacityError for a pool for which the kernel would kill the process: its pages are taken at first touch. The
    engine's thread and the page tables of the pool need room, too."""
    room, beside = cgroup_room(), BESIDE_OPEN + dram // TABLES_SHARE
    if room is not None and dram + beside > room.headroom:
        raise CapacityError(
            f"a DRAM budget of {dram:,} bytes, and {beside:,} for what serves it, are more than the memory cgroup "
            f"{room.folder} can hold: of its limit of {room.limit:,} bytes {room.headroom:,} are left; ask for less, or raise "
            "the limit"
        )


Durability = Literal["commit", "none"]
Newer = Literal["keep", "drop"]
Existing = Literal["may", "must", "must-not"]

_ACCESS: dict[str | Access, Access] = {name: access for access in Access for name in (access, access.value)}


@dataclass(frozen=True)
class Eviction:
    """How room is made in each tier of a store: ``policy`` makes the ``EvictionPolicy`` of a tier, one for each, and another
    where an exception struck the first. It is given nothing: what it has to know, such as costs, it has itself.
    ``deadline``: seconds that a call waits for room before it raises CapacityError and names the holders. Raises MisuseError
    for values that cannot be."""

    policy: Callable[[], EvictionPolicy] = LRU
    deadline: float = 60.0

    def __post_init__(self) -> None:
        if isinstance(self.deadline, bool) or not isinstance(self.deadline, int | float) or not self.deadline >= 0:
            raise MisuseError(f"a deadline is a number of seconds, not {quoted(self.deadline)}")
        if not callable(self.policy):
            raise MisuseError(f"policy makes a tier's policy, as tiered.LRU does; {quoted(self.policy)} cannot")


@dataclass(frozen=True)
class Generation:
    """A generation to open a store at: its ``number``, and what becomes of ``newer`` ones: "keep", or "drop" to remove them
    (all generations, with number 0). Raises MisuseError for values that cannot be."""

    number: int | None
    newer: Newer = "keep"

    def __post_init__(self) -> None:
        one_of("newer", self.newer, get_args(Newer))
        if self.number is None and self.newer == "drop":
            raise MisuseError("newer='drop' removes the generations after one: give its number, too")
        if self.number is not None:
            whole_number("the number of a generation is an int", self.number, least=0)


@dataclass(frozen=True)
class OpenOptions:
    """The arguments of ``TieredStore.open``. Raises MisuseError for what has no meaning, or does not go together."""

    path: str | os.PathLike[str] | None
    dram: int | str | None
    hbm: int | str | None
    device: str | torch.device | None
    nvme: int | str | None
    generation: int | Generation | None
    durability: Durability
    backend: BackendName | Callable[[], IOBackend]
    eviction: Eviction
    keep: int
    paths: Sequence[str | os.PathLike[str]] | None
    access: Access
    existing: Existing

    def __post_init__(self) -> None:
        one_of("durability", self.durability, get_args(Durability))
        if self.existing in ("continue", "resume", "overwrite", "refuse"):
            raise MisuseError(
                f"existing={self.existing!r} is said of a model, in zero.page: that of a store is 'may', 'must' or 'must-not'"
            )
        one_of("existing", self.existing, get_args(Existing))
        whole_number("keep is a number of generations", self.keep)
        expect_type(self.eviction, Eviction, "eviction is a tiered.Eviction(policy=, deadline=)")
        for name in ("dram", "hbm", "nvme"):
            if (size := getattr(self, name)) is not None:
                parse_size(size, name)
        if self.hbm is None and self.device is not None and device_named(str(self.device)).type != "cpu":
            raise MisuseError(
                f"device={str(self.device)!r} is where hbm= bytes are kept, and without hbm= none are, nor do modules compute "
                "there: give hbm= as well, such as hbm='8GiB', or hbm=0 for a store without device memory"
            )
        if self.generation is not None:
            if self.path is None or self.scratch:
                raise MisuseError("there are no generations without a disk or with durability='none'")
            whole_number("a generation is an int, or a tiered.Generation", self.opened.number, least=0)
        if self.path is None:
            for name in ("nvme", "paths"):
                if getattr(self, name) is not None:
                    raise MisuseError(f"a store without a disk (path None) has no {name}=: leave it out, or name a folder")
            if self.existing != "may":
                raise MisuseError(
                    f"a store without a disk (path None) does not exist before: leave existing={self.existing!r} out"
                )
            return
        path_of(self.path, "the path of a store's folder, if not None,")
        refuse_unknown(self.backend)
        if self.paths is not None and (not isinstance(self.paths, list | tuple) or not self.paths):
            raise MisuseError(f"paths is a list of folders, one on each drive, not {quoted(self.paths)}")
        for one in self.paths or ():
            path_of(one, "each of paths")
        if self.access is Access.READ and (self.scratch or self.nvme is not None or self.opened.newer == "drop"):
            raise MisuseError("access='read' opens a commit, and changes nothing: leave out durability=, nvme=, newer='drop'")

    @property
    def opened(self) -> Generation:
        """The generation that is asked for."""
        return self.generation if isinstance(self.generation, Generation) else Generation(self.generation)

    @property
    def scratch(self) -> bool:
        return self.durability == "none"


def assemble(options: OpenOptions) -> tuple[Parts, Engine, Generations]:
    """Return the parts, the engine that moves between them (not started), and what is known of commits.

    Raises as ``TieredStore.open`` says; nothing stays open then.
    """
    _refuse_existing(options)
    if options.access is Access.READ:
        return _assemble_to_read(options)
    parts, engine = _begin(options)
    try:
        commits = None
        if isinstance(parts.nvme, NvmeTier):
            commits = Commits(engine, parts.nvme, options.keep, _duplicator(parts, engine))
            commits.restore(options.opened.number, drop_newer=options.opened.newer == "drop")
            if options.scratch and commits.newest is not None:
                raise MisuseError(
                    f"{parts.nvme.folder} holds a store with commits, which durability='none' would write over: "
                    "name another folder"
                )
            if not options.scratch:
                commits.encode_early()
            for number, why in commits.unreadable.items():
                warnings.warn(f"generation {number} is damaged and cannot be opened: {why}", stacklevel=4)
            if not parts.nvme.direct:
                _warn_buffered(next(file.folder for file in parts.nvme.files if not file.direct))
    except BaseException:  # a warning may be made an error
        engine.stop()
        parts.close()
        raise
    return parts, engine, Generations() if commits is None or options.scratch else commits


def _assemble_to_read(options: OpenOptions) -> tuple[Parts, Engine, Generations]:
    """Open one generation of a store for reading, which a pin keeps, or a lock where no pin can be made. The manifest says what
    lies where."""
    if options.path is None:
        raise MisuseError("access='read' opens a commit on a disk: name its folder")
    try:
        rest = StoreAtRest(options.path, paths=options.paths, generation=options.opened.number)
    except OSError as error:
        raise _cannot_open(options, error) from error
    try:
        disk = DiskAtRest(rest)
        parts, engine = _begin(options, disk)
    except BaseException:
        rest.close()
        raise
    try:
        known = OneGeneration(engine, disk, rest)
        if parts.nvme is not None and not parts.nvme.direct:
            _warn_buffered(parts.nvme.folder, 6)
    except BaseException:  # a warning may be made an error
        engine.stop()
        parts.close()
        raise
    return parts, engine, known


def _begin(options: OpenOptions, at_rest: DiskAtRest | None = None) -> tuple[Parts, Engine]:
    """Return the parts and the engine, not started. Raises as ``TieredStore.open`` says; then nothing stays open."""
    try:
        parts = build(options, at_rest)
    except OSError as error:
        raise _cannot_open(options, error) from error
    try:
        limits = EngineConfig(deadline=options.eviction.deadline, eviction=options.eviction.policy)
        return parts, Engine(parts.tiers, parts.links, parts.policies, limits)
    except BaseException as error:
        for link in parts.links:
            link.close()
        parts.close()
        if isinstance(error, OSError):
            raise _cannot_open(options, error) from error
        raise


def _cannot_open(options: OpenOptions, error: OSError) -> TieredError:
    """Return the error to raise for one of the system."""
    where = error.filename or options.path or "the store"
    if mend_of(error) is not None:
        return cannot_open(os.fsdecode(where), error)
    return TieredError(f"cannot open the store: {where}: {error.strerror} (errno {error.errno})")  # from no healthy filesystem


def _warn_buffered(folder: str, stacklevel: int = 5) -> None:
    warnings.warn(
        f"the filesystem of {folder} has no O_DIRECT: I/O goes through the page cache, "
        "slower and with memory that is not in the budget",
        stacklevel=stacklevel,  # where TieredStore.open is called
    )


def _refuse_existing(options: OpenOptions) -> None:
    """Raise MisuseError where there is a store and should be none, or the other way round. Makes nothing."""
    if options.path is None or options.existing == "may":
        return
    folder = os.path.abspath(os.path.expanduser(options.path))
    found = generations(folder) if os.path.isdir(folder) else []
    if options.existing == "must" and not found:
        raise MisuseError(f"there is no store with a commit in {folder}, and existing='must' makes none: name another folder")
    if options.existing == "must-not" and found:
        raise MisuseError(
            f"{folder} has a store already (generation {found[-1]}), and existing='must-not': name another folder, or remove it"
        )


def access_of(access: Access | str) -> Access:
    found = _ACCESS.get(access) if isinstance(access, str | Access) else None
    if found is None:
        raise MisuseError(f"access is 'read' or 'write', not {access!r}")
    return found


def _duplicator(parts: Parts, engine: Engine) -> Callable[[Copy, Slot, int], None]:
    """Return a function that copies a copy's bytes to another slot of its tier, on the current stream, under the engine's
    lock."""

    def duplicate(copy: Copy, target: Slot, nbytes: int) -> None:
        memory = parts.memories[copy.tier]
        engine.enter([copy], copy.tier)
        engine.guard(copy.tier, target)
        memory.tensor(target, nbytes)[0].copy_(memory.tensor(copy.slot, nbytes)[0])
        copy.fences += engine.fences(copy.tier)

    return duplicate
