"""``tiered train --existing resume``: find the newest commit of a training that any number of ranks made, and read the record
of the training in it: its options, its progress, its losses."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from tiered import ManifestError, MisuseError
from tiered.cli.arguments import Launched
from tiered.cli.train.model import Shape, Text
from tiered.cli.train.options import Options, StoreOptions, default_of, names_of
from tiered.cli.train.ranks import Peers
from tiered.errors import shown
from tiered.format.generations import load
from tiered.zero.checkpoint.checkpoint import Readable, read_record
from tiered.zero.rank_stores import RankCommit, folder_of, has_commit, in_all, joints, newest_set

__all__ = [
    "Earlier",
    "Over",
    "ResumePlace",
    "earlier",
    "find",
    "go_on_command",
    "keep",
    "opening",
    "refuse_other_stage",
    "refuse_other_text",
    "refuse_others",
    "shape_of",
]

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Over(MisuseError):
    """The training has completed all its steps."""


@dataclass(frozen=True)
class Earlier:
    """The progress that a commit has recorded. ``losses``: one per step; ``seconds``: the time that the steps took."""

    options: Options
    text_bytes: int
    step: int
    seconds: float
    losses: list[float]


class _ProgressRecord(msgspec.Struct):
    """The part of the ``extra`` given to ``zero.commit`` that resuming reads."""

    options: dict[str, Any]
    text_bytes: _Count
    step: _Count
    seconds: float
    losses: torch.Tensor


def opening(folder: str, wishes: Mapping[str, Any]) -> StoreOptions:
    """Read from the newest manifest in ``folder`` how the store is opened, without opening it.

    ``wishes`` are the options of the command line, None where absent. Raises MisuseError where ``folder`` has no training."""
    manifest = load(folder) if os.path.isdir(folder) else None
    if manifest is None:
        raise MisuseError(
            f"nothing is committed in {folder}: name the STORE of a training, or start one without --existing resume"
        )
    kept = manifest.meta.get("opening")
    if manifest.meta.get("command") != "train" or not isinstance(kept, Mapping):
        raise MisuseError(
            f"the commit in {folder} is not that of a training that can be resumed: name the STORE of one, or another "
            "folder for a training that begins"
        )
    found = {field.name: _chosen(field.name, kept, wishes) for field in fields(StoreOptions)}
    try:
        return msgspec.convert(found, StoreOptions, strict=True)
    except (ValueError, OverflowError) as error:
        raise ManifestError(f"the meta of {folder} does not say how its store is opened: {shown(str(error), 300)}") from error


def _chosen(name: str, kept: Mapping[str, Any], wishes: Mapping[str, Any]) -> Any:
    if wishes[name] is not None:
        return wishes[name]
    return kept.get(name)


def keep(every: int | None, ranks: int) -> int:
    """Return how many generations a store keeps. Each of several ranks keeps the last common one until all have the next."""
    return 1 if every is None and ranks == 1 else 2


def shape_of(store: Readable, name: str) -> Shape:
    """Return the shape of the model that ``tiered train`` has committed to ``store``. Raises ManifestError where its record is
    damaged."""
    options = read_record(store, name)["extra"].get("options")
    try:
        return msgspec.convert({one.name: options[one.name] for one in fields(Shape) if one.name in options}, Shape)
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(store, error) from error


def _damaged(store: Readable, error: Exception) -> ManifestError:
    return ManifestError(
        f"{store}: the record of the training in it is damaged, or of a version that this release does not read "
        f"({shown(str(error), 300)})"
    )


def earlier(store: Readable, folder: str, name: str, wishes: Mapping[str, Any]) -> Earlier:
    """Read the record of the training in ``store``, which is in ``folder``, and merge the options of the command line into it.

    ``wishes`` are these options, None where absent. Raises MisuseError for one that would make the training a different one,
    and Over.
    """
    extra = read_record(store, name)["extra"]
    try:
        kept = msgspec.convert(extra, _ProgressRecord, strict=True, dec_hook=_losses)
        options, losses, step, seconds = _merged(kept.options, wishes), kept.losses.tolist(), kept.step, kept.seconds
    except (TypeError, LookupError, ValueError, OverflowError, AttributeError) as error:
        raise _damaged(store, error) from error
    if options.steps is not None and step >= options.steps:
        raise Over(
            f"the training in {folder} has completed {step} of its {options.steps} steps: for more give --steps, counted from "
            "its beginning"
        )
    if options.minutes is not None and seconds >= 60 * options.minutes:
        raise Over(
            f"the training in {folder} has completed its {options.minutes:g} minutes: for more give --minutes, counted from "
            "its beginning"
        )
    return Earlier(options, kept.text_bytes, step, seconds, losses)


def _losses(kind: type, value: object) -> object:
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or not value.is_floating_point():
        raise TypeError(f"Expected losses, got {value!r:.100}")
    return value


def _merged(kept: Mapping[str, Any], wishes: Mapping[str, Any]) -> Options:
    """Merge the options of the command line into the recorded ones, each as its role says."""
    merged = {name: kept[name] for name in names_of("model")}
    for name, value in merged.items():
        if wishes[name] is not None and wishes[name] != value:
            option = "--" + name.replace("_", "-")
            raise MisuseError(
                f"{option} {wishes[name]} would make this a different training; this one has {option} {value}: leave it "
                "out, or start a training in another STORE"
            )
    merged |= {name: default_of(name) if wishes[name] is None else wishes[name] for name in names_of("session")}
    merged |= {name: _chosen(name, kept, wishes) for name in names_of("changeable")}
    ends = kept if wishes["steps"] is None and wishes["minutes"] is None else wishes
    merged |= {name: ends[name] for name in ("steps", "minutes")}
    if merged["recompute"] and merged["micro_batch"] > 1:
        raise MisuseError(f"--micro-batch {kept['micro_batch']} recomputes activations already: resume without --checkpoint")
    return msgspec.convert(merged, Options, strict=True)


def refuse_other_stage(store: Readable, name: str, stage: int) -> None:
    """Raise MisuseError where the ranks that made these stores divided the model in another way than ``stage``."""
    kept = read_record(store, name)["layout"].get("share", {}).get("stage")
    if kept is not None and kept != f"Stage{stage}":
        raise MisuseError(
            f"--stage {stage} would divide the model in another way than these stores, which have {kept}: leave --stage "
            "out, or resume with another number of ranks"
        )


def refuse_other_text(text: Text, nbytes: int) -> None:
    """Raise MisuseError unless ``text`` has ``nbytes``, as the text had at the beginning of the training."""
    if text.nbytes != nbytes:
        raise MisuseError(
            f"the text {text.path} has {text.nbytes:,} bytes, that of this training had {nbytes:,}: name the text of this "
            "training with --text"
        )


def go_on_command(folder: str, launched: Launched) -> str:
    """Return the command that resumes the training in ``folder``."""
    return shlex.join([*launched.command, "train", folder, "--existing", "resume"])


@dataclass(frozen=True)
class ResumePlace:
    """Where a training is resumed. ``opened``: the folder for ``peers.open``. ``newest``: a store with the newest commit.

    ``source``: the folder from which a commit of another number of ranks is copied, as of ``generation`` of ``newest``; None
    where the stores of these ranks have the newest commit."""

    opened: str
    newest: str
    source: str | None = None
    generation: int | None = None


class _Seen(msgspec.Struct, forbid_unknown_fields=True):
    """The commits that one rank sees: number and ranks of the newest one, whether a single process committed in the folder, and
    the common commits of all ranks in the rank's own store."""

    newest: tuple[int, int]
    plain: bool
    mine: list[tuple[int, str, int]]


