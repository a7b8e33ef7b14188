"""Write and read the record of a checkpoint, and check it: numbers, names and small tensors beside the tensors of a model, as
JSON. Nothing in it can run.

JSON has lists, dicts with string keys, strings, numbers, bools and null. Any other value is written as a dict with one key, its
kind: ``{"tuple": […]}``, ``{"dict": […pairs]}``, ``{"tensor": [dtype, shape, base64]}``, ``{"stored": key}``. So a dict is
always written as pairs. Floats come back bit for bit, NaN and infinity too.

A record is checked as a whole before anything follows from it: first by itself (``checked``: every field with its type, and
what must agree with what), then beside the tensors of its store (``refuse_other_tensors``). ``checkpoint.py`` compares it with
a model and an optimizer.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor, nn

from tiered.errors import ManifestError, MisuseError, shown
from tiered.packing.quantised import FORMS, TYPES, packing_of
from tiered.types import LARGEST, TensorSpec
from tiered.zero.paging.units import OLDER_SHARE_STEP, Limits, Placement, UnitPlan, even_chunks
from tiered.zero.paging.update import UPDATED_AT_ONCE, States
from tiered.zero.rules.forms import StateForm, form_named
from tiered.zero.rules.known import RULES
from tiered.zero.rules.rule import settings_of

__all__ = [
    *("VERSION", "checked", "dumps", "in_memory", "limits_of", "loads", "plans", "refuse_other_states"),
    *("refuse_other_tensors", "states_shown", "states_used", "type_named"),
]

INLINE = 16 << 10
"""Bytes: larger tensors become tensors of the store."""
DEEPEST = 100
"""Levels of nesting."""
MOST = 256 << 20
"""Bytes of JSON: of some hundred thousand parameters."""

_WRONG = (
    *(ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError),
    *(RuntimeError, MemoryError),  # torch's, and RecursionError
)
"""What Python and torch raise for values that are not what is expected."""

Store = Callable[[torch.Tensor], str]
Fetch = Callable[[str], torch.Tensor]


def dumps(value: Any, what: str, store: Store) -> bytes:
    """Encode ``value`` as JSON. ``store`` keeps a large tensor and returns its key.

    Raises MisuseError for what cannot be written down, with the way to it, which begins with ``what``.
    """
    try:
        data = json.dumps(_plain(value, (what,), store), separators=(",", ":")).encode()
    except ValueError as error:  # a number of thousands of digits
        raise MisuseError(f"{what} cannot be written down: {error}") from error
    if len(data) > MOST:
        raise MisuseError(f"{what} has {len(data):,} bytes, and may have {MOST:,}: put what is large into tensors")
    return data


def loads(data: bytes, what: str, fetch: Fetch) -> Any:
    """Decode what ``dumps`` encoded. Raises ManifestError for what ``dumps`` cannot have written."""
    if len(data) > MOST:
        raise ManifestError(f"{what} has {len(data):,} bytes; the limit is {MOST:,}")
    try:
        return _rebuilt(json.loads(data, object_pairs_hook=_kind), fetch, 0)
    except ManifestError as error:
        raise ManifestError(f"{what} is damaged, or of another version: {error}") from error
    except _WRONG as error:
        raise ManifestError(f"{what} is damaged, or of another version: {error!r:.200}") from error


_SIMPLE = frozenset({type(None), bool, int, float, str})
"""Types of values that JSON has."""


def _plain(value: Any, way: tuple[object, ...], store: Store) -> Any:
    """Return ``value`` as JSON has it. ``way`` leads to it: what it is in, and the names in that."""
    if type(value) in _SIMPLE:
        return value
    if len(way) > DEEPEST + 1:
        raise MisuseError(f"{_where(way)} is nested deeper than {DEEPEST} levels")
    if type(value) is list or isinstance(value, tuple):
        each = list(value)
        if not _SIMPLE.issuperset(map(type, each)):  # a state of random numbers has thousands of values, all of them simple
            each = [one if type(one) in _SIMPLE else _plain(one, (*way, index), store) for index, one in enumerate(each)]
        return each if type(value) is list else {"tuple": each}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        keys, each = list(value), list(value.values())
        if not _SIMPLE.issuperset(map(type, each)):
            each = [one if type(one) in _SIMPLE else _plain(one, (*way, key), store) for key, one in value.items()]
        if not _SIMPLE.issuperset(map(type, keys)):
            keys = [key if type(key) in _SIMPLE else _plain(key, (*way, "key"), store) for key in keys]
        return {kind: list(map(list, zip(keys, each, strict=True)))}
    where = _where(way)
    if isinstance(value, torch.Tensor):
        return _tensor(value.detach(), where, store)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        item = value.item()
        if type(item) in _SIMPLE:  # a number that Python has
            return item
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        return {"array": _tensor(torch.from_numpy(numpy.ascontiguousarray(value)), where, store)}
    raise MisuseError(
        f"{where} is a {type(value).__name__}, which a checkpoint does not hold: it takes None, bool, int, float, str, list, "
        "tuple, dict and tensors"
    )


def _where(way: tuple[object, ...]) -> str:
    return "".join([str(way[0]), *(f"[{name!r}]" for name in way[1:])])


def _tensor(tensor: torch.Tensor, where: str, store: Store) -> dict[str, Any]:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise MisuseError(f"{where} is a {tensor.layout} tensor, which a checkpoint does not hold: make it dense")
    if tensor.numel() * tensor.element_size() > INLINE:
        return {"stored": store(tensor)}
    dense = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return {"tensor": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), base64.b64encode(data).decode()]}


class _Kind(NamedTuple):
    """Value that JSON does not have, as it is written: a dict with one key."""

    name: str
    value: Any


def _kind(pairs: list[tuple[str, Any]]) -> _Kind:
    if len(pairs) != 1:
        raise ValueError(f"a dict with {len(pairs)} keys")
    return _Kind(*pairs[0])


def _rebuilt(value: Any, fetch: Fetch, depth: int) -> Any:
    if depth > DEEPEST + 1:  # an array is a tensor inside
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")

    def inside(found: Any) -> Any:
        return _rebuilt(found, fetch, depth + 1)

    if type(value) is list:
        return [inside(found) for found in value]
    if not isinstance(value, _Kind):
        return value
    found = value.value
    match value.name:
        case "tuple":
            return tuple(inside(one) for one in _list(found))
        case "dict":
            return _dict(found, inside)
        case "counter":
            return Counter(_dict(found, inside))
        case "dtype":
            return type_named(found)
        case "stored":
            if not isinstance(found, str):
                raise ValueError(f"{found!r:.100} is no key")
            return fetch(found)
        case "tensor":
            return _read_tensor(*_list(found))
        case "array":
            array = inside(found)
            if not isinstance(array, torch.Tensor):
                raise ValueError(f"an array is written as {found!r:.100}")
            return array.numpy()
    raise ValueError(f"{value.name!r:.100} is no kind of value")


def _list(found: Any) -> list[Any]:
    if type(found) is not list:
        raise ValueError(f"{found!r:.100} is no list")
    return found


def _dict(found: Any, inside: Callable[[Any], Any]) -> dict[Any, Any]:
    pairs = [(inside(key), inside(one)) for key, one in map(_list, _list(found))]
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a dict has one key twice")
    return dict(pairs)


def _read_tensor(name: object, shape: object, text: str) -> torch.Tensor:
    sizes = _list(shape)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"a tensor of shape {sizes!r:.100}")
    dtype, data = type_named(name), bytearray(base64.b64decode(text, validate=True))
    if len(data) > INLINE:
        raise ValueError(f"a tensor of {len(data)} bytes")
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
    return flat.view(dtype).reshape(sizes)


def type_named(name: object) -> torch.dtype:
    """Return the type with torch's name ``name`` without the prefix. Raises ManifestError for what is no type of dense tensors.
    """
    found = vars(torch).get(name) if isinstance(name, str) else None  # not getattr, which imports what has such a name
    if not isinstance(found, torch.dtype) or str(name).startswith("q"):
        raise ManifestError(f"this torch ({torch.__version__}) has no element type {name!r}")
    return found


VERSION = 1
MOST_STEPS = 2**53
"""Counts up to which a float counts exactly, as torch's kernels do."""

