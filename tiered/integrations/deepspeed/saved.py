"""Read checkpoints that DeepSpeed wrote: ZeRO stages 1 to 3, of any number of ranks.

Their layout, of version 0.19 and back to 0.14, learnt from https://github.com/deepspeedai/DeepSpeed (``deepspeed/utils/
zero_to_fp32.py`` and the ``state_dict`` methods of the ZeRO optimizers) and from files that version 0.19.8 wrote here:

- ``TAG/mp_rank_00_model_states.pt`` (stage 3: ``zero_pp_rank_R_mp_rank_00_model_states.pt``): the module's tensors (with
  stage 3 its buffers), names and shapes of the trained parameters in the order in which they are flattened
  (``param_shapes``, a dict for each group), parameters that are not trained, counters, the scheduler's state, and what the
  caller added.
- ``TAG/[bf16_|fp16_]zero_pp_rank_R_mp_rank_00_optim_states.pt``: the share of rank R of each group's fp32 parameters and
  moments. Stages 1 and 2 flatten a group and divide it evenly; ``param_slice_mappings`` says which elements of the share
  are whose. Stage 3 divides each parameter evenly, and flattens the shares of a sub-group one after the other.
- With stage 3 and the optimizer on NVMe, sub-groups of at least 1 MiB are empty in these files. They are in
  ``TAG/offloaded_tensors/rankRR/[STATE-]FIRST_LAST.tensor.swp``: raw fp32, padded. FIRST and LAST are the numbers of a
  sub-group's first and last parameter, counted over all parameters of the model as DeepSpeed met them: in the order of
  ``parameters()``, or, for a model that was built under its ``zero.Init``, those of a module after those of the modules in
  it.

Pickles are read by ``tiered.format.foreign``, which runs nothing.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiered.errors import MisuseError, TorchFileError, quoted, shown
from tiered.format.foreign.documents import text_of
from tiered.format.foreign.pickled import Instance, Name, as_dict, as_list, as_text, sizes_of
from tiered.format.foreign.torch_file import ELEMENTS, FileTensor, TorchFile
from tiered.integrations.deepspeed.config import dtype_of
from tiered.integrations.deepspeed.tags import LATEST, MOST_TEXT
from tiered.types import format_size
from tiered.zero.checkpoint.foreign import Described, Sound

__all__ = ["INERT", "NARROW", "Counters", "SavedCheckpoint", "SavedGroup", "is_saved", "plain", "tag_of"]

INERT = (
    *("deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    *("deepspeed.runtime.zero.config.ZeroStageEnum", "deepspeed.utils.tensor_fragment.fragment_address"),
    *("deepspeed.runtime.zero.offload_config.OffloadDeviceEnum", "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
    *("argparse.Namespace", "torch.device", "pathlib.PosixPath"),
)
"""Classes of which a checkpoint may have objects: each becomes an inert stand-in."""
LARGEST = 2**40
"""Elements of a parameter."""
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", re.ASCII)
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_model_states\.pt", re.ASCII)
_OWN = frozenset(
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "lr_scheduler"),
        *("frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
        *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "num_experts"),
        *("universal_checkpoint_info", "checkpoint_parallel_dimensions", "ds_autoep_layers", "autoep_layers", "folding"),
        *("autotp_universal_checkpoint_info", "dataloader"),
    )
)
"""What DeepSpeed itself writes beside the model; the rest of a model's file is the caller's."""
COUNTED = ("global_steps", "global_samples", "skipped_steps")
MOST_VALUES = 1_000_000
MOST_COPIES = 16
"""Times the bytes of their files that tensors may take, those of one value and those of a checkpoint: many may lie in the same
bytes of a file."""
ALWAYS = 64 << 20
"""Bytes that such tensors may take whatever the size of their files: of a small model with a large mask in all its layers."""
MOST_STATES = 16
"""States of a parameter."""
FLOATING = ("float32", "float16", "bfloat16", "float64")
"""Types of masters and moments."""
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of parameters by their names in a configuration, beside fp32."""
MOST_PADDING = 1 << 20
"""Bytes: 1 KiB for each thread of DeepSpeed's aio."""


