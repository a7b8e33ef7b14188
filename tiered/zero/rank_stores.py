"""Open a store for each rank, all of them as of one commit.

Each rank commits to its own store; a commit is acknowledged once all have committed. It has a name and a number in each store's
meta, and after a restart the ranks open the newest one that is in all of their stores: what only some of them have was never
acknowledged, and is given up. No file is shared, so each node may use a drive of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist

from tiered.errors import ManifestError, MisuseError, RankError, shown
from tiered.store import Generation, TieredStore
from tiered.store.at_rest import ListedGeneration, listing
from tiered.zero.collectives import Ranks

__all__ = [
    "BEGUN",
    "META",
    "CommitSet",
    "RankCommit",
    "folder_of",
    "has_commit",
    "joints",
    "newest_set",
    "number_of",
    "open_store",
    "said_in",
    "sets_in",
    "shared_json",
]

META = "tiered.ranks"
"""Where a commit's meta says which one of all ranks it belongs to."""
BEGUN = "tiered.ranks.begun"
"""In the meta of all that ranks committed, and of what each commits before the first of these commits: where a rank has nothing
at all while others have that, its store is lost, and was not about to begin."""
MOST_SAID = 64 << 20
"""Bytes of JSON that a rank may tell the others at once."""
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_NAME = re.compile(r"rank-(\d+)-of-(\d+)")
_MANIFEST = re.compile(r"manifest\.\d+")


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    """What a commit's meta has under ``META``: the rank commit that it belongs to, and of how many ranks that is."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    number: _Number
    of: _Number
    first: bool = False


class _Rank(msgspec.Struct, forbid_unknown_fields=True):
    """What each rank tells the others as it opens its store. ``joints``: the fields of its ``RankCommit``s."""

    problem: str
    joints: list[tuple[_Number, str, _Number, list[str], bool]]
    generations: list[_Number]
    others: _Number
    opened: bool


@dataclass(frozen=True)
class RankCommit:
    """Commit of all ranks, as one rank has it: the ``generation`` of its store."""

    number: int
    name: str
    generation: int
    models: tuple[str, ...] = ()
    first: bool = False


@dataclass(frozen=True)
class CommitSet:
    """Stores of all ranks, in order, as of the newest commit that all have."""

    folders: tuple[Path, ...]
    joints: tuple[RankCommit, ...]

    @property
    def ranks(self) -> int:
        return len(self.folders)

    @property
    def number(self) -> int:
        """Return the number of the commit, on which another number of ranks counts on."""
        return self.joints[0].number


def folder_of(path: str | os.PathLike[str], rank: int, ranks: int) -> Path:
    """Return the folder of one rank's store below ``path``."""
    return Path(os.path.expanduser(path)) / f"rank-{rank}-of-{ranks}"


def has_commit(folder: Path) -> bool:
    """Return whether a store there has ever committed; what a commit that was killed was about to write does not count."""
    return folder.is_dir() and any(map(_MANIFEST.fullmatch, os.listdir(folder)))


def joints(folder: Path) -> list[RankCommit]:
    """Return the rank commits in one rank's store that have checkpoints, each with its newest generation. Raises ManifestError
    where what is newer is damaged."""
    found: dict[str, RankCommit] = {}
    damaged: ListedGeneration | None = None
    if not has_commit(folder):
        return []
    for one in listing(folder).generations:
        said = said_in(one.meta, f"generation {one.number} in {folder}")
        if said is not None and one.problem is None:
            keys = [tensor.key for tensor in listing(folder, one.number).tensors]
            models = tuple(sorted(key.removesuffix("/checkpoint") for key in keys if key.endswith("/checkpoint")))
            if models:
                found[said.name] = RankCommit(said.number, said.name, one.number, models, said.first)
        elif one.problem is not None:
            damaged = one
    newest = max((joint.generation for joint in found.values()), default=0)
    if damaged is not None and damaged.number > newest:
        raise ManifestError(
            f"{damaged.problem}. Ranks would go back to the commit before: to do so, move manifest.{damaged.number} away"
        )
    return sorted(found.values(), key=lambda joint: joint.number)


def _others(folder: Path) -> int:
    """Return how many generations ranks did not commit."""
    return sum(not {META, BEGUN} & one.meta.keys() for one in listing(folder).generations) if has_commit(folder) else 0