_UNFIT = (ValueError, OverflowError, RecursionError, AttributeError, TypeError, LookupError)
"""msgspec's and Unicode's errors are ValueErrors; a tensor in the place of a dict has no ``keys``, and no item of a name."""

_Size = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
_Sizes = Annotated[list[_Size], msgspec.Meta(max_length=64)]
_Step = Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)]


class _Struct(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Share(_Struct):
    stage: str
    rank: _Size
    ranks: Annotated[int, msgspec.Meta(ge=2, le=2**31)]


class _Layout(_Struct):
    """Layout of a model: of each unit the name, and of each parameter name, shape, type, type in the store (or, of one that is
    quantised, the name of its form: one of ``quantised.FORMS``), strides."""

    limit: _Size
    chunk: Annotated[int, msgspec.Meta(ge=16, le=2**40, multiple_of=16)]
    units: list[tuple[str, list[tuple[str, _Sizes, str, str, _Sizes]]]]
    share: _Share | msgspec.UnsetType = msgspec.UNSET
    step: Annotated[int, msgspec.Meta(ge=OLDER_SHARE_STEP, le=2**20, multiple_of=OLDER_SHARE_STEP)] | msgspec.UnsetType = (
        msgspec.UNSET
    )
    """Of ranks: elements at multiples of which parameters begin and shares end."""
    sliced: dict[str, tuple[Annotated[int, msgspec.Meta(ge=2, le=2**32)], _Size]] | msgspec.UnsetType = msgspec.UNSET
    """By name of each parameter that is sliced, if there is one: how many slices, and how many rows each has (0: it is one row,
    without that dimension)."""


class _Gradient(_Struct):
    there: bool
    scales: list[Tensor]
    wide_scales: list[Tensor]
    expected: Tensor | None
    norms: dict[float, Tensor]
    orders: list[float]
    finite: bool


_Rule = tuple[float, tuple[float, float], float, float, bool] | dict[str, Any]
"""AdamW's hyper-parameters; of another rule its name, and its hyper-parameters by name."""


class _Update(_Struct):
    rule: _Rule
    step: _Step
    scales: list[Tensor]
    wide_scales: list[Tensor]
    graded: bool | msgspec.UnsetType = msgspec.UNSET
    missed: list[tuple[_Rule, Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)]]] | msgspec.UnsetType = msgspec.UNSET
    """Rules of the missed steps that follow, and for how many of them each holds."""


