"""Read pretrained weights from safetensors files into units, and export models to such files.

Weights are read while units are made, a piece at a time. An export writes a model that is paged, a unit at a time, or a
checkpoint of a store that is not open, of one process or of all ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import nn

from tiered.errors import MisuseError
from tiered.format.safetensors import SafetensorsEntry, entry_of, first_of
from tiered.format.safetensors_writer import Existing, Shards
from tiered.store.at_rest import StoreAtRest
from tiered.system import refuse_little_room
from tiered.tensors.specs import FLOATS, expect_dtype
from tiered.types import TensorSpec
from tiered.zero.checkpoint.beside import refuse_forgotten
from tiered.zero.checkpoint.checkpoint import persistent_buffers, read_record
from tiered.zero.checkpoint.reshard import CheckpointSource, opened
from tiered.zero.construction.deferred import Deferred, Files
from tiered.zero.paging.pager import Pager, pager_of, placements_of
from tiered.zero.paging.sharding import Sharded
from tiered.zero.paging.units import UnitPlan
from tiered.zero.rank_stores import shared_json
from tiered.zero.record import in_memory, plans, type_named

__all__ = [
    *("NOTHING_CHANGED", "Changes", "Pretrained", "Progress", "Replaced"),
    *("export", "export_at_rest", "export_of_ranks", "export_with"),
    *("models_in", "parameters_of", "pieces_of", "refuse_older"),
]


class Pretrained:
    """Files whose tensors are ``model``'s, by name; a context manager."""

    def __init__(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Open the files and check them. Raises MisuseError for names that are missing or unexpected, other shapes, and buffers
        that nothing gives values; SafetensorsError and OSError for the files."""
        self._path, self._files = path, Files()
        self._tensors = self._files.open(path)
        self._parameters = _aliases(model)
        self._buffers = persistent_buffers(model)
        self._refuse_names(model)
        self._refuse_shapes(model)

    def __enter__(self) -> Pretrained:
        self._files.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.__exit__(*exception)

    def _refuse_names(self, model: nn.Module) -> None:
        there = self._tensors.keys()
        missing = [names[0] for names in self._parameters.values() if not any(name in there for name in names)]
        missing += [name for name in self._buffers if name not in there]
        if missing:
            raise MisuseError(f"{self._path} has no tensor for {first_of(missing)} of this model")
        expected = {name for names in self._parameters.values() for name in names}
        expected |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
        unexpected = [name for name in there if name not in expected]
        if unexpected:
            raise MisuseError(f"{self._path} has {first_of(unexpected)}, which this model does not have")
        blank = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in self._buffers]
        if blank:
            raise MisuseError(
                f"the buffer {first_of(blank)} is on the meta device and is not among a model's weights: build the model under "
                "zero.init, which computes it"
            )

    def _refuse_shapes(self, model: nn.Module) -> None:
        wanted = {self._source(parameter): parameter for parameter in self._parameters}
        buffers = dict(model.named_buffers())
        for name, tensor in [*wanted.items(), *((name, buffers[name]) for name in self._buffers)]:
            shape = tuple(self._tensors[name].shape)
            if shape != tuple(tensor.shape):
                raise MisuseError(f"{name!r} has shape {shape} in {self._path}, and {tuple(tensor.shape)} in this model")

    def _source(self, parameter: nn.Parameter) -> str:
        """Return by which of its names a parameter is in the files."""
        return next(name for name in self._parameters[parameter] if name in self._tensors)

    def values(self, meta: Mapping[nn.Parameter, nn.Parameter]) -> dict[nn.Parameter, Deferred]:
        """Return the values of each parameter, in the type that it has. ``meta`` has the old one of each parameter that was
        replaced since this was made."""
        fresh = {old: new for new, old in meta.items()}
        return {fresh.get(one, one): self._tensors[self._source(one)].cast(one.dtype) for one in self._parameters}

    def fill_buffers(self, model: nn.Module) -> None:
        """Read all buffers that ``state_dict`` has."""
        modules = dict(model.named_modules())
        for name in self._buffers:
            where, _, last = name.rpartition(".")
            buffer = modules[where]._buffers[last]
            assert buffer is not None
            if buffer.is_meta:
                buffer = modules[where]._buffers[last] = torch.empty_like(buffer, device="cpu")
            self._tensors[name].cast(buffer.dtype).write_to(buffer)


def _aliases(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return each parameter's names; the first is the one that paging gives it."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


Values = Literal["param", "average"]

CONVERTED_AT_ONCE = 4 << 20
"""Bytes of a parameter that are converted at a time."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are written so far, and in all; it may raise, to stop."""

WRITTEN_AS = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, None)
"""Types of ``dtype=``; None: each tensor stays as it is."""


