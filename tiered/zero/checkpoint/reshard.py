"""Read a checkpoint of any number of ranks by the elements of parameters, so that another number of ranks goes on with it, with
another stage, or one process exports it.

Pending updates are applied to copies, because the chunks of the ranks that committed are not those of the ranks that will be:
``CopiedLeases`` is a store of copies over one that is only read.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from tiered.errors import ManifestError, MisuseError
from tiered.store import TieredStore
from tiered.store.at_rest import StoreAtRest
from tiered.types import Access, TensorSpec
from tiered.zero.checkpoint.checkpoint import Readable, layout_of, pending_of, read_record, write_record
from tiered.zero.optimizers.average import average_nbytes, runs_of, take_all
from tiered.zero.paging.sharding import Partition
from tiered.zero.paging.storage import in_top_tier, model_named
from tiered.zero.paging.units import Limits, ModelPlan, Placement, UnitPlan, even_chunks
from tiered.zero.paging.update import States
from tiered.zero.rank_stores import has_commit, newest_set, sets_in
from tiered.zero.record import plans, refuse_other_tensors, states_shown, states_used, type_named
from tiered.zero.rules.forms import StateForm
from tiered.zero.rules.rule import SMALLEST_BLOCK

__all__ = ["CheckpointSource", "CopiedLeases", "Elements", "opened", "reshard", "span_of"]


class CopiedLeases:
    """``TensorStore`` over ``store`` whose leases give copies. ``kept``: copies stay as their holders leave them, for the next
    lease; otherwise they are gone with the lease."""

    def __init__(self, store: Readable, *, kept: bool) -> None:
        self._store: Any = store
        self._kept = kept
        self._made: dict[str, torch.Tensor] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._made or key in self._store

    def specs(self, keys: list[str]) -> list[TensorSpec | None]:
        found: list[TensorSpec | None] = []
        for key in keys:
            made = self._made.get(key)
            if made is not None:
                found.append(TensorSpec(str(made.dtype).removeprefix("torch."), tuple(made.shape), made.element_size()))
            else:
                found.append(self._store.spec(key) if key in self._store else None)
        return found

    def get(self, key: str) -> torch.Tensor:
        if key not in self._made:
            found: torch.Tensor = self._store.get(key)
            if not self._kept:
                return found
            self._made[key] = found
        return self._made[key]

    def create(self, key: str, spec: TensorSpec) -> None:
        self._made[key] = torch.empty(spec.shape, dtype=type_named(spec.dtype), device="cpu")

    def put(self, key: str, tensor: torch.Tensor) -> None:
        self._made[key] = tensor

    def delete(self, key: str) -> None:
        raise AssertionError("nobody deletes what is only read")

    @contextlib.contextmanager
    def lease(self, key: Any, *, access: Access = Access.READ) -> Iterator[Any]:
        if isinstance(key, str):
            yield self.get(key)
            return
        yield tuple(self.get(one) for one in key)
        for one in key if not self._kept else ():
            self._made.pop(one, None)

    def span(self, kind: str, name: str) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


CACHED = 2
"""Shares of units that are in memory at a time: what follows one another in a new share."""
Share = dict[str, dict[str, torch.Tensor]]
"""Of the share of a unit that one rank had, by parameter and kind, the values, flat."""


class CheckpointSource:
    """Checkpoint of model ``name``, in the stores of all ranks that committed it, in order.

    Its elements are read by the names of parameters, and in the order of their memory, which ``stride`` tells.
    """

    def __init__(self, stores: Sequence[StoreAtRest], name: str, *, states: bool = True, average: bool | None = None) -> None:
        """Read the records. ``states``: whether optimizer states are asked for, too, and the checkpoint to be divided anew;
        without them one store is enough where it has whole parameters. ``average``: whether the average of the weights is asked
        for (None: where states are). Raises MisuseError where the stores are not those of one commit, and as ``read_record``.
        """
        self._stores, self.name, self._states = stores, name, states
        self._average = states if average is None else average
        self.records = [read_record(store, name) for store in stores]
        self.ranks = len(stores)
        self.units, self.limits = plans(self.records[0])
        if states and any(unit.packed for unit in self.units):
            raise MisuseError(
                f"{name!r} in {stores[0]} is quantised, which only the store that it is in and safetensors have a place for: "
                "import the model into the other store, too, or export safetensors, with the values that it computes with"
            )
        of_all = [self.records[0]["layout"].get(part) for part in ("units", "limit", "chunk", "step")]
        shares = [record["layout"].get("share", {"rank": 0, "ranks": 1, "stage": "Alone"}) for record in self.records]
        for rank, share in enumerate(shares):
            if (share["rank"], share["ranks"]) != (rank, self.ranks) and (states or self.ranks > 1):
                raise MisuseError(
                    f"{stores[rank]} has the share of rank {share['rank']} of {share['ranks']}, and is taken for that of rank "
                    f"{rank} of {self.ranks}"
                )
            layout = self.records[rank]["layout"]
            if share["stage"] != shares[0]["stage"] or [
                layout.get(part) for part in ("units", "limit", "chunk", "step")
            ] != of_all:
                raise MisuseError(f"{stores[rank]} has a share of another model {name!r}, or another stage, than {stores[0]}")
            refuse_other_tensors(stores[rank], name, self.records[rank], self.units, self.limits)
            if _graded(self.records[rank]) != _graded(self.records[0]):
                raise ManifestError(f"{stores[rank]} and {stores[0]} have gradients of different parameters: one is damaged")
        self._whole = shares[0]["stage"] != "Stage3"
        self._home = {p.name: index for index, unit in enumerate(self.units) for p in unit.placements}
        named = {p.name: p for unit in self.units for p in unit.placements}
        sliced: Mapping[str, tuple[int, int]] = self.records[0]["layout"].get("sliced", {})
        self._slices = {name: [named[f"{name}[{i}]"] for i in range(count)] for name, (count, _) in sliced.items()}
        self._stacked = {name for name, (_, rows) in sliced.items() if not rows}
        self._cache: OrderedDict[tuple[int, int], Share] = OrderedDict()

    def named(self, name: str) -> Placement:
        """Return the placement of a parameter. Raises MisuseError for one that was not committed."""
        if name not in self._home:
            raise MisuseError(f"this model is not what was committed as {self.name!r}: that has no {name!r}")
        return next(p for p in self.units[self._home[name]].placements if p.name == name)

    @property
    def order(self) -> list[str]:
        """The names of all parameters, in the order of units; those that were sliced as one, at the end."""
        slices = {part.name for parts in self._slices.values() for part in parts}
        return [name for name in self._home if name not in slices] + list(self._slices)

    @property
    def names(self) -> set[str]:
        return set(self.order)

    def stride(self, name: str) -> tuple[int, ...]:
        """Return the strides that a parameter had. Raises as ``named``."""
        if name in self._stacked:
            first = self._slices[name][0]
            return first.numel, *first.stride
        return _row_major_of(self._shape(name)) if name in self._slices else self.named(name).stride

    def described(self, name: str) -> tuple[torch.Size, torch.dtype, torch.dtype]:
        """Return the shape of a parameter, the type that the model has it in, and that of the store."""
        one = self._slices[name][0] if name in self._slices else self.named(name)
        return self._shape(name), one.dtype, one.stored

    def first_part(self, name: str) -> str:
        """Return the name of the first placement of a parameter: itself, or its first slice."""
        return self._slices[name][0].name if name in self._slices else name

    def _shape(self, name: str) -> torch.Size:
        if name not in self._slices:
            return self.named(name).shape
        parts = self._slices[name]
        if name in self._stacked:
            return torch.Size((len(parts), *parts[0].shape))
        return torch.Size((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))

    def refuse_other(self, placement: Placement) -> None:
        """Raise MisuseError where what ``placement`` is, or is a slice of, is not what was committed under its name."""
        whole = placement if placement.sliced is None else placement.sliced
        one = self._slices[whole.name][0] if whole.name in self._slices else self.named(whole.name)
        shape = self._shape(whole.name)
        if (shape, one.stored, one.dtype) != (whole.shape, whole.stored, whole.dtype):
            raise MisuseError(
                f"this model is not what was committed as {self.name!r}: {whole.name!r} was {tuple(shape)} of {one.stored}, "
                f"and is {tuple(whole.shape)} of {whole.stored}"
            )

    def parts(self, name: str, begin: int, end: int) -> list[tuple[str, int, int]]:
        """Return in which slices elements ``begin`` to ``end`` of a parameter are, and which elements of each, in memory order.
        """
        if name not in self._slices:
            return [(name, begin, end)]
        found, before = [], 0
        for part in self._slices[name]:
            start, stop = max(begin - before, 0), min(end - before, part.numel)
            if start < stop:
                found.append((part.name, start, stop))
            before += part.numel
        return found

    def gradient(self, name: str, begin: int, end: int) -> Mapping[str, Any] | None:
        """Return what the record says of the gradient of these elements: of parts of them, where one has a gradient, of that
        one. None where they cannot have one."""
        found: list[Mapping[str, Any]] = []
        for part, _, _ in self.parts(name, begin, end):
            gradients: Mapping[str, Any] = self.records[0]["units"][self._home[part]]["gradients"]
            found += [gradients[part]] if part in gradients else []
        there = [one for one in found if one["there"]]
        return there[0] if there else found[0] if found else None

    def read(self, name: str, kind: str, begin: int, end: int) -> torch.Tensor | None:
        """Return ``values`` of elements ``begin`` to ``end`` of a parameter, whether it was sliced or not. A gradient is zero
        where a part has none."""
        pieces = self.parts(name, begin, end)
        found = [self.values(part, kind, start, stop) for part, start, stop in pieces]
        present = [one for one in found if one is not None]
        if not present:
            return None
        if len(present) < len(found) and kind != "grad":
            raise ManifestError(f"{name!r} has {kind!r} in a part of it only: the checkpoint is damaged")
        zeros = [torch.zeros(stop - start, dtype=present[0].dtype, device="cpu") for _, start, stop in pieces]
        return torch.cat([zero if one is None else one for one, zero in zip(found, zeros, strict=True)])

    def whole(self, name: str, kind: str) -> torch.Tensor | None:
        """Return all of a parameter in its shape: of itself as the model has it ("param"), of its fp32 "master", or of a
        state with a value for each element. None where there is none. Raises MisuseError for a state of blocks."""
        shape, dtype, _ = self.described(name)
        found: list[torch.Tensor] = []
        for part, begin, end in self.parts(name, 0, shape.numel()):
            form = states_used(self.records[0]["units"][self._home[part]]).get(part, {}).get(kind)
            if form is not None and not form.elementwise:
                raise MisuseError(f"{part!r} keeps {kind!r} in codes of blocks, which only this project reads")
            values = self.values(part, kind, begin, end)
            if values is None and begin < end:
                return None
            found += [] if values is None else [values.to(dtype) if kind == "param" else values]
        found = found or [torch.empty(0, dtype=dtype if kind == "param" else torch.float32, device="cpu")]
        return (found[0] if len(found) == 1 else torch.cat(found)).as_strided(shape, self.stride(name))

    def stream(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the elements of a parameter, as they are stored, a piece at a time where no update of them is pending."""
        for part, begin, end in self.parts(name, 0, self.described(name)[0].numel()):
            yield from self._stream(part, begin, end)

    def _stream(self, name: str, begin: int, end: int) -> Iterator[torch.Tensor]:
        index, placement = self._home[name], self.named(name)
        unit, size = self.units[index], placement.stored.itemsize
        key = f"{self.name}/param/{unit.name}"
        if self._pending(index):
            values = self.values(name, "param", begin, end)
            yield from () if values is None else (values,)
        elif placement.packing is not None:
            first = placement.stored_offset
            packed = torch.cat(list(self._stores[0].read(key, first, first + placement.stored_nbytes)))
            unpacked = torch.empty(placement.numel, dtype=placement.dtype, device="cpu")
            placement.packing.unpack(packed, unpacked)
            yield unpacked[begin:end]
        else:
            shares = [(0, placement, 0)]
            if not self._whole:
                there = ((rank, unit.parts(rank).get(placement)) for rank in range(self.ranks))
                shares = [(rank, part, getattr(part, "begin", 0)) for rank, part in there if part is not None]
            for rank, part, before in shares:
                start, stop = max(begin - before, 0), min(end - before, part.numel)
                if start < stop:
                    first = part.stored_offset
                    for piece in self._stores[rank].read(key, first + start * size, first + stop * size):
                        yield piece.view(placement.stored)

    def _pending(self, index: int) -> bool:
        return any(record["units"][index]["pending"] is not None for record in self.records)

    def values(self, name: str, kind: str, begin: int, end: int) -> torch.Tensor | None:
        """Return elements ``begin`` to ``end`` of a parameter in memory order: of itself ("param", as it was stored), "m", "v",
        "master" or "grad". None where there are none of that kind. Raises MisuseError for a state of blocks that are cut."""
        index, pieces = self._home[name], list[torch.Tensor]()
        if kind == "param" and not self._states and not self._pending(index):
            pieces = list(self._stream(name, begin, end))
            return torch.cat(pieces) if pieces else None
        form = states_used(self.records[0]["units"][index]).get(name, {}).get(kind, StateForm(torch.float32))
        for rank in range(self.ranks):
            share = self._parts(index, rank).get(name)
            if share is None:
                continue
            first, last = share[0], share[1]
            start, stop = max(begin, first), min(end, last)
            if start < stop:
                found = self._share(index, rank)[name].get(kind)
                if found is None:
                    return None
                if form.of_whole:
                    return found
                block = form.block or SMALLEST_BLOCK
                cut = block > SMALLEST_BLOCK and (start % block or (stop % block and stop < self.named(name).numel))
                if cut:
                    raise MisuseError(
                        f"{name!r} of {self.name!r} has a state for each block of {form.block} elements, and would be cut "
                        "within a block: page the model as it was paged when it was committed, with the same dram= and no "
                        "other ranks"
                    )
                pieces.append(found[form.span(start - first, stop - first, self.named(name).shape)])
        return torch.cat(pieces) if pieces else None

    def _parts(self, index: int, rank: int) -> dict[str, tuple[int, int]]:
        """Return which elements of each parameter of a unit a rank had."""
        parts = self.units[index].parts(rank)
        begins = {p.name: getattr(part, "begin", 0) for p, part in parts.items()}
        return {p.name: (begins[p.name], begins[p.name] + part.numel) for p, part in parts.items()}

    def _share(self, index: int, rank: int) -> Share:
        if (index, rank) not in self._cache:
            while len(self._cache) >= (CACHED if self._states or self.ranks > 1 else 1):
                self._cache.popitem(last=False)
            self._cache[index, rank] = self._read(index, rank)
        return self._cache[index, rank]

    def _read(self, index: int, rank: int) -> Share:
        unit, store, record = self.units[index], self._stores[rank], self.records[rank]["units"][index]
        key = f"{self.name}/param/{unit.name}"
        parts = {p.name: part for p, part in unit.parts(rank).items()}
        kinds = {placement.stored for placement in unit.placements}
        chunk = even_chunks(unit.elements, self.limits.chunk)
        states = States(CopiedLeases(store, kept=self._states), key, list(parts.values()), chunk, kinds, states_used(record))
        states.stale_masters = {parts[name] for name in record["stale_masters"] if name in parts}
        memory = store.get(key)
        if self._whole and unit.shares > 1:
            size = memory.numel() // unit.shares
            memory = memory[rank * size : (rank + 1) * size].clone()
        gradient = store.get(f"{key}/grad") if f"{key}/grad" in store else None
        if record["pending"] is not None:
            states.apply(pending_of(record["pending"], parts), memory, gradient)
        averaged = self._averaged(index, rank, list(parts.values()), memory)
        share: Share = {}
        for name, part in parts.items():
            param = part.stored_flat(memory, 0, part.numel)
            values = {"param": param}
            if averaged is not None:
                values["average"] = part.flat(averaged, 0, part.numel)
            if self._states and states.known(part):
                values |= {kind: copy.reshape(-1) for kind, copy in states.flat_copies(part, param).items()}
            if gradient is not None and record["gradients"].get(name, {}).get("there"):
                values["grad"] = part.flat(gradient, 0, part.numel)
            share[name] = values
        return share


    def _averaged(self, index: int, rank: int, parts: Sequence[Placement], memory: torch.Tensor) -> torch.Tensor | None:
        """Return the average of a rank's share of a unit, after what is due; ``memory``: the share, after what was pending.
        None where there is none, or nobody asks."""
        unit, record = self.units[index], self.records[rank]
        if not self._average or "average" not in record or unit.packed:
            return None
        made, key = record["units"][index].get("averaged", 0), f"{self.name}/param/{unit.name}/average"
        found = self._stores[rank].get(key) if made else torch.empty(average_nbytes(unit), dtype=torch.uint8, device="cpu")
        take_all(parts, found, memory, runs_of(record["average"]), made)
        return found


