"""Give copies of values in the store where torch would give the values themselves, so that no write to them is lost.

``model.state_dict()`` of torch shares the memory of the parameters, and ``optimizer.state`` has the states themselves: a write
to either changes the model. Here both have copies. A ``CopiedValues`` is a tensor with memory, whose writes are told to its
``Origin``: that brings them to the store, or raises. Views of it tell the same origin; what is saved, pickled or deep-copied is
an ordinary tensor.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from tiered.errors import MisuseError, StoreClosed
from tiered.zero.paging.saved_tensors import memory_of, place_of
from tiered.zero.paging.tensors.functions import name_of, written_by
from tiered.zero.paging.tensors.sources import ParameterOwner

__all__ = ["CopiedParameter", "CopiedValues", "Origin"]

_without_us: Any = torch._C._disabled_torch_function_impl

GEOMETRY_ONLY = {
    *("requires_grad_", "detach_", "t_", "squeeze_", "unsqueeze_", "transpose_", "swapaxes_", "swapdims_", "as_strided_"),
    *("rename_", "set_", "resize_", "resize_as_", "share_memory_", "_set_data", "data.__set__"),
}
"""Functions that change the tensor object that they are given, and no value of the memory that it shares in torch."""

OTHER_MEMORY = {"_set_data", "data.__set__"}
"""Of these, what gives the tensor object other memory: a write, where the copy stands for the tensor itself, and the values are
others. (torch asks no class before ``set_``.)"""

ACROSS_DEVICES = {
    *("copy_", "_foreach_copy_", "__setitem__", "__getitem__", "to", "type_as", "data.__set__", "_set_data"),
    *("view_as", "reshape_as", "expand_as", "is_same_size", "is_set_to", "result_type", "_has_compatible_shallow_copy_type"),
}
"""Functions that may be given tensors on several devices."""


class Origin(Protocol):
    """What a copy was made of. ``itself``: torch would give the tensor itself there, and not another object on its memory."""

    itself: bool

    def before_write(self, values: torch.Tensor) -> None:
        """Raise MisuseError where a write could not land. ``values``: the whole copy, as it is before the write."""
        ...

    def refuse_outdated(self) -> None:
        """Raise MisuseError where a write that has happened cannot land."""
        ...

    def written(self, values: torch.Tensor) -> None:
        """Bring ``values``, the whole copy after a write, to the store."""
        ...


class CopiedValues(torch.Tensor):
    """Copy of values that are in the store. What is written to it is written to them, as in memory, or raises."""

    origin: Origin
    whole: torch.Tensor
    """All that was copied: an ordinary tensor, on the same memory."""

    @staticmethod
    def of(values: torch.Tensor, origin: Origin) -> CopiedValues:
        """Return ``values``, an ordinary tensor that nothing else refers to, as a copy of what ``origin`` has."""
        return _shown(values, values, origin)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name, given = name_of(func), list(_copies((args, kwargs)))
        if name == "__dlpack__":
            raise MisuseError(
                "these values are a copy of what is in the store, and what another library writes to them would be lost: give "
                "it a copy of your own (.clone())"
            )
        if name not in ACROSS_DEVICES:
            _refuse_apart(name, given, (args, kwargs))
        writes = name not in GEOMETRY_ONLY
        targets = [one for one in _copies(written_by(name, args, kwargs)) if writes and _is_on_its_memory(one)]
        if name in OTHER_MEMORY and isinstance(args[0], CopiedValues) and args[0].origin.itself:
            targets += [] if torch.equal(_plain(args[0]), args[1].to(args[0].device)) else [args[0]]
        for one in targets:
            one.origin.before_write(one.whole)
        before = [_version(one) for one in given]
        if all(issubclass(kind, CopiedValues) for kind in types):
            result = _without_us(func, tuple(types), args, kwargs)
        else:  # another class has its say, as that of a parameter that is in the store
            plain = {id(one): _plain(one) for one in given}
            back = {id(plain[id(one)]): one for one in given}
            result = func(*_map(args, plain), **_map(kwargs, plain))
            result = back.get(id(result), result)
        written = {id(one.origin): one for one in targets}
        for one, version in zip(given, before, strict=True):
            if writes and _version(one) != version and id(one.origin) not in written and _is_on_its_memory(one):
                one.origin.refuse_outdated()  # the name of the function did not tell that it writes
                written[id(one.origin)] = one
        for one in written.values():
            one.origin.written(one.whole)
        return _result(result, given)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(_plain(self), memo)
        found: torch.Tensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = _plain(self)
        return plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub misnames it
        return repr(_plain(self))


class CopiedParameter:
    """Where a value of ``state_dict`` came from. A write to it lands in the parameter, whose memory it is in torch, unless the
    parameter has got other values since."""

    itself = False

    def __init__(self, parameter: nn.Parameter, version: int) -> None:
        self._parameter, self._version = weakref.ref(parameter), version

    def before_write(self, values: torch.Tensor) -> None:
        found = self._found()
        if found is None or found[0].version(found[1]) == self._version:
            return
        try:
            with torch.no_grad():
                same = torch.equal(found[1].detach().cpu(), values)
        except StoreClosed:  # the model cannot be used any more
            return
        if not same:
            self._refuse(found[1])
        self._version = found[0].version(found[1])  # another parameter of its unit was written to

    def refuse_outdated(self) -> None:
        found = self._found()
        if found is not None and found[0].version(found[1]) != self._version:
            self._refuse(found[1])

    def written(self, values: torch.Tensor) -> None:
        found = self._found()
        if found is None:
            return
        try:
            with torch.no_grad():
                found[1].copy_(values)
        except StoreClosed:
            return
        self._version = found[0].version(found[1])

    def _found(self) -> tuple[ParameterOwner, nn.Parameter] | None:
        """Return the parameter and its model; None where they are gone."""
        parameter = self._parameter()
        handle: Any = None if parameter is None else parameter.__dict__.get("_tiered")
        owner = None if handle is None else handle.owner()
        return None if parameter is None or owner is None else (owner, parameter)

    def _refuse(self, parameter: nn.Parameter) -> NoReturn:
        handle: Any = parameter.__dict__["_tiered"]
        raise MisuseError(
            f"this value of {handle.name!r}, which state_dict() gave, is from before the parameter was updated or written to, "
            "and a write to it would be lost: write to the parameter, call state_dict() anew, or change a copy (.clone())"
        )


def _shown(tensor: torch.Tensor, whole: torch.Tensor, origin: Origin) -> CopiedValues:
    made: CopiedValues = _without_us(torch.Tensor.as_subclass, (), (tensor, CopiedValues), {})
    made.origin, made.whole = origin, whole
    return made


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor on the same memory."""
    made: torch.Tensor = _without_us(torch.Tensor.as_subclass, (), (tensor, torch.Tensor), {})
    return made