class _Pending(_Struct):
    updates: dict[str, _Update]
    chunks_done: _Size
    pieces_done: _Size


class _Unit(_Struct):
    gradients: dict[str, _Gradient]
    stale_masters: list[str]
    pending: _Pending | None
    states: dict[str, dict[str, str]] | msgspec.UnsetType = msgspec.UNSET
    """By name of each parameter that has other states than ``m`` and ``v``, the forms of its states by their names."""
    averaged: _Step | msgspec.UnsetType = msgspec.UNSET
    """How many updates are in the average of its parameters, where there is a tensor of it."""


class _Optimizer(_Struct):
    groups: list[dict[str, Any]]
    steps: dict[str, Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)]]


class _Random(_Struct):
    """States of random generators; ``checkpoint.py`` tries whether the generators take them."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None
    torch: Tensor
    cuda: list[Tensor] | None


class _Average(_Struct):
    """The average of a model's weights: how many updates it had, and of the last ones up to which number each decay holds."""

    updates: _Step
    decays: list[tuple[_Step, Annotated[float, msgspec.Meta(ge=0, le=1)]]]
    buffers: dict[str, Tensor]


class _ModelRecord(_Struct):
    """The whole record. ``scheduler``, ``scaler`` and ``data`` are what these returned as their state."""

    version: int
    layout: _Layout
    units: list[_Unit]
    buffers: dict[str, Tensor]
    optimizer: _Optimizer | None
    scheduler: Any
    scaler: Any
    data: Any
    random: _Random
    extra: dict[Any, Any] | None
    moment: int = 0
    """Number of the commit that it was made for: its random states are of then."""
    persistent: list[str] | msgspec.UnsetType = msgspec.UNSET
    beside: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """What ``state_dict`` had of parameters and buffers that were added after paging, and of extra states."""
    gone: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Paged parameters that the model did not have any more."""
    transient: dict[str, Tensor] | msgspec.UnsetType = msgspec.UNSET
    """Buffers that were added after paging, and that ``state_dict`` did not have."""
    average: _Average | msgspec.UnsetType = msgspec.UNSET


def checked(record: object, what: str) -> dict[str, Any]:
    """Return ``record`` itself, checked to be the record of a checkpoint. Raises ManifestError, which says what is wrong and
    begins with ``what``."""
    version = record.get("version") if isinstance(record, dict) else None
    if not isinstance(record, dict) or type(version) is not int or version != VERSION:
        raise ManifestError(f"{what} is of another version than {VERSION}, which this release reads")
    try:
        found = msgspec.convert(record, _ModelRecord, strict=True, dec_hook=_as_tensor)
    except _UNFIT as error:
        raise ManifestError(f"{what} is damaged, or of another version: {shown(str(error), 300)}") from error
    for problem in _problems(found):
        raise ManifestError(f"{what} is damaged: {problem}")
    return record


def _as_tensor(kind: type, value: object) -> object:
    if not isinstance(value, kind):
        raise TypeError(f"Expected a tensor, got `{type(value).__name__}`")
    return value


def _problems(found: _ModelRecord) -> Iterator[str]:
    """Yield what contradicts itself, in words."""
    layout = found.layout
    yield from _twice("unit", [name for name, _ in layout.units])
    yield from _twice("parameter", [parameter[0] for _, described in layout.units for parameter in described])
    for name, described in layout.units:
        if not described:
            yield f"unit {name!r} has no parameters"
        for parameter in described:
            yield from _wrong_parameter(*parameter)
        types = {(parameter[2], parameter[3]) for parameter in described}
        if not isinstance(layout.share, msgspec.UnsetType) and len(types) > 1:
            yield f"unit {name!r} is divided among ranks, and has parameters of several types"
    if not isinstance(layout.share, msgspec.UnsetType) and layout.share.rank >= layout.share.ranks:
        yield f"it is of rank {layout.share.rank} of {layout.share.ranks}"
    if len(found.units) != len(layout.units):
        yield f"it describes {len(layout.units)} units, and has {len(found.units)}"
    for (name, described), unit in zip(layout.units, found.units, strict=False):
        yield from _wrong_unit(unit, name, {parameter[0]: _type(parameter[2]) for parameter in described})
    everything = {parameter[0] for _, described in layout.units for parameter in described}
    shapes = {parameter[0]: parameter[1] for _, described in layout.units for parameter in described}
    for name, (count, rows) in ({} if isinstance(layout.sliced, msgspec.UnsetType) else layout.sliced).items():
        if name in everything or count > len(shapes) or not shapes.keys() >= {f"{name}[{i}]" for i in range(count)}:
            yield f"it does not describe {count} slices of {name!r}"
            return
        inside = {tuple(shapes[f"{name}[{i}]"][bool(rows) :]) for i in range(count)}
        if len(inside) > 1 or (rows and any(shapes[f"{name}[{i}]"][:1] != [rows] for i in range(count - 1))):
            yield f"slices of {name!r} have several shapes"
        everything.add(name)
    yield from _unknown("the optimizer counts steps of", found.optimizer.steps if found.optimizer else (), everything)
    named: list[str] = []
    for group in found.optimizer.groups if found.optimizer else ():
        names = group.get("names")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            yield f"a param group has the parameters {names!r:.100}"
            return
        named += names
    yield from _twice("parameter of the optimizer", named)
    yield from _unknown("the optimizer has", named, everything)
    yield from _wrong_average(found)
    persistent = () if isinstance(found.persistent, msgspec.UnsetType) else found.persistent
    yield from _unknown("a state_dict has the buffer", persistent, found.buffers)
    yield from _unknown("the model lacks", () if isinstance(found.gone, msgspec.UnsetType) else found.gone, everything)


def _wrong_average(found: _ModelRecord) -> Iterator[str]:
    averaged = [unit.averaged for unit in found.units if not isinstance(unit.averaged, msgspec.UnsetType)]
    if isinstance(found.average, msgspec.UnsetType):
        if averaged:
            yield "a unit has an average, and the model none"
        return
    ends = [last for last, _ in found.average.decays]
    if sorted(set(ends)) != ends or ends[-1:] != [found.average.updates] or max(averaged, default=0) > found.average.updates:
        yield f"an average of {found.average.updates} updates has had other ones"


def _wrong_parameter(name: str, shape: list[int], dtype: str, stored: str, stride: list[int]) -> Iterator[str]:
    if not stored.startswith("torch.") and stored not in FORMS:
        yield f"{name!r} is of type {stored!r}, which this release does not know"
        return
    for kind in dtype, dtype if stored in FORMS else stored:
        if not kind.startswith("torch."):
            yield f"{name!r} is of type {kind!r}"
            return
        itemsize = _type(kind).itemsize
        if TensorSpec(kind, tuple(shape), itemsize).span > LARGEST:
            yield f"{name!r} has the shape {shape}, whose strides overflow"
            return
    if len(stride) != len(shape) or _placement(name, 0, shape, dtype, stored, stride).stride != tuple(stride):
        yield f"{name!r} has the strides {stride}, which a shape of {shape} does not have"
    elif stored in FORMS and (_type(dtype) not in TYPES or _placement(name, 0, shape, dtype, stored, stride).packing is None):
        yield f"{name!r} of shape {shape} and type {dtype} is stored as {stored!r}, which is for matrices of floats"


def _wrong_unit(unit: _Unit, name: str, types: Mapping[str, torch.dtype]) -> Iterator[str]:
    graded = {parameter for parameter, dtype in types.items() if dtype.is_floating_point}
    if unit.gradients.keys() != graded:
        other = sorted(unit.gradients.keys() ^ graded)[0]
        yield f"unit {name!r} {'lacks' if other in graded else 'has'} a gradient of {other!r}"
    yield from _twice("stale master", unit.stale_masters)
    yield from _unknown("a master is stale of", unit.stale_masters, types)
    used = {} if isinstance(unit.states, msgspec.UnsetType) else unit.states
    yield from _unknown("there are states of", used, types)
    kept: dict[str, str] = {}
    for parameter, states in used.items():
        for state, kind in states.items():
            wrong = state in ("lo", "master") or not state.isidentifier() or kept.setdefault(state, kind) != kind
            if wrong or (state in ("m", "v") and _form(kind) not in (StateForm(torch.float32), StateForm(torch.float64))):
                yield f"{parameter!r} has a state {state!r:.100} of {kind!r:.100}"
        blocks = {_form(kind).block for kind in states.values()}
        if len(blocks) > 1:
            yield f"{parameter!r} has states for blocks of {sorted(blocks)} elements"
    for parameter, gradient in unit.gradients.items():
        numbers = [*gradient.scales, *gradient.wide_scales, *([] if gradient.expected is None else [gradient.expected])]
        whole = all(map(_is_number, [*numbers, *gradient.norms.values()])) and not any(n.dim() for n in gradient.norms.values())
        if not whole or any(map(math.isnan, [*gradient.norms, *gradient.orders])):
            yield f"a factor or a norm of the gradient of {parameter!r} is no number"
    if unit.pending is not None:
        yield from _unknown("an update is pending of", unit.pending.updates, graded)
        for parameter, update in unit.pending.updates.items():
            missed = () if isinstance(update.missed, msgspec.UnsetType) else update.missed
            for rule in (update.rule, *(rule for rule, _ in missed)):
                if isinstance(rule, dict):
                    if not _is_rule(rule):
                        yield f"the pending update of {parameter!r} is by {rule!r:.200}, which this release does not have"
                    continue
                lr, betas, eps, decay, _ = rule
                if not all(map(math.isfinite, (lr, *betas, eps, decay))):
                    yield f"the pending update of {parameter!r} computes with {(lr, betas, eps, decay)}"
            if update.step + sum(count for _, count in missed) > MOST_STEPS:
                yield f"{parameter!r} has missed more steps than {MOST_STEPS}"
            if not all(map(_is_number, [*update.scales, *update.wide_scales])):
                yield f"a factor of the pending update of {parameter!r} is no number"


def _is_rule(rule: Mapping[str, Any]) -> bool:
    """Return whether ``rule`` is what a checkpoint has of a rule that is not AdamW's: its name, and its fields."""
    values = rule.get("values")
    if rule.keys() != {"name", "values"} or not isinstance(values, dict) or rule["name"] not in RULES:
        return False
    usual = settings_of(RULES[rule["name"]]())
    return values.keys() == usual.keys() and all(_fits(values[name], value) for name, value in usual.items())