def find(folder: str, peers: Peers) -> ResumePlace | None:
    """Find the newest commit in ``folder``: of one process in ``folder`` itself, or of N ranks in ``folder/rank-R-of-N``.

    Returns None where nothing is committed. All ranks call this function. Raises MisuseError where another number of ranks made
    the newest commit and some rank here cannot see all of their stores.
    """
    ranks, rank = peers.launched.ranks, peers.launched.rank
    own = str(folder_of(folder, rank, ranks))
    with peers.together():
        seen = newest_set(folder, apart=ranks)
        plain = _is_store(folder)
        mine = joints(Path(own)) if ranks > 1 else []
    if ranks == 1:
        if seen is None:
            return ResumePlace(folder, folder) if plain else None
        if seen.ranks == 1:
            return ResumePlace(own, own)
        return ResumePlace(own, str(seen.folders[0]), folder, seen.joints[0].generation)
    everybody = peers.said(
        {
            "newest": [0, 0] if seen is None else [seen.number, seen.ranks],
            "plain": plain,
            "mine": [[joint.number, joint.name, joint.generation] for joint in mine],
        },
        _Seen,
    )
    common = in_all([[RankCommit(*joint) for joint in said.mine] for said in everybody])
    newest = max(said.newest for said in everybody)
    if common is not None and common[0].number >= newest[0]:
        return ResumePlace(folder, own)
    if newest[0]:
        blind = [str(number) for number, said in enumerate(everybody) if said.newest != newest]
        if blind or seen is None:
            raise MisuseError(
                f"the newest commit in {folder} is of {newest[1]} ranks, and rank {', '.join(blind)} does not see the stores "
                f"of all of them: resume with {newest[1]} ranks, or copy these stores to where all ranks can read them"
            )
        return ResumePlace(folder, str(seen.folders[0]), folder, seen.joints[0].generation)
    return ResumePlace(folder, folder, folder) if all(said.plain for said in everybody) else None


def refuse_others(folder: str, ranks: int) -> None:
    """Raise MisuseError where ``folder`` already has a training of another number of ranks, because a new one would be a second
    training in the same folder."""
    seen = newest_set(folder)
    if seen is not None and (ranks == 1 or seen.ranks != ranks):
        who = f"of {seen.ranks} ranks" if seen.ranks > 1 else "of one process"
    elif ranks > 1 and _is_store(folder):
        who = "of one process"
    else:
        return
    raise MisuseError(
        f"{folder} has a training {who} already: continue it with --existing resume, name another STORE, or delete it first"
    )


def _is_store(folder: str) -> bool:
    return has_commit(Path(os.path.expanduser(folder)))