def _version(tensor: torch.Tensor) -> int:
    getter: Any = torch.Tensor._version
    try:
        found: int = _without_us(getter.__get__, (), (tensor,), {})
    except RuntimeError:  # one of inference mode counts nothing
        return 0
    return found


def _is_on_its_memory(one: CopiedValues) -> bool:
    """Return whether ``one`` still shows the copy: it may have been given other ``.data``."""
    storage: torch.UntypedStorage = _without_us(torch.Tensor.untyped_storage, (), (one,), {})
    return place_of(storage) == memory_of(one.whole)


def _refuse_apart(name: str, given: Sequence[CopiedValues], values: Any) -> None:
    """Raise MisuseError where a function would compute with a copy and with a tensor on another device, which in torch are on
    one."""
    if not given:
        return
    for other in _tensors(values):
        for one in given:
            here, there = _device(one), _device(other)
            if here != there and one.ndim and other.ndim:
                raise MisuseError(
                    f"{name} is given copies of what is in the store, on {here}, and a tensor on {there}: move them with .to()"
                )


def _device(tensor: torch.Tensor) -> torch.device:
    getter: Any = torch.Tensor.device
    found: torch.device = _without_us(getter.__get__, (), (tensor,), {})
    return found


def _result(result: Any, given: Sequence[CopiedValues]) -> Any:
    """Return what a function returned, with views of the copies ``given`` as such."""
    if isinstance(result, tuple | list) and not isinstance(result, torch.Size):
        found = [_result(one, given) for one in result]
        if all(a is b for a, b in zip(found, result, strict=True)):
            return result
        return type(result)(found) if type(result) in (list, tuple) else tuple(found)
    if type(result) is torch.Tensor and result.layout is torch.strided and result.numel():
        for one in given:
            if memory_of(result) == memory_of(one.whole):
                return _shown(result, one.whole, one.origin)
    elif type(result).__module__ == "numpy" and type(result).__name__ == "ndarray" and given:
        result.flags.writeable = False  # NumPy tells nobody what is written
    return result


def _copies(values: Any) -> Iterator[CopiedValues]:
    return (value for value in _tensors(values) if isinstance(value, CopiedValues))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, torch.Tensor):
        yield values


def _map(values: Any, plain: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(values, dict):
        return {key: _map(value, plain) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(_map(value, plain) for value in values)
    return plain.get(id(values), values)