def sets_in(path: str | os.PathLike[str], *, whole: bool = True) -> dict[int, list[Path]]:
    """Return the folders of all ranks below ``path``, by the number of ranks; ``whole``: only sets of which all folders exist.
    """
    root = Path(os.path.expanduser(path))
    names = [_NAME.fullmatch(name) for name in os.listdir(root)] if root.is_dir() else []
    sizes = {int(match[2]) for match in names if match}
    sets = {size: [folder_of(root, rank, size) for rank in range(size)] for size in sorted(sizes)}
    return {size: folders for size, folders in sets.items() if not whole or all(folder.is_dir() for folder in folders)}


def in_all(of_each: Iterable[list[RankCommit]]) -> list[RankCommit] | None:
    """Return the newest commit that all ranks have, with the most models, as each has it."""
    named = [{joint.name: joint for joint in found} for found in of_each]
    shared = set.intersection(*(set(found) for found in named))
    if not shared:
        return None
    models = {name: set.intersection(*(set(found[name].models) for found in named)) for name in shared}
    most = max(map(len, models.values()))  # of several models each is committed by itself
    newest = max((name for name in shared if len(models[name]) == most), key=lambda name: named[0][name].number)
    return [found[newest] for found in named]


def newest_set(path: str | os.PathLike[str], *, apart: int = 0) -> CommitSet | None:
    """Return the newest commit set below ``path``, of any number of ranks; None where no set has a commit in common.

    Raises ManifestError where there is a newer commit, of ranks not all of which are here: a drive is not mounted. (Of
    ``apart`` ranks it may be so: the others' stores are on other nodes.)
    """
    found, broken = [], []
    for size, folders in sets_in(path, whole=False).items():
        there = [folder for folder in folders if folder.is_dir()]
        each = [joints(folder) for folder in there]
        common = in_all(each) if len(there) == size else None
        if common is not None:
            found.append(CommitSet(tuple(folders), tuple(common)))
        elif size != apart:
            numbers = [joint.number for had in each for joint in had]
            lacking = next((folder for folder in folders if folder not in there), there[0])
            broken.append((max(numbers, default=0), lacking))
    newest = max(found, key=lambda one: one.number, default=None)
    number, lacking = max(broken, key=lambda one: one[0], default=(0, Path()))
    if newest is not None and number > newest.number:
        raise ManifestError(
            f"ranks in {path} have a commit {number}, newer than {newest.number}, which all of {newest.ranks} have, and "
            f"{lacking} lacks it: bring it back, or move its set away to go on from the older one"
        )
    return newest


def number_of(meta: Mapping[str, object]) -> int:
    """Return the number of the rank commit that has this meta; 0 where it is none."""
    said = said_in(meta, "the store")
    return 0 if said is None else said.number


def said_in(meta: Mapping[str, object], whose: str) -> _Said | None:
    """Return what a meta says of the rank commit that it belongs to; None: it belongs to none. Raises ManifestError for what
    ranks do not write there."""
    if META not in meta:
        return None
    try:
        return msgspec.convert(meta[META], _Said, strict=True)
    except (ValueError, OverflowError) as error:  # msgspec's and Unicode's errors are ValueErrors
        what = shown(str(error), 300)
        raise ManifestError(f"the meta of {whose} is damaged: {META!r} is not what ranks write there ({what})") from error


