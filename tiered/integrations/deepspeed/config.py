"""DeepSpeed's configuration as this project uses it: read, filled, checked, and made into one frozen value.

``Config.of`` is what ``zero.initialize`` asks; ``examined`` is what ``tiered deepspeed-config`` prints, which begins nothing.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tiered.errors import MisuseError, expect_type, shown
from tiered.format.foreign.documents import text_of
from tiered.integrations.deepspeed.table import (
    AUTO,
    FILLED,
    NEEDED,
    SECTION,
    Judged,
    Verdict,
    canonical,
    find,
    judged,
    number_of,
    said,
    value_at,
)

__all__ = [
    "Config",
    "FlopsProfile",
    "Log",
    "LossScaling",
    "Maker",
    "Place",
    "Reports",
    "batch_sizes",
    "dtype_of",
    "examined",
    "place_of",
    "read",
    "told",
]

FOLDER = "tiered-store"
"""The store's folder where the configuration names none."""
TYPES = {"fp32": "fp32", "float32": "fp32", "torch.float32": "fp32", "float": "fp32"}
TYPES |= {"fp16": "fp16", "float16": "fp16", "torch.float16": "fp16", "half": "fp16"}
TYPES |= {"bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16"}


class Maker(msgspec.Struct, frozen=True):
    """A section that names what to make and its arguments: ``optimizer`` or ``scheduler``."""

    kind: str
    params: Mapping[str, Any]


class LossScaling(msgspec.Struct, frozen=True):
    """The section ``fp16``, with DeepSpeed's defaults."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0


class Place(msgspec.Struct, frozen=True):
    """Where the state is. ``dram`` and the others are sizes as ``TieredStore.open`` takes them, None where nothing is said;
    ``spills``: what the budget does not hold is meant to be on the disk."""

    path: str
    paths: tuple[str, ...] | None = None
    dram: int | str | None = None
    hbm: int | str | None = None
    device: str | None = None
    nvme: int | str | None = None
    backend: str | None = None
    name: str = "model"
    micro_batch: int = 1
    spills: bool = False
    params_offloaded: bool = False
    states_offloaded: bool = False


class FlopsProfile(msgspec.Struct, frozen=True):
    """The section ``flops_profiler``, with DeepSpeed's defaults."""

    enabled: bool = False
    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None


class Log(msgspec.Struct, frozen=True):
    """A section ``tensorboard`` or ``csv_monitor``, with DeepSpeed's defaults."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class Reports(msgspec.Struct, frozen=True):
    """What is printed and written. ``steps``: between two lines; None: no lines."""

    steps: int | None = None
    wall_clock: bool = False
    memory: bool = False
    dump: bool = False
    flops: FlopsProfile = FlopsProfile()
    tensorboard: Log = Log()
    csv: Log = Log()


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration, checked and complete. ``dtype`` is "fp32", "bf16" or "fp16"; ``rows`` what becomes of each key."""

    rows: tuple[Judged, ...]
    values: Mapping[str, Any]
    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    managed: bool
    dtype: str
    buffer_dtype: str | None
    fp16: LossScaling
    check_overflow: bool
    autocast: bool
    clipping: float
    compute_norm: bool
    stage: int
    optimizer: Maker | None
    scheduler: Maker | None
    place: Place
    reports: Reports
    drop_last: bool
    cpu_checkpointing: bool

    @staticmethod
    def of(
        config: Any, *, ranks: int = 1, arguments: Any = None, total_steps: Callable[[int], int | None] | None = None
    ) -> Config:
        """Make one of a path, a dict or base64. ``arguments`` fills values that are "auto", with the names of Hugging Face's
        ``TrainingArguments``; ``total_steps`` returns the steps of the whole training for a number of passes a step.

        Raises MisuseError for a key that there is not, a value that is none, a key that is refused (all of them are named), a
        value that stayed "auto", and batch sizes that contradict each other.
        """
        values = read(config)
        judged(values)  # raises for unknown keys before anything is filled
        values = _filled(values, arguments, ranks, total_steps)
        rows = crossed(judged(values), values)
        refused = [row for row in rows if row.verdict is Verdict.REFUSED]
        if refused:
            named = "; ".join(f"{row.path}={json.dumps(row.value, default=str)[:60]}: {row.why}" for row in refused)
            raise MisuseError(f"this configuration asks for what there is not: {named}")
        sizes = batch_sizes(values, ranks)
        return _made(rows, values, sizes)