@dataclass(frozen=True)
class Counters:
    """What DeepSpeed's engine counts."""

    global_steps: int
    global_samples: int
    skipped_steps: int


class SavedGroup(NamedTuple):
    """Param group of the optimizer: its settings, as DeepSpeed's have them, and the names of its parameters."""

    settings: Mapping[str, Any]
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Raw:
    """File of fp32 numbers, which may be padded."""

    path: str
    count: int
    dtype: str = "float32"
    is_contiguous: bool = True

    def read(self, begin: int, end: int) -> bytearray:
        """Return the bytes of elements ``begin`` to ``end``."""
        data = bytearray(4 * (end - begin))
        with open(self.path, "rb", buffering=0) as file:
            file.seek(4 * begin)
            view = memoryview(data)
            while view:
                count = file.readinto(view)
                if not count:
                    raise ValueError(f"{self.path} became shorter while it was read")
                view = view[count:]
        return data


_Flat = FileTensor | _Raw


class _Fragment(NamedTuple):
    """Elements ``begin`` to ``end`` of a parameter, which begin at element ``at`` of flat tensors of a rank: its fp32
    values, and its states by name."""

    begin: int
    end: int
    at: int
    flats: Mapping[str, _Flat]


def is_saved(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder is that of one tag of DeepSpeed's."""
    try:
        return any(_MODEL.fullmatch(name) for name in os.listdir(folder))
    except OSError:
        return False


def tag_of(folder: str | os.PathLike[str], tag: str | None = None) -> Path:
    """Return the folder of a tag below ``folder`` (None: the one that ``latest`` names), or ``folder`` itself where it is one.
    Raises MisuseError where there is none."""
    there = Path(os.path.expanduser(folder))
    if tag is None and is_saved(there):
        return there
    if tag is None:
        try:
            tag = text_of(there / LATEST, MOST_TEXT).strip()
        except OSError as error:
            raise MisuseError(
                f"{there} is no checkpoint of DeepSpeed's: it has neither files mp_rank_…_model_states.pt nor a file latest"
            ) from error
    if not tag or "/" in tag or "\0" in tag or tag in (".", "..") or not is_saved(there / tag):
        raise MisuseError(f"{there / shown(tag, 100)} is no checkpoint of DeepSpeed's")
    return there / tag


class SavedCheckpoint:
    """One checkpoint that DeepSpeed wrote, open for reading; a context manager, and a ``Foreign``.

    ``groups``: the param groups of its optimizer. ``scheduler``: the state of its scheduler, ``scaler`` that of its loss
    scale, by attribute. ``client_state``: what the caller saved with it. ``config``: the configuration.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Open the files of the folder of a tag. Raises MisuseError for what is not supported, TorchFileError for what is
        damaged or could run code, OSError."""
        self.where = str(folder)
        self._stack = ExitStack()
        try:
            with self._sound():
                self._open(Path(folder))
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> SavedCheckpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._stack.close()

    def _sound(self) -> Sound:
        return Sound(self.where, "DeepSpeed")

    # -- reading the files ---------------------------------------------------------------------------------------------------

    def _open(self, folder: Path) -> None:
        models, optims = _files(folder, _MODEL), _files(folder, _OPTIM)
        if not models:
            raise MisuseError(f"{folder} is no checkpoint of DeepSpeed's: it has no file …model_states.pt")
        if any(re.search(r"mp_rank_(?!00)\d+", name) for name in os.listdir(folder)):
            raise MisuseError(f"{folder} is divided by tensor parallelism (mp_rank_01), which there is not here")
        if any(name.startswith(("expp_", "layer_")) or "_expert_" in name for name in os.listdir(folder)):
            raise MisuseError(f"{folder} is of a pipeline or of DeepSpeed's own experts, which there are not here")
        model = self._value(models[min(models)])
        self.config: Mapping[str, Any] = as_dict(plain(model.get("ds_config") or {}))
        self.counters = Counters(*(_count(model.get(name, 0)) for name in COUNTED))
        self.version = str(model.get("ds_version"))
        self.scheduler: Any = plain(model.get("lr_scheduler"))
        self.client_state: dict[str, Any] = plain({str(key): value for key, value in model.items() if key not in _OWN})
        if not optims:
            raise MisuseError(
                f"{folder} has no file …zero_pp_rank_0_mp_rank_00_optim_states.pt: it was saved without ZeRO (stage 0), or "
                "without the optimizer; load its module with torch.load(weights_only=True)"
            )
        saved = [self._value(optims[rank]) for rank in sorted(optims)]
        states = [as_dict(one["optimizer_state_dict"]) for one in saved]
        stage = _number(states[0]["zero_stage"])
        count = states[0]["partition_count"]
        ranks = max(map(_count, count)) if isinstance(count, list) else _count(count)
        if len(optims) != ranks or max(optims) != ranks - 1:
            raise TorchFileError(
                f"{folder} was saved by {ranks} ranks, and has the optimizer states of {len(optims)}: {_some(optims)}"
            )
        if stage not in (1, 2, 3):
            raise MisuseError(f"{folder} is of ZeRO stage {stage}, and there are 1 to 3")
        if isinstance(count, list) and any(one != ranks for one in count):
            raise MisuseError(f"{folder} has param groups of different numbers of ranks (experts), which there are not here")
        self.stage, self.ranks = stage, ranks
        self.scaler = states[0].get("loss_scaler")
        shapes = _shapes(as_list(model["param_shapes"]))
        self._fragments: dict[str, list[_Fragment]] = {}
        own = {*map(as_text, as_list(model["buffer_names"])), *as_dict(model.get("shared_params") or {})}
        order = [as_text(name) for name in as_dict(model["module"]) if name not in own]
        steps = self._of_stage_3(folder, states, shapes, order) if stage == 3 else self._of_stage_2(states, shapes)
        self._describe(model, models, shapes, steps)

    def _value(self, path: Path) -> Mapping[str, Any]:
        file = self._stack.enter_context(TorchFile(path, inert=INERT))
        return as_dict(file.value)

    def _of_stage_2(self, states: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> list[int]:
        """Note where the elements of each parameter are, of stages 1 and 2. Returns the steps of each group."""
        base = states[0]["base_optimizer_state"]
        if not isinstance(base, dict):
            raise MisuseError(f"{self.where} is an elastic checkpoint: save it with elastic_checkpoint false, the default")
        groups = as_list(base["param_groups"])
        if len(groups) != len(shapes):
            raise ValueError(f"it has {len(groups)} param groups, and shapes of {len(shapes)}")
        self.groups = [SavedGroup(one, tuple(names)) for one, names in zip(_settings(groups), shapes, strict=True)]
        done = {name: 0 for group in shapes for name in group}
        steps = [0] * len(shapes)
        for state in states:
            mappings, masters = as_list(state["param_slice_mappings"]), as_list(state["single_partition_of_fp32_groups"])
            kept = as_dict(as_dict(state["base_optimizer_state"])["state"])
            for index, (mapping, master) in enumerate(zip(mappings, masters, strict=True)):
                flats, step = _flats(kept.get(index, {}), master)
                steps[index] = max(steps[index], self._steps(step, groups[index], flats))
                for name, address in as_dict(mapping).items():
                    at, numel = _count(address.attribute("start")), _count(address.attribute("numel"))
                    if name not in shapes[index]:
                        raise ValueError(f"group {index} has no parameter {name!r:.100}")
                    begin = done[as_text(name)]
                    self._fragments.setdefault(name, []).append(_Fragment(begin, begin + numel, at, flats))
                    done[name] += numel
        return steps

    def _of_stage_3(
        self,
        folder: Path,
        states: Sequence[Mapping[str, Any]],
        shapes: Sequence[Mapping[str, tuple[int, ...]]],
        order: Sequence[str],
    ) -> list[int]:
        """Note where the elements of each parameter are, of stage 3. Returns the steps of each sub-group."""
        base = as_dict(states[0]["optimizer_state_dict"])
        of_group = [[_count(one) for one in as_list(group["params"])] for group in map(as_dict, as_list(base["param_groups"]))]
        if sorted(one for group in of_group for one in group) != list(range(len(shapes))):
            raise ValueError("its param groups do not have each sub-group once")
        self.groups = [
            SavedGroup(one, tuple(name for index in members for name in shapes[index]))
            for one, members in zip(_settings(base["param_groups"]), of_group, strict=True)
        ]
        home = {index: group for group, members in enumerate(of_group) for index in members}
        steps = [0] * len(shapes)
        sizes = [sum(-(-math.prod(shape) // self.ranks) for shape in names.values()) for names in shapes]
        first = as_list(states[0]["fp32_flat_groups"])
        empty = {index: list(shapes[index]) for index in range(len(sizes)) if sizes[index] and not _tensor(first[index]).count}
        swapped = _swapped(folder, self.ranks, order, empty)
        for rank, state in enumerate(states):
            masters = as_list(state["fp32_flat_groups"])
            kept = as_dict(as_dict(state["optimizer_state_dict"])["state"])
            if len(masters) != len(shapes):
                raise ValueError(f"it has {len(masters)} sub-groups, and shapes of {len(shapes)}")
            for index, (names, master) in enumerate(zip(shapes, masters, strict=True)):
                flats, step = _flats(kept.get(index, {}), master)
                if index in swapped:
                    flats = _file_of(folder, rank, swapped[index], sizes[index], flats)
                steps[index] = max(steps[index], self._steps(step, base["param_groups"][home[index]], flats))
                at = 0
                for name, shape in names.items():
                    numel = math.prod(shape)
                    share = -(-numel // self.ranks)
                    begin = min(rank * share, numel)
                    self._fragments.setdefault(name, []).append(_Fragment(begin, min(begin + share, numel), at, flats))
                    at += share
        return steps

    def _steps(self, step: Any, group: Any, flats: Mapping[str, _Flat]) -> int:
        """Return how many steps a group has had: a state says it, or, of some of DeepSpeed's optimizers, the group. torch's SGD
        counts none: where it has states, each step of the engine that was not skipped was one of them."""
        if step is None and not as_dict(group).get("step") and len(flats) > 1:
            return max(1, self.counters.global_steps - self.counters.skipped_steps)
        return _step(step if step is not None else as_dict(group).get("step", 0))

    def _describe(
        self,
        model: Mapping[str, Any],
        models: Mapping[int, Path],
        shapes: Sequence[Mapping[str, tuple[int, ...]]],
        steps: Sequence[int],
    ) -> None:
        """Note all parameters, in the model's order, its buffers and aliases."""
        module = as_dict(model["module"])
        self.trained = frozenset(name for group in shapes for name in group)
        trained = {name: (shape, step) for group, step in zip(shapes, steps, strict=True) for name, shape in group.items()}
        frozen = {as_text(name): sizes_of(shape) for name, shape in as_dict(model.get("frozen_param_shapes") or {}).items()}
        buffers = {as_text(name) for name in as_list(model["buffer_names"])}
        shared = as_dict(model.get("shared_params") or {})
        self.aliases: Mapping[str, str] = {as_text(alias): as_text(name) for alias, name in shared.items()}
        found: dict[str, Described] = {}
        narrow = NARROW.get(dtype_of(self.config), torch.float32)
        for name, value in module.items():
            if name in buffers or name in self.aliases:
                continue
            if not isinstance(value, FileTensor):
                raise ValueError(f"its module has a {type(value).__name__} for {shown(as_text(name), 100)}")
            dtype = _type(value.dtype)
            if name in trained:
                found[name] = Described(trained[name][0], dtype, True, trained[name][1])
            else:
                found[name] = Described(frozen.get(name, value.shape), dtype, False)
                if name not in frozen:
                    self._whole(name, value, value.shape)
        for name, (shape, step) in trained.items():  # which the module may lack with stage 3
            found.setdefault(name, Described(shape, narrow, True, step))
        self._of_frozen(frozen, models, model, found)
        self.parameters: Mapping[str, Described] = found
        there = {name: _tensor(module[name]) for name in module if name in buffers}
        places = {name: repr((one.key, one.dtype, one.shape, one.stride, one.offset)) for name, one in there.items()}
        read = plain({place: there[name] for name, place in places.items()})  # what several names have is read once
        self.buffers: Mapping[str, torch.Tensor] = {name: read[place] for name, place in places.items()}
        for name, one in found.items():
            parts, end = self._fragments.get(name, []), 0
            for part in parts:
                if part.begin != end and part.begin < part.end:
                    raise ValueError(f"{shown(name, 100)} lacks elements {end} to {part.begin}")
                end = max(end, part.end)
            if end != math.prod(one.shape) or math.prod(one.shape) > LARGEST:
                raise ValueError(f"{shown(name, 100)} of shape {one.shape} has {end} elements")
        self._refuse_copies(there.values())

    def _refuse_copies(self, buffers: Iterable[FileTensor]) -> None:
        """Raise TorchFileError where small files would write very much: parameters, states and buffers are written one by one,
        wherever they lie."""
        taken = 0
        files: dict[str, int] = {}
        for one in buffers:
            taken += one.count * ELEMENTS[one.dtype]
            files[one.file.path] = one.file.nbytes
        for part in (part for parts in self._fragments.values() for part in parts):
            for flat in part.flats.values():
                size = ELEMENTS[flat.dtype]
                taken += (part.end - part.begin) * size
                if isinstance(flat, FileTensor):
                    files[flat.file.path] = flat.file.nbytes
                else:
                    files[flat.path] = flat.count * size
        if taken > max(MOST_COPIES * sum(files.values()), ALWAYS):
            raise TorchFileError(
                f"{self.where}: its parameters, states and buffers take {format_size(taken)}, which is more than {MOST_COPIES} "
                f"times the {format_size(sum(files.values()))} of its files, because many lie in the same bytes: save it with "
                "memory of its own for each (tensor.clone())"
            )

    def _whole(self, name: str, value: FileTensor, shape: tuple[int, ...]) -> None:
        numel = math.prod(shape)
        if not value.is_contiguous or value.count != numel:
            raise ValueError(f"{shown(name, 100)} is not contiguous, or of another shape")
        self._fragments[name] = [_Fragment(0, numel, 0, {"param": value})]

    def _of_frozen(
        self,
        frozen: Mapping[str, tuple[int, ...]],
        models: Mapping[int, Path],
        model: Mapping[str, Any],
        found: dict[str, Described],
    ) -> None:
        """Note where the parameters are that are not trained: with stage 3 each rank has its share of them."""
        if not frozen:
            return
        if self.stage == 3 and sorted(models) != list(range(self.ranks)):
            raise TorchFileError(f"{self.where} was saved by {self.ranks} ranks, and has the model states of {len(models)}")
        files = [self._value(models[rank]) for rank in sorted(models)] if self.stage == 3 else [model]
        for name, shape in frozen.items():
            numel, begin = math.prod(shape), 0
            parts = self._fragments[name] = []
            for file in files:
                value = _tensor(as_dict(file["frozen_param_fragments"])[name])
                if not value.is_contiguous:
                    raise ValueError(f"{shown(name, 100)} is not contiguous")
                end = min(begin + value.count, numel)
                parts.append(_Fragment(begin, end, 0, {"param": value}))
                begin = end
            found.setdefault(name, Described(shape, _type(parts[0].flats["param"].dtype), False))

    def states_of(self, name: str) -> list[str]:
        """Return the names of the states that there are of a parameter."""
        return sorted({state for part in self._fragments[name] for state in part.flats} - {"param"})

    def has(self, name: str, state: str) -> bool:
        """Return whether there is a state of this name of a parameter."""
        return all(state in part.flats for part in self._fragments[name])

    # -- its values ----------------------------------------------------------------------------------------------------------

    def read(self, name: str, state: str, begin: int, end: int) -> torch.Tensor | None:
        """Return elements ``begin`` to ``end`` of a parameter, row-major: "param", or a state by the name that torch has
        for it. None where it has no such state. Raises TorchFileError."""
        pieces: list[torch.Tensor] = []
        with self._sound():
            for part in self._fragments[name]:
                start, stop = max(begin, part.begin), min(end, part.end)
                if state not in part.flats:
                    if part.begin < part.end or not part.flats:
                        return None
                    continue
                if start < stop:
                    first = part.at + start - part.begin
                    pieces.append(_elements(part.flats[state], first, first + stop - start))
        if not pieces:
            kind = torch.float32 if state != "param" else self.parameters[name].dtype
            return torch.empty(0, dtype=kind, device="cpu")
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _files(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Return the files of all ranks whose names fit, by rank."""
    found: dict[int, Path] = {}
    for name in sorted(os.listdir(folder)):
        match = pattern.fullmatch(name)
        if match is not None:
            rank = int(match[1] or 0)
            if rank in found:
                raise TorchFileError(f"{folder} has two files of rank {rank}: {found[rank].name} and {name}")
            found[rank] = folder / name
    return found


def _some(ranks: Iterable[int]) -> str:
    known = sorted(ranks)
    return ", ".join(map(str, known[:8])) + (" …" if len(known) > 8 else "")


def _swapped(
    folder: Path, ranks: int, order: Sequence[str], groups: Mapping[int, Sequence[str]]
) -> dict[int, str]:
    """Return how the files are named that have these sub-groups, which are empty in the pickles. Raises TorchFileError where
    there are other files, or where the order in which parameters were numbered cannot be told."""
    there = folder / "offloaded_tensors"
    wanted = [f"rank{rank:02}" for rank in range(ranks)]
    if not groups:
        return {}
    found = {name: {path.name.rpartition("-")[2] for path in (there / name).glob("*.tensor.swp")} for name in wanted}
    fitting = []
    for numbers in (_numbers(order), _numbers(_after_children(order))):
        named = {index: f"{numbers[names[0]]}_{numbers[names[-1]]}.tensor.swp" for index, names in groups.items()}
        if all(present == set(named.values()) for present in found.values()) and named not in fitting:
            fitting.append(named)
    if len(fitting) != 1:
        raise TorchFileError(
            f"{there} does not have one file for the parameters of each sub-group and rank, or the parameters were numbered in "
            "an order that is not known: save without nvme"
        )
    return fitting[0]


def _file_of(folder: Path, rank: int, base: str, count: int, flats: Mapping[str, _Flat]) -> dict[str, _Flat]:
    """Return the files of one sub-group of ``count`` elements."""
    made: dict[str, _Flat] = {}
    for state in flats:
        path = folder / "offloaded_tensors" / f"rank{rank:02}" / (base if state == "param" else f"{state}-{base}")
        size = path.stat().st_size if path.is_file() else -1
        if not 4 * count <= size < 4 * count + MOST_PADDING:
            has = "is missing" if size < 0 else f"has {size} bytes, and {4 * count} are expected"
            raise TorchFileError(f"{path} {has}")
        made[state] = _Raw(str(path), count)
    return made


def _numbers(order: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(order)}


def _after_children(order: Sequence[str]) -> list[str]:
    """Return names with those of a module after those of the modules in it, else in their order."""
    tree: dict[str, Any] = {}
    for name in order:
        *path, last = name.split(".")
        here = tree
        for part in path:
            here = here.setdefault(part, {})
        here[f"{last}="] = name

    def walk(here: Mapping[str, Any]) -> Iterator[str]:
        for value in here.values():
            if isinstance(value, dict):
                yield from walk(value)
        for value in here.values():
            if isinstance(value, str):
                yield value

    return list(walk(tree))


def _flats(kept: Any, master: Any) -> tuple[dict[str, _Flat], Any]:
    """Return the flat tensors of a group on one rank by name, and its step."""
    state = as_dict(kept)
    if len(state) > MOST_STATES:
        raise ValueError(f"a group has {len(state):,} states")
    flats: dict[str, _Flat] = {"param": _tensor(master)}
    for name, value in state.items():
        if name != "step" and isinstance(value, FileTensor) and value.shape:
            flats[as_text(name)] = value
    if "exp_avg_sq" in flats and "exp_avg" not in flats:
        flats["sum"] = flats.pop("exp_avg_sq")  # as DeepSpeed's Adagrad calls what torch's calls sum
    for value in flats.values():
        if not value.is_contiguous or value.dtype not in FLOATING:
            raise ValueError("a flat tensor is not contiguous, or not of floating point")
    return flats, state.get("step")


def _step(value: Any) -> int:
    """Return a count of steps, which may be a tensor."""
    if isinstance(value, FileTensor):
        if value.count != 1:
            raise ValueError(f"a step is a tensor of {value.count} elements")
        value = tensor_of(value).item()
    return _count(int(value) if isinstance(value, float) and value.is_integer() else value)


def _settings(groups: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the settings of all param groups. They are read together, because one value may be in many of them."""
    found: list[dict[str, Any]] = plain(
        [{as_text(key): value for key, value in as_dict(group).items() if key != "params"} for group in groups]
    )
    return found


def _shapes(groups: Iterable[Any]) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of trained parameters, by group and name. Raises ValueError for a name that several groups have."""
    found: list[dict[str, tuple[int, ...]]] = []
    known: set[str] = set()
    for group in map(as_dict, groups):
        for name in group:
            if as_text(name) in known:
                raise ValueError(f"several groups have a parameter {name!r:.100}")
        found.append({name: sizes_of(shape) for name, shape in group.items()})
        known.update(group)
    return found


def _elements(flat: _Flat, begin: int, end: int) -> torch.Tensor:
    if end > flat.count:
        raise ValueError(f"a flat tensor has {flat.count} elements, and {end} are asked for")
    data = flat.read(begin, end)
    dtype = _type(flat.dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype, device="cpu")


def tensor_of(stored: FileTensor) -> torch.Tensor:
    """Return a small tensor of a file, whole. Its elements may lie in the same bytes: the caller looks how many there are."""
    data, dtype = stored.read(0, stored.span), _type(stored.dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return flat.as_strided(stored.shape, stored.stride).clone() if stored.count else flat.new_empty(stored.shape)


def plain(value: Any) -> Any:
    """Return a value with tensors, and without stand-ins: of an object its attributes, or its arguments. Raises ValueError for
    what is nested very deep, or very large (16 characters of a text count as a value, and each byte)."""
    left, room = [MOST_VALUES], [-1]

    def made(one: Any, depth: int) -> Any:
        left[0] -= 1 + (len(one) // 16 if isinstance(one, str) else len(one) if isinstance(one, bytes | bytearray) else 0)
        if left[0] < 0 or depth > 90:
            raise ValueError("it is nested deeper than 90 levels, or has a million values")
        if isinstance(one, FileTensor):
            most = max(MOST_COPIES * one.file.nbytes, ALWAYS)
            room[0] = (most if room[0] < 0 else room[0]) - one.count * ELEMENTS[one.dtype]
            if room[0] < 0:
                raise ValueError(
                    f"its tensors take {format_size(most - room[0])}, more than {MOST_COPIES} times the bytes of the file"
                )
            return tensor_of(one)
        if isinstance(one, dict):
            if any(isinstance(key, Instance) for key in one):
                raise ValueError("an object is a key")
            return {made(key, depth + 1): made(item, depth + 1) for key, item in one.items()}
        if isinstance(one, list | tuple):
            return type(one)(made(item, depth + 1) for item in one)
        if isinstance(one, set):
            return sorted((made(item, depth + 1) for item in one), key=repr)
        if isinstance(one, Instance):
            if isinstance(one.state, dict):
                return made(one.state, depth + 1)
            if one.name == "pathlib.PosixPath":
                return "/".join(made(as_text(part), depth + 1) for part in one.arguments).replace("//", "/")
            return made(one.arguments[0], depth + 1) if len(one.arguments) == 1 else made(one.arguments, depth + 1)
        if isinstance(one, Name):
            return one.text
        if isinstance(one, bytes | bytearray):
            return list(one)
        if one is None or isinstance(one, bool | int | float | str):
            return one
        raise ValueError(f"it has a {type(one).__name__}")

    return made(value, 0)


def _type(name: str) -> torch.dtype:
    if name not in ELEMENTS or not hasattr(torch, name):
        raise ValueError(f"this torch has no type {name!r:.40}")
    found: torch.dtype = getattr(torch, name)
    return found


def _tensor(value: Any) -> FileTensor:
    if not isinstance(value, FileTensor):
        raise ValueError(f"a {type(value).__name__} is taken for a tensor")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"{quoted(value, 40)} is no count")
    return value


def _number(value: Any) -> int:
    """Return an integer, or that of an enumeration's value."""
    if isinstance(value, Instance) and len(value.arguments) == 1:
        value = value.arguments[0]
    return _count(value)