def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    shard: int | str = "5GB",
    dtype: torch.dtype | None = None,
    existing: Existing = "refuse",
    progress: Progress | None = None,
) -> list[str]:
    """Write what ``model.state_dict()`` has to ``folder`` as safetensors files of at most ``shard``, with their index.

    ``transformers`` and ``safetensors`` load them: ``model.config.save_pretrained(folder)`` writes the rest of what the former
    wants. Updates that are pending are applied first. One unit is in memory at a time, however large the model is. A parameter
    of several names (a tied weight) is written once, under the first: ``safetensors.torch.load_model`` takes that, and
    ``load_state_dict`` with ``strict=False``. ``dtype``: of all floating point tensors, a floating point type itself (default:
    as they are).
    ``existing="overwrite"`` replaces an earlier export; files of anybody else are never touched. Nothing has its name before
    all is on the disk, and an error leaves nothing behind. All ranks call it, and rank 0 writes. Returns the names of the
    files.

    Raises MisuseError (not paged, within forward or backward, files that are there, a ``state_dict`` with more than parameters
    and buffers), CapacityError (no room), and what the store raises.
    """
    return export_with(model, folder, NOTHING_CHANGED, shard=shard, dtype=dtype, existing=existing, progress=progress)


class Replaced(NamedTuple):
    """A module that is exported as another one: ``described`` has the shapes and types of its tensors by their names within it,
    and ``made`` returns these, in memory."""

    described: Mapping[str, torch.Tensor]
    made: Callable[[], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Changes:
    """What an export has otherwise than the model: some ``modules``, by their names; names without a ``prefix``, and nothing
    whose name does not begin with it."""

    modules: Mapping[str, Replaced]
    prefix: str = ""

    def of(self, name: str) -> str | None:
        """Return the name that a tensor is exported by; None for one that is not exported, or in whose place another one is."""
        parts = name.split(".")
        if not name.startswith(self.prefix) or any(".".join(parts[:count]) in self.modules for count in range(1, len(parts))):
            return None
        return name.removeprefix(self.prefix)

    def entries(self, dtype: torch.dtype | None) -> Iterator[SafetensorsEntry]:
        """Yield the tensors of ``modules``, in order."""
        for module, change in self.modules.items():
            for name, like in change.described.items():
                yield _entry(f"{module.removeprefix(self.prefix)}.{name}", like.shape, _goal(like.dtype, dtype))

    def contents(self, dtype: torch.dtype | None) -> Iterator[memoryview]:
        for module, change in self.modules.items():
            if not change.described:  # all of it is another module's, too
                continue
            made = change.made()
            for name, like in change.described.items():
                value = made[name]
                assert (value.shape, value.dtype) == (like.shape, like.dtype), f"{module}.{name}"
                yield from pieces_of(value, _goal(like.dtype, dtype))
                del value
            del made  # one module is in memory at a time


NOTHING_CHANGED = Changes({})


def export_with(
    model: nn.Module,
    folder: str | os.PathLike[str],
    changes: Changes,
    *,
    beside: Mapping[str, bytes] | None = None,
    shard: int | str = "5GB",
    dtype: torch.dtype | None = None,
    existing: Existing = "refuse",
    progress: Progress | None = None,
) -> list[str]:
    """Write a model with ``changes``, and files ``beside`` it by name, as ``export`` does, and raises."""
    expect_dtype("dtype", dtype, WRITTEN_AS)
    pager = pager_of(model)
    for unit in pager.units:
        if unit.held:
            raise MisuseError(f"the parameters of {unit.plan.shown} are in use: export outside forward and backward")
        unit.gradients.close()
    refuse_forgotten(pager, "an export")
    refuse_little_room(pager.store, "an export")
    parameters, buffers = _listed(pager, changes)
    units = [unit for unit in pager.units if unit.plan.placements[0].sliced is None]
    order = [p for unit in units for p in unit.plan.placements if p.parameter in parameters]
    whole = [sliced for sliced in pager.sliced.values() if sliced.parameter in parameters]
    entries = [_entry(parameters[p.parameter], p.shape, _goal(p.dtype, dtype)) for p in order]
    entries += [_entry(parameters[p.parameter], p.shape, _goal(p.dtype, dtype)) for p in whole]
    entries += [_entry(name, buffer.shape, _goal(buffer.dtype, dtype)) for name, buffer in buffers.items()]
    entries += changes.entries(dtype)
    contents = chain(_of_paged(pager, set(parameters), buffers.values(), dtype), changes.contents(dtype))
    shards: Shards | None = None
    try:
        if pager.partition.rank == 0:  # the folder of this name on another node is not looked at
            shards = _shards(folder, entries, shard, existing, beside)
    finally:  # where it cannot begin, it keeps the others from it
        files = _of_first(pager, None if shards is None else shards.files)
    if files is None:
        raise MisuseError("rank 0 cannot export, and says why")
    error: Exception | None = None
    if shards is not None:
        unread: list[Exception] = []
        try:
            shards.write(_passed_on(contents, unread), progress)
        except Exception as problem:
            if unread or pager.partition.shares == 1:  # what is not gathered here, the others wait for in vain
                raise
            error = problem
    for _ in contents:  # what one rank gathers, all take part in
        pass
    ended = pager.partition.all_true([error is None], "the end of an export")
    if error is not None:
        raise error
    if not all(ended):
        raise MisuseError("rank 0 could not export, and says why")
    return files


def _shards(
    folder: str | os.PathLike[str],
    entries: Sequence[SafetensorsEntry],
    shard: int | str,
    existing: Existing,
    beside: Mapping[str, bytes] | None = None,
) -> Shards:
    """Return the files of an export. Raises MisuseError where ``folder`` has the name of a file."""
    if os.fspath(folder).endswith(".safetensors") and not os.path.isdir(os.path.expanduser(folder)):
        raise MisuseError(f"{folder} is the name of a file, and an export is a folder of files with an index: name a folder")
    return Shards(folder, entries, shard, existing, beside)


def _of_first(pager: Pager, files: list[str] | None) -> list[str] | None:
    """Return rank 0's ``files``."""
    if not isinstance(pager.partition, Sharded):
        return files
    found: list[str] | None = shared_json(pager.partition.ranks, files, list[str] | None)[0]
    return found


def _passed_on(contents: Iterator[memoryview], unread: list[Exception]) -> Iterator[memoryview]:
    """Yield ``contents``, which stays open when this generator is closed. ``unread`` gets what it raises."""
    try:
        for piece in contents:
            yield piece
            del piece  # it may be memory of a store
    except Exception as problem:
        unread.append(problem)
        raise


def _listed(pager: Pager, changes: Changes) -> tuple[dict[nn.Parameter, str], dict[str, torch.Tensor]]:
    """Return what ``state_dict`` has and ``changes`` leave: the first name of each paged parameter, and by name, each once,
    buffers and parameters that are in memory."""
    parameters: dict[nn.Parameter, str] = {}
    buffers: dict[int, tuple[str, torch.Tensor]] = {}
    paged = {*(placement.parameter for placement in pager.placements), *pager.sliced}
    known = {id(one) for one in (*pager.model.buffers(), *pager.model.parameters())}
    for mine, value in pager.listed().items():
        if (name := changes.of(mine)) is None:
            continue
        if isinstance(value, nn.Parameter) and value in paged:
            parameters.setdefault(value, name)
        elif isinstance(value, torch.Tensor) and id(value) in known:
            buffers.setdefault(id(value), (name, value.detach()))
        else:
            raise MisuseError(
                f"{name!r} of the model's state_dict is neither a parameter nor a buffer, and safetensors files hold nothing "
                "else: leave out what adds it (get_extra_state, a hook)"
            )
    return parameters, dict(buffers.values())


def _of_paged(
    pager: Pager, wanted: set[nn.Parameter], buffers: Iterable[torch.Tensor], dtype: torch.dtype | None
) -> Iterator[memoryview]:
    units = [
        (unit, unit.plan.placements)
        for unit in pager.units
        if unit.plan.placements[0].sliced is None and any(placement.parameter in wanted for placement in unit.plan.placements)
    ]
    for sliced in pager.sliced.values():
        if sliced.parameter in wanted:
            units += [(unit, [placement]) for _, unit, placement in placements_of(sliced.parameter)]
    for unit, placements in units:
        pager.take(unit)
        try:
            assert unit.base is not None
            for placement in placements:
                if placement.sliced is not None or placement.parameter in wanted:
                    yield from pieces_of(placement.view(unit.base), _goal(placement.dtype, dtype))
        finally:
            unit.drop()
    for buffer in buffers:
        yield from pieces_of(buffer, _goal(buffer.dtype, dtype))


# At rest


def models_in(keys: Iterable[str]) -> list[str]:
    """Return the names of the models that have a checkpoint among these keys."""
    return sorted(key.removesuffix("/checkpoint") for key in keys if key.endswith("/checkpoint"))


def parameters_of(store: StoreAtRest, name: str) -> tuple[int, int | None]:
    """Return how many numbers the parameters of model ``name`` have together, and how many steps its optimizer has made of the
    parameter that has most (None: it has no optimizer). Raises as ``export_at_rest``."""
    record = read_record(store, name)
    numbers = sum(placement.numel for unit in plans(record)[0] for placement in unit.placements)
    optimizer = record["optimizer"]
    return numbers, None if optimizer is None else max(optimizer["steps"].values(), default=0)


def export_at_rest(
    store: StoreAtRest,
    folder: str | os.PathLike[str],
    *,
    model: str | None = None,
    shard: int | str = "5GB",
    dtype: torch.dtype | None = None,
    existing: Existing = "refuse",
    progress: Progress | None = None,
    values: Values = "param",
    beside: Mapping[str, bytes] | None = None,
) -> list[str]:
    """Export, without the model, the checkpoint of the one that is named ``model``, or of the only one in ``store``, and files
    ``beside`` it, by name.

    A store without a model gives its tensors, under their keys. Updates that are pending are applied to copies: of one unit and
    its gradient, and a chunk of its states at a time. ``values``: of parameters, or of their average. Raises MisuseError (no or
    several such models, no checkpoint, one that is older than its parameters, no average), and what ``export`` and ``store``
    raise.
    """
    expect_dtype("dtype", dtype, WRITTEN_AS)
    name = _chosen(store, model)
    if name is None and values == "average":
        raise MisuseError(f"{store} has no model, and so no average of its weights")
    if name is None:
        keys = list(store)
        entries = [_entry(key, store.spec(key).shape, _goal(type_named(store.spec(key).dtype), dtype)) for key in keys]
        contents = _of_tensors(store, keys, dtype)
    else:
        record = read_record(store, name)
        stage = record["layout"].get("share", {}).get("stage")
        parts = values == "average" or any(found["pending"] for found in record["units"])
        if stage == "Stage3" or (stage is not None and parts):
            raise MisuseError(f"{store} has one rank's share of {name!r}: name the folder above the stores of all ranks")
        refuse_older(store, name, plans(record)[0])
        source = CheckpointSource([store], name, states=False, average=values == "average")
        entries, contents = _of_checkpoint(source, dtype, values)
    shards = _shards(folder, entries, shard, existing, beside)
    shards.write(contents, progress)
    return shards.files


def export_of_ranks(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    model: str | None = None,
    shard: int | str = "5GB",
    dtype: torch.dtype | None = None,
    existing: Existing = "refuse",
    progress: Progress | None = None,
    values: Values = "param",
) -> list[str]:
    """Export, by one process, the last commit of all ranks whose stores are below ``path`` (``zero.open_store``). In memory are
    the shares of two ranks of a unit, and one parameter. Raises as ``export_at_rest`` and ``reshard.opened``."""
    expect_dtype("dtype", dtype, WRITTEN_AS)
    with contextlib.ExitStack() as stack:
        stores = opened(path, stack)
        name = _chosen(stores[0], model)
        assert name is not None, "a commit of ranks has a checkpoint"
        source = CheckpointSource(stores, name, states=False, average=values == "average")
        entries, contents = _of_checkpoint(source, dtype, values)
        shards = _shards(folder, entries, shard, existing)
        shards.write(contents, progress)
        return shards.files


def _chosen(store: StoreAtRest, model: str | None) -> str | None:
    """Return the name of the model whose checkpoint is wanted; None: there is no model."""
    there = models_in(store)
    if model is not None:
        if model not in there:
            raise MisuseError(f"{store} has no checkpoint of a model named {model!r}; it has: {first_of(there) or 'none'}")
        return model
    if len(there) > 1:
        raise MisuseError(f"{store} has several models: name one of {first_of(there)}")
    if there:
        return there[0]
    for key in store:
        if re.search("/param/", key) and store.spec(key).dtype == "uint8":
            raise MisuseError(
                f"{store} has parameters of the model {key.split('/param/')[0]!r} and no checkpoint that says where each of "
                "them is: commit with zero.commit, or name an earlier generation (a commit of the store alone has none)"
            )
    return None


def refuse_older(store: StoreAtRest, name: str, units: Sequence[UnitPlan]) -> None:
    """Raise MisuseError for a checkpoint that is older than the parameters, because it says which updates of these are pending.
    """
    saved = store.written(f"{name}/checkpoint")
    if any(store.written(f"{name}/param/{unit.name}") > saved for unit in units):
        raise MisuseError(
            f"{store} was committed after the last zero.commit of {name!r} (generation {saved}), by store.commit() or the end "
            f"of a with block: export generation {saved}, or open the store and call zero.commit"
        )


def _of_tensors(store: StoreAtRest, keys: Sequence[str], dtype: torch.dtype | None) -> Iterator[memoryview]:
    for key in keys:
        spec = store.spec(key)
        stored = type_named(spec.dtype)
        for piece in store.read(key, 0, spec.nbytes):
            yield from pieces_of(piece.view(stored), _goal(stored, dtype))


def _of_checkpoint(
    source: CheckpointSource, dtype: torch.dtype | None, values: Values
) -> tuple[list[SafetensorsEntry], Iterator[memoryview]]:
    """Return the parameters and buffers of a checkpoint, or the average of both, and their bytes."""
    buffers = in_memory(source.records[0])
    if values == "average":
        averages = source.records[0].get("average")
        if averages is None:
            raise MisuseError(f"the checkpoint of {source.name!r} has no average of its weights, which zero.EMA makes")
        buffers = {name: averages["buffers"].get(name, buffer) for name, buffer in buffers.items()}
    described = {name: source.described(name) for name in source.order}
    entries = [_entry(name, shape, _goal(held, dtype)) for name, (shape, held, _) in described.items()]
    entries += [_entry(name, buffer.shape, _goal(buffer.dtype, dtype)) for name, buffer in buffers.items()]

    def contents() -> Iterator[memoryview]:
        for name, (shape, held, _) in described.items():
            averaged = source.whole(name, "average") if values == "average" else None  # nothing that is quantised has one
            if averaged is not None:
                pieces = iter((averaged,))
            elif torch.empty_strided(shape, source.stride(name), dtype=held, device="meta").is_contiguous():
                pieces = source.stream(name)
            else:
                whole = source.whole(name, "param")
                assert whole is not None, "each parameter has values"
                pieces = iter((whole,))
            for piece in pieces:
                yield from pieces_of(piece.to(held), _goal(held, dtype))
        for buffer in buffers.values():
            yield from pieces_of(buffer, _goal(buffer.dtype, dtype))

    return entries, contents()


# Bytes


def _goal(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def _entry(name: str, shape: Iterable[int], dtype: torch.dtype) -> SafetensorsEntry:
    return entry_of(name, TensorSpec(str(dtype).removeprefix("torch."), tuple(shape), dtype.itemsize))


@torch.no_grad()
def pieces_of(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield the bytes of ``tensor`` as ``dtype``, row-major, about CONVERTED_AT_ONCE of them at a time."""
    if not tensor.numel():
        return
    rows = tensor.detach().resolve_conj().resolve_neg()
    if rows.is_contiguous():
        rows = rows.as_strided((rows.numel(),), (1,))
    step = max(1, CONVERTED_AT_ONCE * rows.shape[0] // (rows.numel() * rows.element_size()))
    for start in range(0, rows.shape[0], step):
        yield rows[start : start + step].to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data