def read(config: Any) -> dict[str, Any]:
    """Return the configuration as a dict of its own: given as one, as the path of a JSON file, or as base64 of its text.

    Of what Hjson has beyond JSON, which DeepSpeed reads, comments (#, // and /* */) and a comma after a last value are taken.
    Numbers, true and false may be texts ("1e-4") where the table says that the key has such a value. Raises MisuseError for
    what is no configuration.
    """
    if isinstance(config, Mapping):
        return _converted(copy.deepcopy(dict(config)), "")
    expect_type(config, str | os.PathLike, "a configuration is a dict or the path of a JSON file")
    where = os.fspath(config)
    try:
        text = text_of(Path(where).expanduser()).removeprefix("\ufeff")  # which editors on Windows write
    except OSError as error:
        decoded = _decoded(where)
        if decoded is None:
            why = error.strerror or type(error).__name__
            raise MisuseError(f"cannot read the configuration {where:.200}: {why}") from error
        text, where = decoded, "the configuration in base64"
    try:
        found = json.loads(_without_comments(text), object_pairs_hook=lambda pairs: _unique(pairs, where))
    except ValueError as error:
        mend = "comments and a comma after a last value may be there; quotes around names and texts, and other commas, must be"
        raise MisuseError(f"{where} is no JSON: {error} ({mend})") from error
    except RecursionError as error:
        raise MisuseError(f"{where} is no configuration: it is nested too deeply") from error
    if not isinstance(found, dict):
        raise MisuseError(f"{where} has {type(found).__name__} in place of a section of keys")
    return _converted(found, "")


_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|#[^\n]*|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'"(?:[^"\\]|\\.)*"|,(?=\s*[}\]])', re.DOTALL)


def _without_comments(text: str) -> str:
    """Return JSON without comments and without commas after last values; every other character is in the line where it was."""

    def blank(found: re.Match[str]) -> str:
        return found[0] if found[0][0] == '"' else "\n" * found[0].count("\n")

    return _LAST_COMMA.sub(blank, _COMMENT.sub(blank, text))


