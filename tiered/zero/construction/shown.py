"""Tensors that show memory of a parameter before the model is paged, which takes that memory away.

Attributes of the model's modules become views of the paged parameters, which show their values as before; those that cannot (of
another type, of several parameters) are refused by name. What something outside of the model keeps cannot be changed: it keeps
the values of the time of paging, and a warning says so. A view that autograd recorded would lead gradients to wrong elements
there, and is refused.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from tiered.errors import MisuseError, SharedMemoryWarning
from tiered.store.activations import users_of
from tiered.zero.paging.tensors.stored import StoredTensor
from tiered.zero.paging.units import is_dense

__all__ = ["ShownParameters", "shown_anew"]

WITHIN = 4
"""Levels of lists, tuples and dicts in an attribute that are looked into."""
NAMED = 3
"""Parameters that a warning names."""


class _Place(NamedTuple):
    """The bytes of a storage, by number, that the elements of a parameter lie between, without gaps where ``dense``."""

    name: str
    parameter: nn.Parameter
    begin: int
    end: int
    dense: bool


class _View(NamedTuple):
    """How ``tensor`` shows ``parameter``: its size, strides and offset in the storage that the parameter had; whether autograd
    recorded it, and whether it needs a gradient."""

    place: _Place
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    recorded: bool
    graded: bool
    alone: bool
    """Whether it is a Parameter."""

    def made(self) -> torch.Tensor:
        """Return the same view of the paged parameter."""
        with torch.set_grad_enabled(self.recorded):
            whole = self.place.parameter if self.recorded else self.place.parameter.detach()
            view = whole.as_strided(self.size, self.stride, self.offset)
        if self.alone:
            return nn.Parameter(view, self.graded)
        return view.requires_grad_() if self.graded and not self.recorded else view


class _Stored(NamedTuple):
    """A view of a parameter that was in the store, and is an ordinary one when ``made`` is called."""

    view: StoredTensor

    def made(self) -> torch.Tensor:
        made, needs = self.view.made(self.view.source.parameter), bool(self.view.requires_grad)
        if isinstance(self.view, nn.Parameter):
            return nn.Parameter(made, needs)
        return made if made.requires_grad or not needs else made.requires_grad_()


class ShownParameters:
    """What shows memory of ``parameters``, by name, that is none of ``tensors``, which the model has in memory."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], tensors: Sequence[torch.Tensor]) -> None:
        self._ours = {id(tensor) for tensor in tensors}
        self._places = _places(parameters, tensors)

    def within(self, model: nn.Module) -> list[Callable[[], None]]:
        """Return what makes attributes of ``model`` views of its paged parameters. Warns of what shows a parameter elsewhere.
        Raises MisuseError where autograd recorded that, and for an attribute that cannot become a view."""
        if not self._places:
            return []
        changes: list[Callable[[], None]] = []
        found: set[int] = set()
        for named, module in model.named_modules():
            for name, value in list(vars(module).items()):
                if name in ("_parameters", "_buffers", "_modules"):
                    continue
                views = {id(one): self._view(one, f"{named}.{name}".lstrip(".")) for one in _tensors(value) if self._shown(one)}
                if views:
                    found |= views.keys() | {id(one._base) for one in _tensors(value) if id(one) in views}
                    changes.append(partial(_replace, module, name, value, views))
        self._say([one for one in _alive() if id(one) not in found and self._shown(one)])
        return changes

    def _shown(self, tensor: torch.Tensor) -> list[_Place]:
        """Return the parameters that ``tensor`` shows memory of, without being one of the model's own."""
        if id(tensor) in self._ours:
            return []
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
                return []
            try:
                places = self._places.get(tensor.untyped_storage()._cdata, [])
            except (RuntimeError, NotImplementedError):  # it has no storage: a class of others
                return []
        begin, end = _extent(tensor) if places else (0, 0)
        return [one for one in places if begin < one.end and one.begin < end]

    def _view(self, tensor: torch.Tensor, attribute: str) -> _View:
        places = self._shown(tensor)
        place, (begin, end) = places[0], _extent(tensor)
        within = len(places) == 1 and place.dense and place.begin <= begin and end <= place.end
        if not within or tensor.dtype is not place.parameter.dtype or type(tensor) not in (torch.Tensor, nn.Parameter):
            raise MisuseError(
                f"attribute {attribute!r} shows memory of parameter {place.name!r}, in a way in which it cannot show the paged "
                "one (another type, other parameters, a class): set it after zero.page, or to a copy (.clone()) before"
            )
        offset: Any = tensor.storage_offset() - place.begin // tensor.itemsize
        recorded = _recorded(tensor)
        alone = isinstance(tensor, nn.Parameter)
        return _View(place, tensor.size(), tensor.stride(), offset, recorded, tensor.requires_grad, alone)

    def _say(self, tensors: Sequence[torch.Tensor]) -> None:
        """Warn of what is outside of the model. Raises MisuseError where autograd recorded it."""
        names: dict[str, None] = {}
        for tensor in tensors:
            shown = [place.name for place in self._shown(tensor)]
            if _recorded(tensor):
                raise MisuseError(
                    f"a view of parameter {shown[0]!r}, of shape {tuple(tensor.shape)}, was made before zero.page, and "
                    "autograd would lead gradients from it to memory that is gone: make views after zero.page, or drop this "
                    "one before"
                )
            names |= dict.fromkeys(shown)
        if names:
            first = ", ".join(map(repr, list(names)[:NAMED]))
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            warnings.warn(
                f"something outside of the model keeps tensors that show memory of {first}{more} (values of state_dict(), a "
                "NumPy array, a closure): after zero.page these tensors keep the values of now, and no write to them reaches "
                "the parameters. Drop them before zero.page, or keep copies (.clone())",
                SharedMemoryWarning,
                stacklevel=6,
            )


