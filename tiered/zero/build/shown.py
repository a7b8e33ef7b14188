"""Tensors that show memory of a parameter before the model is paged, which takes that memory away.

Attributes of the model's modules become views of the paged parameters, which show their values as before. What something
outside of the model keeps cannot be changed: it keeps the values of the time of paging, and a warning says so. A view that
autograd recorded would lead gradients to wrong elements, and is refused.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from tiered.errors import MisuseError, SharedMemoryWarning
from tiered.store.activations import users_of

__all__ = ["ShownParameters"]

WITHIN = 4
"""Levels of lists, tuples and dicts in an attribute that are looked into."""


class _View(NamedTuple):
    """How ``tensor`` shows ``parameter``: its size, strides and offset in the storage that the parameter had."""

    tensor: torch.Tensor
    name: str
    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def made(self) -> torch.Tensor:
        """Return the same view of the paged parameter."""
        recorded = self.tensor.grad_fn is not None
        with torch.set_grad_enabled(recorded):
            whole = self.parameter if recorded else self.parameter.detach()
            view = whole.as_strided(self.size, self.stride, self.offset)
        return view.requires_grad_() if self.tensor.requires_grad and not recorded else view


class ShownParameters:
    """What shows memory of ``parameters``, by name, that is none of ``tensors``, which the model has in memory."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], tensors: Sequence[torch.Tensor]) -> None:
        views = {id(view.tensor): view for view in _views(parameters, tensors)}
        self._views = views

    def within(self, model: nn.Module) -> list[Callable[[], None]]:
        """Return what makes attributes of ``model`` views of its paged parameters. Warns of what shows a parameter elsewhere.
        Raises MisuseError where autograd recorded that."""
        found: set[int] = set()
        changes: list[Callable[[], None]] = []
        for module in model.modules() if self._views else ():
            for name, value in list(vars(module).items()):
                if name in ("_parameters", "_buffers", "_modules"):
                    continue
                here = set(_known(value, self._views))
                if here:
                    found |= here
                    changes.append(partial(self._replace, module, name, value))
        found |= {id(view.tensor._base) for view in self._views.values()}
        self._say([view for number, view in self._views.items() if number not in found])
        return changes

    def _say(self, views: Sequence[_View]) -> None:
        for view in views:
            if view.tensor.grad_fn is not None:
                raise MisuseError(
                    f"a view of parameter {view.name!r}, of shape {tuple(view.size)}, was made before zero.page, and autograd "
                    "would lead gradients from it to memory that is gone: make views after zero.page, or drop this one before"
                )
        names = ", ".join(repr(name) for name in dict.fromkeys(view.name for view in views))
        if names:
            warnings.warn(
                f"something outside of the model keeps tensors that show memory of {names} (values of state_dict(), a NumPy "
                "array, a closure): after zero.page these tensors keep the values of now, and no write to them reaches the "
                "parameters. Drop them before zero.page, or keep copies (.clone())",
                SharedMemoryWarning,
                stacklevel=6,
            )

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        views = self._views
        vars(module)[name] = _with(value, lambda tensor: views[id(tensor)].made() if id(tensor) in views else tensor)


def _known(value: Any, views: dict[int, _View], levels: int = WITHIN) -> Iterator[int]:
    """Yield the numbers of those of ``views`` that ``value`` is, or has."""
    if id(value) in views:
        yield id(value)
    elif levels and type(value) in (list, tuple, dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _known(one, views, levels - 1)


def _with(value: Any, made: Callable[[Any], Any], levels: int = WITHIN) -> Any:
    """Return ``value`` with what ``made`` returns of each tensor in it; lists and dicts are changed themselves."""
    if isinstance(value, torch.Tensor):
        return made(value)
    if levels and type(value) is list:
        value[:] = [_with(one, made, levels - 1) for one in value]
    elif levels and type(value) is dict:
        value.update({key: _with(one, made, levels - 1) for key, one in value.items()})
    elif levels and type(value) is tuple:
        return tuple(_with(one, made, levels - 1) for one in value)
    return value


def _views(parameters: Sequence[tuple[str, nn.Parameter]], tensors: Sequence[torch.Tensor]) -> Iterator[_View]:
    """Yield what shows memory of ``parameters``. All objects of the process are looked through only where a storage has more
    users than the tensors of the model."""
    uses: dict[int, set[int]] = {}
    for tensor in tensors:
        uses.setdefault(tensor.untyped_storage()._cdata, set()).add(id(tensor))
    shown: dict[int, list[tuple[str, nn.Parameter, int, int]]] = {}
    for name, parameter in parameters:
        number = parameter.untyped_storage()._cdata
        if users_of(parameter)[0] >= len(uses[number]):
            shown.setdefault(number, []).append((name, parameter, *_extent(parameter)))
    if not shown:
        return
    ours = {id(tensor) for tensor in tensors}
    for one in gc.get_objects():
        if not issubclass(type(one), torch.Tensor) or id(one) in ours:
            continue
        with torch._C.DisableTorchFunctionSubclass():
            if one.layout is not torch.strided or one.is_meta or not one.numel():
                continue
            try:
                known = shown.get(one.untyped_storage()._cdata, [])
            except (RuntimeError, NotImplementedError):  # it has no storage: a class of others
                continue
        begin, end = _extent(one) if known else (0, 0)
        for name, parameter, first, last in known:
            if begin < last and first < end:
                offset = (one.storage_offset() * one.itemsize - parameter.storage_offset() * parameter.itemsize) // one.itemsize
                yield _View(one, name, parameter, one.size(), one.stride(), offset)
                break


def _extent(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Return the bytes of its storage between which the elements of ``tensor`` lie."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.itemsize
    return begin, begin + (last + 1) * tensor.itemsize