def _converted(section: dict[str, Any], above: str) -> dict[str, Any]:
    """Return a section with numbers, true and false in place of texts that say them, where the key has such a value."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        path = f"{above}{name}"
        key = find(path) if isinstance(name, str) else None
        if isinstance(value, dict):
            found[name] = _converted(value, f"{path}.")
        elif key is not None and isinstance(value, list) and "list" in key.kind:
            found[name] = [number_of(one) for one in value] if "number" in key.kind or name == "betas" else value
        elif key is not None and isinstance(value, str):
            found[name] = said(value, key.kind)
        else:
            found[name] = value
    return found


def _decoded(text: str) -> str | None:
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True).decode() if len(text) > 1 else None
    except (ValueError, binascii.Error):
        return None


def _unique(pairs: Sequence[tuple[str, Any]], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise MisuseError(f"{where} has {name!r} twice in one section: leave one out")
        found[name] = value
    return found


# "auto"

def _meant(arguments: Any, ranks: int, total: int | None) -> dict[str, Any]:
    """Return what Hugging Face's Trainer fills keys with that are "auto" (https://hf.co/docs/transformers/deepspeed); None
    where ``arguments`` does not say it. ``total``: the steps of the whole training."""
    found = {path: getattr(arguments, name, None) for path, name in FILLED.items()}
    one, passes = found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"] or 1
    betas = [getattr(arguments, name, None) for name in ("adam_beta1", "adam_beta2")]
    found["train_batch_size"] = None if one is None else one * passes * ranks
    found["optimizer.params.betas"] = None if None in betas else betas
    found["scheduler.params.warmup_min_lr"] = 0
    found["scheduler.params.warmup_num_steps"] = _warmup(arguments, total)
    found["scheduler.params.total_num_steps"] = total
    return found


def _warmup(arguments: Any, total: int | None) -> Any:
    """Return the steps of the warm-up, as ``TrainingArguments`` says them: a number, or a share of all."""
    if callable(getattr(arguments, "get_warmup_steps", None)) and total is not None:
        return arguments.get_warmup_steps(total)
    steps = getattr(arguments, "warmup_steps", None)
    return steps if steps is None or steps >= 1 or total is None else int(steps * total)


def _filled(
    values: dict[str, Any], arguments: Any, ranks: int, total_steps: Callable[[int], int | None] | None
) -> dict[str, Any]:
    """Return ``values`` without "auto": filled from ``arguments``, else left out where the default is meant. Raises MisuseError
    where there is none."""
    passes = values.get("gradient_accumulation_steps")
    passes = getattr(arguments, "gradient_accumulation_steps", 1) if passes in (None, AUTO) else passes
    total: int | None = None
    if total_steps is not None and isinstance(passes, int):
        total = total_steps(passes)
    if total is None and (getattr(arguments, "max_steps", None) or 0) > 0:
        total = arguments.max_steps
    meant = _meant(arguments, ranks, total)

    def fill(section: dict[str, Any], above: str) -> dict[str, Any]:
        found = {}
        for name, value in section.items():
            path = canonical(f"{above}{name}")
            if isinstance(value, dict):
                found[name] = fill(value, f"{path}.")
            elif value != AUTO:
                found[name] = value
            elif meant.get(path) is not None:
                found[name] = meant[path]
            elif path in NEEDED:
                source = "its training_data=" if path.endswith("total_num_steps") and arguments is not None else "args="
                raise MisuseError(
                    f'{path!r} is "auto", and nothing says what it is: give zero.initialize {source} '
                    "(Hugging Face's TrainingArguments have it), or write the value"
                )
        return found

    return fill(values, "")


# Checks that look at several keys


def crossed(rows: Iterable[Judged], values: Mapping[str, Any]) -> tuple[Judged, ...]:
    """Return ``rows`` with those refused that contradict others."""
    found: list[Judged] = []
    for row in rows:
        problem = _problem(row.path, row.value, values) if row.verdict is Verdict.HONOURED else None
        if problem is None:
            found.append(row)
        else:
            found.append(replace(row, verdict=problem[0], why=problem[1]))
    return tuple(found)


def _problem(path: str, value: Any, values: Mapping[str, Any]) -> tuple[Verdict, str] | None:
    """Return what becomes of a key for the sake of others; None where it is as the table says."""
    if value is None:
        return None  # as without the key
    dtype = dtype_of(values)
    if canonical(path) == "bf16.enabled" and value is True and value_at(values, "fp16.enabled") is True:
        return Verdict.REFUSED, "fp16 is enabled, too: enable one of them"
    if path == "torch_autocast.enabled" and value is True and dtype != "fp32":
        return Verdict.REFUSED, f"{dtype} is enabled, too, and the model is converted to it: enable one of them"
    if path in ("communication_data_type", "data_types.grad_accum_dtype", "data_types.param_dtype", "data_types.buffer_dtype"):
        return _type_problem(path, value, dtype, values)
    if path.startswith("optimizer.params.") and value is True:
        kind, adam = str(value_at(values, "optimizer.type")).lower(), value_at(values, "optimizer.params.adam_w_mode", True)
        if path.endswith(".amsgrad") and (kind == "adamw" or (kind == "adam" and adam)):
            return Verdict.REFUSED, "the largest second moments are kept by Adam with adam_w_mode false, not by AdamW"
    if path == "optimizer.params.adam_w_mode" and value is False and str(value_at(values, "optimizer.type")).lower() == "muon":
        return Verdict.REFUSED, "what is no matrix is updated by AdamW beside Muon: leave adam_w_mode out"
    if path.startswith("zero_optimization.offload_") and path.endswith(".device") and value == "nvme":
        folder = value_at(values, path.removesuffix("device") + "nvme_path")
        if not folder and not value_at(values, f"{SECTION}.path"):
            return Verdict.REFUSED, "it says no nvme_path beside it: write the folder on the drive"
    if path == "zero_optimization.offload_optimizer.nvme_path":
        other = value_at(values, "zero_optimization.offload_param.nvme_path")
        both = all(value_at(values, f"zero_optimization.offload_{what}.device") == "nvme" for what in ("param", "optimizer"))
        if both and other and os.path.normpath(other) != os.path.normpath(value) and not value_at(values, f"{SECTION}.path"):
            return Verdict.REFUSED, (
                "parameters and states are in one store: name one folder, or several drives with "
                '"tiered": {"path": ..., "paths": [...]}'
            )
    return None


def _type_problem(path: str, value: Any, dtype: str, values: Mapping[str, Any]) -> tuple[Verdict, str] | None:
    if value not in TYPES:
        return Verdict.REFUSED, f"there are fp32, fp16 and bf16, not {value!r:.40}"
    if path == "data_types.buffer_dtype" or TYPES[value] == dtype:
        return None
    if path == "data_types.grad_accum_dtype" and value_at(values, "gradient_accumulation_steps", 1) == 1:
        return Verdict.UNNEEDED, "gradients of one pass are not added up"
    what = {
        "communication_data_type": "gradients are sent in the type of the parameters",
        "data_types.grad_accum_dtype": "gradients are added up in the type of the parameters",
        "data_types.param_dtype": "bf16 and fp16 say the type of the parameters",
    }[path]
    return Verdict.REFUSED, f"{what}, which is {dtype}: write that, or leave it out"


def dtype_of(values: Mapping[str, Any]) -> str:
    """Return the type of parameters that a configuration says."""
    if value_at(values, "fp16.enabled") is True:
        return "fp16"
    return "bf16" if True in (value_at(values, "bf16.enabled"), value_at(values, "bfloat16.enabled")) else "fp32"


def batch_sizes(values: Mapping[str, Any], ranks: int) -> tuple[int, int, int]:
    """Return the samples of a step, the samples of a pass on one rank, and the passes of a step. One of them that is left out
    follows from the others (https://www.deepspeed.ai/docs/config-json/#batch-size-related-parameters). Raises MisuseError where
    they contradict each other, or too few are said."""
    whole = _count(values, "train_batch_size")
    one = _count(values, "train_micro_batch_size_per_gpu")
    passes = _count(values, "gradient_accumulation_steps")
    if whole is None and one is None:
        raise MisuseError("the configuration says no batch size: write train_batch_size or train_micro_batch_size_per_gpu")
    if whole is None:
        assert one is not None
        passes = passes or 1
        whole = one * passes * ranks
    elif one is None:
        passes = passes or 1
        one = whole // ranks // passes
    elif passes is None:
        passes = whole // one // ranks
    if whole != one * passes * ranks or whole < 1:
        raise MisuseError(
            f"train_batch_size is {whole}, and train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks is "
            f"{one} * {passes} * {ranks} = {one * passes * ranks}: change one of them, or leave one out"
        )
    return whole, one, passes


def _count(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value in (None, AUTO):
        return None
    if value < 1:
        raise MisuseError(f"{name} is {value}: it is at least 1")
    return int(value)


# The value


_Section = TypeVar("_Section", LossScaling, FlopsProfile, Log)


def _made(rows: tuple[Judged, ...], values: Mapping[str, Any], sizes: tuple[int, int, int]) -> Config:
    def get(path: str, otherwise: Any) -> Any:
        value = value_at(values, path)
        return otherwise if value is None else value

    def section(path: str, kind: type[_Section]) -> _Section:
        given = get(path, {})
        said = {name: value for name, value in given.items() if value is not None and given.get("enabled") is not False}
        return msgspec.convert(said, kind, strict=False)  # whole numbers may be floats

    zero: Any = get("zero_optimization", {})
    stage = int(zero) if isinstance(zero, bool) else int(get("zero_optimization.stage", 0))
    dtype = dtype_of(values)
    bf16 = values.get("bf16", values.get("bfloat16")) or {}
    fp16 = section("fp16", LossScaling)
    if fp16.enabled and (fp16.loss_scale_window < 1 or fp16.hysteresis < 1 or fp16.min_loss_scale <= 0 or fp16.loss_scale < 0):
        raise MisuseError("fp16: loss_scale_window and hysteresis are at least 1, scales are above 0: correct what is not")
    clipping = float(get("gradient_clipping", 0.0))
    if clipping < 0:
        raise MisuseError(f"gradient_clipping is {clipping}: it is a norm, or 0")
    steps = get("steps_per_print", None)
    flops = section("flops_profiler", FlopsProfile)
    reports = Reports(
        steps=None if steps is None or steps < 1 else int(steps),
        wall_clock=bool(get("wall_clock_breakdown", False)) or flops.enabled,
        memory=bool(get("memory_breakdown", False)),
        dump=bool(get("dump_state", False)),
        flops=flops,
        tensorboard=section("tensorboard", Log),
        csv=section("csv_monitor", Log),
    )
    buffers = get("data_types.buffer_dtype", None)
    return Config(
        rows=rows,
        values=values,
        train_batch_size=sizes[0],
        micro_batch_size=sizes[1],
        accumulation_steps=sizes[2],
        managed=bool(get("managed_gradient_accumulation", True)),
        dtype=dtype,
        buffer_dtype=None if buffers is None else TYPES[buffers],
        fp16=fp16,
        check_overflow=dtype == "fp16" or (dtype == "bf16" and bool(bf16.get("check_grad_overflow", True))),
        autocast=bool(get("torch_autocast.enabled", False)),
        clipping=clipping,
        compute_norm=bool(get("zero_optimization.compute_grad_norm", False)),
        stage=stage,
        optimizer=_maker(values, "optimizer"),
        scheduler=_maker(values, "scheduler"),
        place=_place(values),
        reports=reports,
        drop_last=bool(get("dataloader_drop_last", False)),
        cpu_checkpointing=bool(get("activation_checkpointing.cpu_checkpointing", False)),
    )


def _maker(values: Mapping[str, Any], name: str) -> Maker | None:
    section = values.get(name) or {}
    kind = section.get("type")
    if kind is None:
        return None
    return Maker(kind, {key: value for key, value in (section.get("params") or {}).items() if value is not None})


def _place(values: Mapping[str, Any]) -> Place:
    """Return where the state is, as the sections of ``offload_*`` and ``tiered`` say it."""
    own: Mapping[str, Any] = values.get(SECTION) or {}
    offloaded = {}
    for what, old in (("param", "cpu_offload_param"), ("optimizer", "cpu_offload")):
        section = value_at(values, f"zero_optimization.offload_{what}") or {}
        device = section.get("device") or ("cpu" if value_at(values, f"zero_optimization.{old}") else "none")
        offloaded[what] = device, section.get("nvme_path")
    folders = [folder for device, folder in offloaded.values() if device == "nvme" and folder]
    path = own.get("path") or (os.path.join(os.path.expanduser(folders[0]), "tiered") if folders else FOLDER)
    paths = own.get("paths")
    return Place(
        path=str(path),
        paths=None if paths is None else tuple(map(str, paths)),
        **{name: own.get(name) for name in ("dram", "hbm", "device", "nvme", "backend")},
        name=own.get("name") or "model",
        micro_batch=int(own.get("micro_batch") or 1),
        spills=any(device == "nvme" for device, _ in offloaded.values()),
        params_offloaded=offloaded["param"][0] != "none",
        states_offloaded=offloaded["optimizer"][0] != "none",
    )


def place_of(config: Any) -> tuple[Place, str]:
    """Return where a configuration has the state, and the type of its parameters, also where other values are "auto". Raises as
    ``judged``."""
    values = read(config)
    judged(values)
    return _place(values), dtype_of(values)


def told(rows: Sequence[Judged]) -> str:
    """Return what becomes of each key as a table: key, value, verdict, why."""
    lines = [(row.path, _written(row.value), row.verdict.value, row.why) for row in rows]
    cells = [[shown(cell) for cell in line] for line in (("key", "value", "", "why"), *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells)


def summed(rows: Sequence[Judged]) -> str:
    """Return how many keys are honoured, and which are not needed, in one line."""
    unneeded = [row.path for row in rows if row.verdict is Verdict.UNNEEDED]
    others = f", {len(unneeded)} not needed ({', '.join(map(shown, unneeded))})" if unneeded else ""
    return f"{len(rows) - len(unneeded)} keys honoured{others}; tiered deepspeed-config says why of each"


def _written(value: Any) -> str:
    """Return a value as a configuration has it; a section is shortened."""
    text = f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str)
    return text if len(text) <= 24 else f"{text[:20]} ..."


def examined(config: Any, ranks: int = 1) -> tuple[tuple[Judged, ...], str | None]:
    """Return what becomes of each key, without filling anything, and what is wrong with the batch sizes, if they are said."""
    values = read(config)
    rows = crossed(judged(values), values)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    said = [values.get(name) for name in names]
    if AUTO in said:
        return rows, None
    try:
        batch_sizes(values, ranks)
    except MisuseError as error:
        return rows, str(error)
    return rows, None
