"""``tiered train --resume``: what a store says of the training in it, and which of its options may be other ones now."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import msgspec
import torch

from tiered import ManifestError, MisuseError
from tiered.cli.launched import Launched
from tiered.cli.text import Text
from tiered.cli.train import Options
from tiered.errors import shown
from tiered.generations import load
from tiered.types import BackendName
from tiered.zero.checkpoint import Readable, read_record

__all__ = [
    "Earlier",
    "Opening",
    "Over",
    "earlier",
    "go_on_command",
    "keep",
    "opening",
    "refuse_other_stage",
    "refuse_other_text",
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