def open_store(path: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None, **options: Any) -> TieredStore:
    """Open this rank's store below ``path``, made or reopened as of the newest commit that all ranks have; ``options`` are
    those of ``TieredStore.open``. All ranks call it. With one process it is ``TieredStore.open(path)``.

    The store is in ``path/rank-R-of-N``. ``path`` may be on a drive of the node, or on a filesystem that all share. What a rank
    committed and another did not, because the training ended in between, was never acknowledged, and is given up. Only what
    ``zero.commit`` commits counts. A rank that has two that another has not is not what an end leaves: that raises. Of several
    models in a store, each committed by itself, the newest commit that has the most of them is taken. Raises ManifestError,
    with nothing changed, where the ranks have commits and none in common (a drive that is not mounted), what
    ``TieredStore.open`` raises, and RankError.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    if not several:
        return TieredStore.open(path, **options)
    if "generation" in options or options.get("paths") is not None:
        raise MisuseError("open_store finds the generation that all ranks have: leave generation= and paths= out")
    if options.get("durability", "commit") != "commit":
        raise MisuseError("ranks' stores are for commits: for scratch, give each rank a TieredStore.open of its own")
    if options.get("keep", 2) < 2:
        raise MisuseError("while ranks commit, each keeps the commit before: keep= is at least 2")
    ranks = Ranks.of(group)
    folder = folder_of(path, ranks.rank, ranks.size)
    said: dict[str, Any] = {"problem": "", "joints": [], "generations": [], "others": 0, "opened": False}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        said["opened"] = folder.is_dir() and bool(os.listdir(folder))
        said["joints"] = [dataclasses.astuple(joint) for joint in joints(folder)]
        said["others"] = _others(folder)
        said["generations"] = [one.number for one in listing(folder).generations] if has_commit(folder) else []
    except (MisuseError, ManifestError) as error:
        said["problem"] = str(error)
    except OSError as error:
        said["problem"] = f"{error.filename or folder}: {error.strerror}"
    everybody = [msgspec.to_builtins(one) for one in shared_json(ranks, said, _Rank)]
    for rank, one in enumerate(everybody):
        if one["problem"]:
            raise ManifestError(f"the store of rank {rank} cannot be read: {shown(one['problem'], 500)}")
    if not any(one["generations"] for one in everybody):
        return TieredStore.open(folder, **options)
    common = in_all([[RankCommit(*joint) for joint in one["joints"]] for one in everybody])
    in_each = set.intersection(*({name for _, name, *_ in one["joints"]} for one in everybody))
    last = common[0].number if common else 0
    behind = [sum(number > last and name not in in_each for number, name, *_ in one["joints"]) for one in everybody]
    if (common and max(behind) > 1) or (common is None and not _were_beginning(everybody)):
        raise ManifestError(
            f"the ranks' stores in {path} {'are of different times' if common else 'have no commit in common'}: "
            f"{_described(everybody)}"
        )
    generation = 0 if common is None else common[ranks.rank].generation
    return TieredStore.open(folder, generation=Generation(generation, newer="drop"), **options)


def _were_beginning(everybody: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all ranks had opened their stores, and have nothing in them but what may be their part of the very first
    commit, of which none has any before all have begun."""
    if not all(one["opened"] and not one["others"] and all(first for *_, first in one["joints"]) for one in everybody):
        return False
    return all(one["generations"] for one in everybody) or not any(one["joints"] for one in everybody)


def _described(everybody: Sequence[Mapping[str, Any]]) -> str:
    found = []
    for rank, one in enumerate(everybody):
        if one["joints"]:
            found.append(f"rank {rank} has {shown(', '.join(str(number) for number, *_ in one['joints']), 200)}")
        elif one["generations"]:
            found.append(f"rank {rank} has commits of its own only, which ranks do not go on from (zero.commit makes others)")
        else:
            found.append(f"rank {rank} has {'none' if one['opened'] else 'no store there: is its drive mounted?'}")
    return "; ".join(found) + ". Nothing was changed. To begin anew, name another folder, or remove these"


def shared_json(ranks: Ranks, value: Any, kind: Any) -> list[Any]:
    """Return the values ``value`` of all ranks, each checked to be a ``kind``. Raises RankError for one that is not, because a
    rank is not trusted."""
    data = json.dumps(value).encode()
    if len(data) > MOST_SAID:
        raise MisuseError(f"a rank would tell the others {len(data):,} bytes; the limit is {MOST_SAID:,}")
    mine = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
    longest = int(ranks.all_gather(mine, "the length of what ranks say").amax())
    if longest > MOST_SAID:
        raise RankError(f"a rank says that it will tell the others {longest:,} bytes; the limit is {MOST_SAID:,}")
    padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found = []
    for rank, row in enumerate(ranks.all_gather(padded, "what ranks say")):
        try:
            found.append(msgspec.convert(json.loads(row.numpy().tobytes().rstrip(b"\0")), kind, strict=True))
        except (ValueError, RecursionError, OverflowError) as error:  # msgspec's and Unicode's errors are ValueErrors
            said = shown(repr(error), 200)
            raise RankError(f"rank {rank} says what no rank of this release says: {said}") from error
    return found