def shown_anew(model: nn.Module) -> list[Callable[[], None]]:
    """Return what makes attributes of a model that is not paged any more, and that show parameters as they were in the store,
    views of the parameters. May be called again."""
    changes: list[Callable[[], None]] = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                stored = [one for one in _tensors(value) if isinstance(one, StoredTensor) and one.step is not None]
                views = {id(one): _Stored(one) for one in stored}
                if views:
                    changes.append(partial(_replace, module, name, value, views))
    return changes


def _places(parameters: Sequence[tuple[str, nn.Parameter]], tensors: Sequence[torch.Tensor]) -> dict[int, list[_Place]]:
    """Return where parameters lie, by the numbers of those storages that have more users than the tensors of the model."""
    on: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        on.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    shared = {number for number, here in on.items() if users_of(here[0])[0] >= len({id(one) for one in here})}
    places: dict[int, list[_Place]] = {}
    for name, parameter in parameters:
        number = parameter.untyped_storage()._cdata
        if parameter.numel() and number in shared:
            place = _Place(name, parameter, *_extent(parameter), is_dense(parameter.shape, parameter.stride()))
            places.setdefault(number, []).append(place)
    return places


def _alive() -> Iterator[torch.Tensor]:
    """Yield all tensors of the process that the garbage collector knows."""
    return (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))


def _tensors(value: Any, levels: int = WITHIN) -> Iterator[torch.Tensor]:
    """Yield the tensors that ``value`` is, or has."""
    if issubclass(type(value), torch.Tensor):
        yield value
    elif levels and (isinstance(value, dict) or type(value) in (list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one, levels - 1)


def _replace(module: nn.Module, name: str, value: Any, views: Mapping[int, _View | _Stored]) -> None:
    made: dict[int, torch.Tensor] = {}

    def shown(tensor: torch.Tensor) -> torch.Tensor:
        view = views.get(id(tensor))
        if view is None:
            return tensor
        return made[id(tensor)] if id(tensor) in made else made.setdefault(id(tensor), view.made())

    vars(module)[name] = _with(value, shown)


def _with(value: Any, made: Callable[[torch.Tensor], torch.Tensor], levels: int = WITHIN) -> Any:
    """Return ``value`` with what ``made`` returns of each tensor in it; lists and dicts are changed themselves."""
    if issubclass(type(value), torch.Tensor):
        return made(value)
    if levels and type(value) is list:
        value[:] = [_with(one, made, levels - 1) for one in value]
    elif levels and isinstance(value, dict):
        value.update({key: _with(one, made, levels - 1) for key, one in value.items()})
    elif levels and type(value) is tuple:
        return tuple(_with(one, made, levels - 1) for one in value)
    return value


def _recorded(tensor: torch.Tensor) -> bool:
    """Return whether autograd recorded how ``tensor`` was made."""
    try:
        return tensor.requires_grad and not tensor.is_leaf
    except RuntimeError:  # of several views that one function made, whose base was written to since: torch refuses to use it
        return True


def _extent(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Return the bytes of its storage between which the elements of ``tensor`` lie."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.itemsize
    return begin, begin + (last + 1) * tensor.itemsize