def _fits(value: Any, usual: Any) -> bool:
    if usual is None:
        return value is None or isinstance(value, str)
    if isinstance(usual, bool):
        return value is None or isinstance(value, bool)
    if isinstance(usual, tuple):
        known = [0.0 if one is None else one for one in usual]
        return isinstance(value, tuple) and len(value) == len(usual) and all(
            (one is None and like is None) or _fits(one, fallback)
            for one, like, fallback in zip(value, usual, known, strict=True)
        )
    return type(value) in (int, float) and math.isfinite(value)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.dim() <= 1 and tensor.is_floating_point() and tensor.layout is torch.strided


def _twice(what: str, names: Sequence[str]) -> Iterator[str]:
    if len(set(names)) != len(names):
        yield f"it has the {what} {next(name for name in names if names.count(name) > 1)!r} twice"


def _unknown(what: str, names: Collection[str], known: Collection[str]) -> Iterator[str]:
    for name in names:
        if name not in known:
            yield f"{what} {name!r}, which it does not describe"


def _type(shown: str) -> torch.dtype:
    return type_named(shown.removeprefix("torch."))


def in_memory(record: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that the ``state_dict`` of a committed model had beside paged parameters. Raises MisuseError where it
    had something that is no tensor, and where parameters had been taken out, so that what is paged is not what it had."""
    if record.get("gone"):
        raise MisuseError(
            f"{record['gone'][0]!r} was taken out of the model, or replaced, after zero.page, and its values are still in the "
            "store: open the model, do so again, call zero.resume, and export it with zero.export"
        )
    found = {name: record["buffers"][name] for name in record.get("persistent", record["buffers"])}
    for name, value in record.get("beside", {}).items():
        if not isinstance(value, Tensor):
            raise MisuseError(f"{name!r} of the model's state_dict is no tensor, and files of tensors hold nothing else")
        found[name] = value
    return found


def states_shown(states: States) -> dict[str, dict[str, str]]:
    """Return what a record has of the states that are not ``m`` and ``v``."""
    return {name: {state: str(form) for state, form in kept.items()} for name, kept in states.used.items()}


def states_used(unit: Mapping[str, Any]) -> dict[str, dict[str, StateForm]]:
    """Return what ``states_shown`` returned, of a unit in a record."""
    return {name: {state: _form(kind) for state, kind in kept.items()} for name, kept in unit.get("states", {}).items()}


def _form(shown: str) -> StateForm:
    """Return a form of a state. Raises ManifestError for what is none."""
    if "," not in shown:
        return StateForm(type_named(shown))
    try:
        return form_named(shown)
    except ValueError as error:
        raise ManifestError(f"{shown!r:.100} is no form of a state, as this release knows them") from error


def plans(record: Mapping[str, Any]) -> tuple[list[UnitPlan], Limits]:
    """Return the units that a record describes, with parameters on the meta device, and the limits by which the model was
    divided."""
    found, units = record["layout"], []
    for name, described in found["units"]:
        placements = [
            _placement(qualified, index, shape, dtype, stored, stride)
            for index, (qualified, shape, dtype, stored, stride) in enumerate(described)
        ]
        units.append(UnitPlan(name, placements, found.get("share", {}).get("ranks", 1), step=limits_of(found).step))
    return units, limits_of(found)


def limits_of(layout: Mapping[str, Any]) -> Limits:
    """Return the limits by which a model was divided, of the layout in its record."""
    return Limits(layout["limit"], layout["chunk"], layout.get("step", OLDER_SHARE_STEP))


def _placement(
    name: str, index: int, shape: Sequence[int], dtype: str, stored: str, stride: Sequence[int]
) -> Placement:
    blank = torch.empty(shape, dtype=_type(dtype), device="meta")
    parameter = nn.Parameter(blank, requires_grad=False)  # then the order of a unit stays what it is
    if stored not in FORMS:
        return Placement(parameter, name, index, tuple(stride), _type(stored))
    packing = packing_of(stored, blank.shape, tuple(stride))
    return Placement(parameter, name, index, tuple(stride), blank.dtype, packing=packing)


# Beside the store


class Specified(Protocol):
    def __contains__(self, key: object) -> bool: ...

    def spec(self, key: str) -> TensorSpec: ...


def refuse_other_tensors(
    store: Specified, name: str, record: Mapping[str, Any], units: Sequence[UnitPlan], limits: Limits
) -> None:
    """Raise ManifestError where ``store`` does not have the tensors of which the record of model ``name`` speaks, as large as
    they must be."""
    share = record["layout"].get("share", {"rank": 0, "stage": "Alone"})
    for unit, found in zip(units, record["units"], strict=True):
        key, parts = f"{name}/param/{unit.name}", {p.name: part for p, part in unit.parts(share["rank"]).items()}
        _expect(store, key, "uint8", unit.share_nbytes if share["stage"] == "Stage3" else unit.stored_nbytes)
        if found.get("averaged"):
            _expect(store, f"{key}/average", "uint8", unit.nbytes // unit.shares)
        pending = found["pending"] or {"updates": {}}
        needing = {p for p, update in pending["updates"].items() if update.get("graded", True)}
        graded = [part for p, part in parts.items() if p in needing or found["gradients"].get(p, {}).get("there")]
        needed = max((part.offset + part.nbytes for part in graded if part.numel), default=0)
        if needed:
            _expect(store, f"{key}/grad", "uint8", needed, LARGEST)
        for kind, named in ("an update is pending", pending["updates"]), ("a master is stale", found["stale_masters"]):
            other = next((p for p in named if p not in parts), None)
            if other is not None:
                raise ManifestError(
                    f"the checkpoint of {name!r} is damaged: of {other!r} {kind}, and {store} has nothing of it"
                )
        kinds = {placement.stored for placement in unit.placements}
        chunk = even_chunks(unit.elements, limits.chunk)
        used = states_used(found)
        states = States(store, key, list(parts.values()), chunk, kinds, used)  # type: ignore[arg-type]  # which are not used
        refuse_other_states(store, states, list(parts.values()))
        if found["pending"] is not None:
            chunks = states.chunks(parts[p] for p in pending["updates"])
            left = chunks[pending["chunks_done"] :]
            pieces = sum(-(-min(parts[p].numel, chunk) // UPDATED_AT_ONCE) + 1 for p in pending["updates"]) if left else 0
            if pending["chunks_done"] > len(chunks) or pending["pieces_done"] > pieces:
                raise ManifestError(
                    f"the checkpoint of {name!r} is damaged: more of the pending update of {unit.name!r} is done than it has"
                )


def refuse_other_states(store: Specified, states: States, parts: Sequence[Placement]) -> None:
    """Raise ManifestError where a chunk of states neither ends where the next one begins, nor where a parameter ends, or is not
    of every kind. ``parts``: those of ``states``, or some of them."""
    for alike in [list(parts)] if states.uniform else [[part] for part in parts]:
        for _, keys in states.chunks(alike):
            if not keys or keys[0] not in store:
                continue
            size = store.spec(keys[0]).numel
            if size not in states.sizes(keys[0]):
                raise ManifestError(
                    f"{keys[0]!r} in {store} has {size} elements, and a chunk of these states has {states.chunk_elements}: the "
                    "checkpoint is damaged, or the tensor is another model's"
                )
            first = states.form_of(keys[0])
            for key in keys:  # of parameters with other rules in this chunk, one may have been enlarged, and the other not yet
                if key not in store and states.may_lack(key):
                    continue
                form, sizes = states.form_of(key), states.sizes(key)
                least, most = size, size if states.uniform else max(sizes)
                if not (form.elementwise and first.elementwise):
                    here = store.spec(key).numel if key in store else 0
                    least = most = here if here in sizes else max(sizes)
                _expect(store, key, str(form.dtype).removeprefix("torch."), least, most)


def _expect(store: Specified, key: str, dtype: str, least: int, most: int | None = None) -> None:
    """Raise ManifestError unless a tensor has ``least`` elements, or up to ``most``."""
    if key not in store:
        raise ManifestError(f"{store} lacks {key!r}, of which its checkpoint speaks: it is damaged, or of another time")
    spec = store.spec(key)
    if spec.dtype != dtype or len(spec.shape) != 1 or not least <= spec.numel <= (most or least):
        raise ManifestError(
            f"{key!r} in {store} is {spec.dtype} of shape {list(spec.shape)}, and its checkpoint speaks of {least} of {dtype}: "
            "it is damaged, or of another time"
        )