class Elements(Protocol):
    """What ``reshard`` reads, as ``CheckpointSource``: the elements of the parameters of a checkpoint, whoever wrote it.

    Elements are those of a whole parameter, in the order of memory of the model that is to have them.
    """

    name: str
    ranks: int
    records: list[dict[str, Any]]

    @property
    def names(self) -> set[str]: ...

    def refuse_other(self, placement: Placement) -> None: ...

    def parts(self, name: str, begin: int, end: int) -> list[tuple[str, int, int]]: ...

    def gradient(self, name: str, begin: int, end: int) -> Mapping[str, Any] | None: ...

    def read(self, name: str, kind: str, begin: int, end: int) -> torch.Tensor | None: ...


def span_of(placement: Placement) -> tuple[str, int, int]:
    """Return which parameter this is all of, a slice of, or a rank's part of, and from which of its elements to which."""
    whole, first = placement.of, getattr(placement, "begin", 0)
    if whole.sliced is not None:
        first += whole.sliced.element(whole.number)
    return whole.name if whole.sliced is None else whole.sliced.name, first, first + placement.numel


def _graded(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters that have a gradient."""
    return sorted(name for unit in record["units"] for name, said in unit["gradients"].items() if said["there"])


def opened(path: str | os.PathLike[str], stack: ExitStack, generation: int | None = None) -> list[StoreAtRest]:
    """Open the stores of the last training below ``path`` for reading: of all of its ranks as of the last commit that all of
    them have, or the one store that ``path`` is, where none of its ranks committed together, or ``generation`` is given.

    Raises MisuseError where there is none, ManifestError where ranks have no commit in common.
    """
    newest = newest_set(path) if generation is None else None
    if newest is not None:
        both = zip(newest.folders, newest.joints, strict=True)
        return [stack.enter_context(StoreAtRest(folder, generation=joint.generation)) for folder, joint in both]
    if generation is None and sets_in(path) and not has_commit(Path(os.path.expanduser(path))):
        raise ManifestError(f"the ranks' stores in {Path(path)} have no commit in common")
    return [stack.enter_context(StoreAtRest(path, generation=generation))]


def reshard(source: Elements, store: TieredStore, plan: ModelPlan, partition: Partition) -> None:
    """Write this rank's share under ``plan`` of ``source`` to ``store``, with a checkpoint: as if as many ranks with that stage
    had committed it.

    Raises MisuseError where the model is another than was committed, and what reading ``source`` raises; then nothing of it
    stays in ``store``.
    """
    name = source.name
    owner = model_named(name)
    there = set(store.owned(owner))
    known = {span_of(placement)[0] for unit in plan.units for placement in unit.placements}
    lost = sorted(source.names - known)
    if lost:
        raise MisuseError(f"this model is not what was committed as {name!r}: it has no {lost[0]!r}")
    mine = source.records[min(partition.rank, source.ranks - 1)]
    try:
        units = [_reshard_unit(source, store, unit, plan.limits, partition) for unit in plan.units]
        optimizer = mine["optimizer"]
        if optimizer is not None:
            optimizer = {**optimizer, "steps": _steps(source, plan, optimizer["steps"])}
        layout = layout_of(plan.units, plan.limits, partition)
        write_record(store, name, {**mine, "layout": layout, "units": units, "optimizer": optimizer})
    except BaseException:
        for key in [key for key in store.owned(owner) if key not in there]:
            store.delete(key, owner=owner)
        raise


def _steps(source: Elements, plan: ModelPlan, steps: Mapping[str, int]) -> dict[str, int]:
    """Return how many steps each placement of ``plan`` has had."""
    made = {}
    for unit in plan.units:
        for placement in unit.placements:
            known = [steps[name] for name, _, _ in source.parts(*span_of(placement)) if name in steps]
            if known:
                made[placement.name] = max(known)
    return made


def _row_major_of(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, dtype=torch.uint8, device="meta").stride()


def _reshard_unit(
    source: Elements, whole_store: TieredStore, unit: UnitPlan, limits: Limits, partition: Partition
) -> dict[str, Any]:
    store = in_top_tier(whole_store, model_named(source.name))
    key, parts = f"{source.name}/param/{unit.name}", unit.parts(partition.rank)
    for placement in unit.placements:
        source.refuse_other(placement)
    whole = partition.shares == 1 or partition.replicated
    size = unit.stored_nbytes if whole else unit.share_nbytes

    def read(placement: Placement, kind: str) -> torch.Tensor | None:
        name, begin, end = span_of(placement)
        return source.read(name, kind, begin, end)

    store.create(key, TensorSpec("uint8", (size,), 1))
    with store.lease(key, access=Access.WRITE) as memory:
        memory.zero_()
        for placement in unit.placements if whole else parts.values():
            if placement.numel:
                values = read(placement, "param")
                assert values is not None
                placement.stored_flat(memory, 0, placement.numel).copy_(values)
        del memory
    kinds = {placement.stored for placement in unit.placements}
    named = {placement.name for placement in unit.placements}
    used = {name: kept for found in source.records[0]["units"] for name, kept in states_used(found).items() if name in named}
    states = States(store, key, list(parts.values()), even_chunks(unit.elements, limits.chunk), kinds, used)
    gradients: dict[str, Any] = {}
    for placement in unit.placements:
        kept = source.gradient(*span_of(placement))
        if kept is not None:
            gradients[placement.name] = {**kept, "norms": {}}
    for part in parts.values():
        forms = states.states_of(part)
        state = {kind: read(part, kind) for kind in (*forms, "master")}
        held = {kind: value for kind, value in state.items() if value is not None}
        if held:
            param = read(part, "param")
            assert param is not None
            shaped = {
                kind: value.as_strided(part.shape, part.stride) if kind not in forms or forms[kind].elementwise else value
                for kind, value in held.items()
            }
            states.load(part, param, shaped)

    def fill(what: str, nbytes: int) -> None:
        """Create a tensor that lies as the unit does, from what the parts have of that kind; the rest is zeros."""
        store.create(f"{key}/{what}", TensorSpec("uint8", (nbytes,), 1))
        with store.lease(f"{key}/{what}", access=Access.WRITE) as memory:
            memory.zero_()
            for part in parts.values():
                values = read(part, what)
                if values is not None:
                    part.flat(memory, 0, part.numel).copy_(values)
            del memory

    if any(said["there"] for said in gradients.values()):
        fill("grad", unit.nbytes // unit.shares)
    averages = source.records[0].get("average")
    if averages is not None:
        fill("average", average_nbytes(unit))
    stale = sorted(part.name for part in states.stale_masters)
    shown = {"states": states_shown(states)} if states.used else {}
    averaged = {} if averages is None else {"averaged": averages["updates"]}
    return {"gradients": gradients, "stale_masters": stale, "pending": None, **shown, **averaged}
