"""``tiered train --resume``: what a store says of the training in it, and which of its options may be other ones now.

Where a training goes on that any number of ranks began, and where its stores are then.
"""

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
from tiered.cli.train.command import Options
from tiered.cli.train.model import Text
from tiered.cli.train.ranks import Peers
from tiered.errors import shown
from tiered.format.generations import load
from tiered.types import BackendName
from tiered.zero.checkpoint.checkpoint import Readable, read_record
from tiered.zero.rank_stores import RankCommit, folder_of, has_commit, in_all, joints, newest_set

__all__ = [
    "Earlier",
    "Opening",
    "Over",
    "Place",
    "earlier",
    "find",
    "go_on_command",
    "keep",
    "opening",
    "refuse_other_stage",
    "refuse_other_text",
    "refuse_others",
]

SAME = (
    *("layers", "width", "heads", "context", "batch", "accumulate", "micro_batch", "update"),
    *("lr", "warmup", "weight_decay", "clip", "seed"),
)
"""Options that make it this training."""


ADDED = {"device": "cuda", "update_tier": "dram"}
"""Options that a training of an earlier release does not have written down, where they are not None."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Over(MisuseError):
    """The training has had all its steps."""


@dataclass(frozen=True)
class Opening:
    """How the store of a training is opened: as it was, where nothing else is given."""

    dram: int
    hbm: int | None
    device: str
    backend: BackendName
    commit_every: int | None


@dataclass(frozen=True)
class Earlier:
    """What earlier processes did of a training. ``losses``: of each step; ``seconds``: what these took."""

    options: Options
    text_bytes: int
    step: int
    seconds: float
    losses: list[float]


class _Kept(msgspec.Struct):
    """What ``zero.commit`` was given for ``extra``, as far as it is needed here."""

    options: dict[str, Any]
    text_bytes: _Count
    step: _Count
    seconds: float
    losses: torch.Tensor


def opening(folder: str, wishes: Mapping[str, Any]) -> Opening:
    """Opens and makes nothing. Raises MisuseError where there is no training to go on with."""
    manifest = load(folder) if os.path.isdir(folder) else None
    if manifest is None:
        raise MisuseError(f"nothing is committed in {folder}: name the --dir of a training, or begin one without --resume")
    kept = manifest.meta.get("opening")
    if manifest.meta.get("command") != "train" or not isinstance(kept, Mapping):
        raise MisuseError(
            f"what is committed in {folder} is no training that can be resumed: name the --dir of one, or begin one without "
            "--resume"
        )
    found = {field.name: _chosen(field.name, kept, wishes) for field in fields(Opening)}
    try:
        return msgspec.convert(found, Opening, strict=True)
    except (ValueError, OverflowError) as error:
        raise ManifestError(f"the meta of {folder} does not say how its store is opened: {shown(str(error), 300)}") from error


def _chosen(name: str, kept: Mapping[str, Any], wishes: Mapping[str, Any]) -> Any:
    return kept.get(name, ADDED.get(name)) if wishes[name] is None else wishes[name]


def keep(every: int | None, ranks: int) -> int:
    """How many generations, with ``--commit-every`` or without. Of ranks each keeps what all have until all have the next."""
    return 1 if every is None and ranks == 1 else 2


def earlier(store: Readable, folder: str, name: str, wishes: Mapping[str, Any]) -> Earlier:
    """What ``store``, in ``folder``, has of the training, with ``wishes``, the options that were given (others are None).

    Raises MisuseError for a wish that would make it another training, and Over.
    """
    extra = read_record(store, name)["extra"]
    try:
        kept = msgspec.convert(extra, _Kept, strict=True, dec_hook=_losses)
        options, losses, step, seconds = _merged(kept.options, wishes), kept.losses.tolist(), kept.step, kept.seconds
    except (TypeError, KeyError, ValueError, OverflowError, AttributeError) as error:
        raise ManifestError(
            f"{store}: the training in it is damaged, or of another version, which this release does not read "
            f"({shown(str(error), 300)})"
        ) from error
    if options.steps is not None and step >= options.steps:
        raise Over(
            f"the training in {folder} has had {step} of its {options.steps} steps: for more of them give --steps, "
            "counted from its beginning"
        )
    if options.minutes is not None and seconds >= 60 * options.minutes:
        raise Over(
            f"the training in {folder} has had its {options.minutes:g} minutes: for more of them give --minutes, counted "
            "from its beginning"
        )
    return Earlier(options, kept.text_bytes, step, seconds, losses)


def _losses(kind: type, value: object) -> object:
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or not value.is_floating_point():
        raise TypeError(f"Expected losses, got {value!r:.100}")
    return value


def _merged(kept: Mapping[str, Any], wishes: Mapping[str, Any]) -> Options:
    for name in SAME:
        if wishes[name] is not None and wishes[name] != kept[name]:
            option = "--" + name.replace("_", "-")
            raise MisuseError(
                f"{option} {wishes[name]} would make it another training, this one has {option} {kept[name]}: leave it out, or "
                "begin one in another --dir"
            )
    merged = {**wishes, **{name: kept[name] for name in SAME}, "existing": "refuse", "prefetch": wishes["prefetch"] or "on"}
    anew = ("text", "update_tier", *(field.name for field in fields(Opening)))
    merged |= {name: _chosen(name, kept, wishes) for name in anew}
    if wishes["steps"] is None and wishes["minutes"] is None:
        merged |= {name: kept[name] for name in ("steps", "minutes")}
    merged["stage"] = kept.get("stage", 3) if wishes["stage"] is None else wishes["stage"]
    merged["recompute"] = wishes["recompute"] or kept["recompute"]
    if merged["recompute"] and merged["micro_batch"] > 1:
        raise MisuseError(f"--micro-batch {kept['micro_batch']} computes units again in backward: resume without --checkpoint")
    return msgspec.convert({field.name: merged[field.name] for field in fields(Options)}, Options, strict=True)


def refuse_other_stage(store: Readable, name: str, stage: int) -> None:
    """Raises MisuseError where ranks have divided the model otherwise."""
    kept = read_record(store, name)["layout"].get("share", {}).get("stage")
    if kept is not None and kept != f"Stage{stage}":
        raise MisuseError(
            f"--stage {stage} would divide the model otherwise than these stores, which have {kept}: leave it out; another "
            "number of ranks may have another stage"
        )


def refuse_other_text(text: Text, nbytes: int) -> None:
    """Raises MisuseError unless ``text`` has as many bytes as that which the training began with."""
    if text.nbytes != nbytes:
        raise MisuseError(
            f"the text {text.path} has {text.nbytes:,} bytes, that of this training had {nbytes:,}: name that one with --text"
        )


def go_on_command(folder: str, launched: Launched) -> str:
    return shlex.join([*launched.command, "train", "--resume", "--dir", folder])


@dataclass(frozen=True)
class Place:
    """``opened``: what ``peers.open`` is given. ``newest``: a store with the newest commit. ``source``: what another number of
    ranks committed there is taken over from, as of ``generation`` of ``newest``; None where these stores have it."""

    opened: str
    newest: str
    source: str | None = None
    generation: int | None = None


class _Seen(msgspec.Struct, forbid_unknown_fields=True):
    """What a rank finds: number and ranks of the newest commit, whether one process committed there, and the commits of all
    ranks that are in its own store."""

    newest: tuple[int, int]
    plain: bool
    mine: list[tuple[int, str, int]]


def find(folder: str, peers: Peers) -> Place | None:
    """From the newest commit in ``folder``, whoever made it: one process in ``folder`` itself, or N ranks in
    ``folder/rank-R-of-N``. None where there is none. All ranks call it.

    Raises MisuseError where other ranks' stores have it and some rank here cannot see all of them.
    """
    ranks, rank = peers.launched.ranks, peers.launched.rank
    own = str(folder_of(folder, rank, ranks))
    with peers.together():
        seen = newest_set(folder, apart=ranks)
        plain = _is_store(folder)
        mine = joints(Path(own)) if ranks > 1 else []
    if ranks == 1:
        if seen is None:
            return Place(folder, folder) if plain else None
        if seen.ranks == 1:
            return Place(own, own)
        return Place(own, str(seen.folders[0]), folder, seen.joints[0].generation)
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
        return Place(folder, own)
    if newest[0]:
        blind = [str(number) for number, said in enumerate(everybody) if said.newest != newest]
        if blind or seen is None:
            raise MisuseError(
                f"the newest commit in {folder} is of {newest[1]} ranks, and rank {', '.join(blind)} does not see the stores "
                f"of all of them: go on with {newest[1]} ranks, or copy these stores to where all ranks read them"
            )
        return Place(folder, str(seen.folders[0]), folder, seen.joints[0].generation)
    return Place(folder, folder, folder) if all(said.plain for said in everybody) else None


def refuse_others(folder: str, ranks: int) -> None:
    """Raises MisuseError where a training that begins in ``folder`` would be one of two: another number of ranks has one, or
    one process that took it over from several."""
    seen = newest_set(folder)
    if seen is not None and (ranks == 1 or seen.ranks != ranks):
        who = f"of {seen.ranks} ranks" if seen.ranks > 1 else "of one process"
    elif ranks > 1 and _is_store(folder):
        who = "of one process"
    else:
        return
    raise MisuseError(
        f"{folder} holds the training {who} already: go on with it with --resume, name another --dir, or delete it first"
    )


def _is_store(folder: str) -> bool:
    return has_commit(Path(os.path.expanduser(folder)))
