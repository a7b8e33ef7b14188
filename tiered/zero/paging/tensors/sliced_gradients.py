"""The gradient of a parameter that is divided into slices, while any slice has one.

It has no memory: each slice keeps its own gradient, and the whole is made of them where a computation needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._foreach_utils
from torch import nn
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_flatten, tree_map

from tiered import MisuseError
from tiered.zero.paging.tensors.slices import Step, device_of, divided, handle_of, meta_of, slices_of

__all__ = ["SlicedGradient", "gradient_of", "set_gradient"]

_aten = torch.ops.aten


class SlicedGradient(torch.Tensor):
    """Gradient of a sliced parameter: that of each slice, or zero where a slice has none. It computes as an ordinary tensor
    does; what is written to it is in the store when the call returns. Its norm is the norm of the norms of its slices."""

    parameter: nn.Parameter
    path: tuple[Step, ...]
    origin: SlicedGradient
    """What ``parameter.grad`` returned, of which this is a view; itself, where this is it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(
        parameter: nn.Parameter, path: tuple[Step, ...], like: torch.Tensor, origin: SlicedGradient | None = None
    ) -> SlicedGradient:
        made: SlicedGradient = torch.Tensor._make_wrapper_subclass(
            SlicedGradient,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=device_of(parameter),
        )
        made.parameter, made.path = parameter, path
        made.origin = made if origin is None else origin
        return made

    @torch.no_grad()
    def _whole(self) -> torch.Tensor:
        """Return a copy of the whole gradient."""
        self._parts()
        slices = slices_of(self.parameter)
        whole = torch.zeros(meta_of(self.parameter).shape, dtype=self.dtype, device=slices[0].device)
        for target, one in zip(divided(self.parameter, whole), slices, strict=True):
            if one.grad is not None:
                target.copy_(one.grad)
        return whole

    def _parts(self) -> list[torch.Tensor]:
        """Return the gradients of the slices that have one. Raises MisuseError where none has."""
        found = [one.grad for one in slices_of(self.parameter) if one.grad is not None]
        if not found or self.parameter.__dict__.get("_gradient") is not self.origin:
            raise MisuseError(
                f"this gradient of {handle_of(self.parameter).name!r} is gone, for parameter.grad is another one or None: keep "
                "parameter.grad.clone()"
            )
        return found

    @torch.no_grad()
    def _write(self, whole: torch.Tensor) -> None:
        self._parts()
        for one, values in zip(slices_of(self.parameter), divided(self.parameter, whole), strict=True):
            if one.grad is None:
                one.grad = values.clone()
            else:
                one.grad.copy_(values)

    def values(self) -> torch.Tensor:
        """Return a copy of the values in ordinary memory."""
        whole: torch.Tensor = functools.reduce(lambda base, step: step(base), self.path, self._whole())
        return whole

    @property
    def data(self) -> torch.Tensor:
        """The same gradient; what is assigned is written to it."""
        made: torch.Tensor = torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined]
        return made

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values is self:  # as Module.to() assigns it
            return
        if values.shape != self.shape or values.dtype != self.dtype:
            raise MisuseError(
                f"the gradient of {handle_of(self.parameter).name!r} is {tuple(self.shape)}, {self.dtype}; its data cannot "
                f"become {tuple(values.shape)}, {values.dtype}: assign parameter.grad"
            )
        with torch.no_grad():
            self.copy_(values)

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        return self.values().cpu(memory_format=memory_format)

    def tolist(self) -> Any:
        return self.values().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array that cannot be written to, because the gradient would not have what is written."""
        array = self.values().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.values()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by copy and pickle."""
        return self.values().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub misnames it
        return repr(self.values())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the classmethod
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, SlicedGradient):
            if func in (_aten.detach.default, _aten.alias.default):
                return SlicedGradient.of(first.parameter, first.path, _like(first), first.origin)
            if func.is_view:
                return _view_of(first, func, tuple(args[1:]), kwargs)
            name = func._schema.name.removeprefix("aten::")
            if name.endswith("_like") or name.startswith("new_"):
                like = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=first.device)
                return func(like, *args[1:], **kwargs)
        with enable_reentrant_dispatch(), torch.no_grad():
            return _dispatched(func, args, kwargs)


_FOREACH: list[type] = getattr(torch.utils._foreach_utils, "_foreach_supported_types", [])
_FOREACH.append(SlicedGradient)


def gradient_of(parameter: nn.Parameter) -> SlicedGradient | None:
    """Return what ``parameter.grad`` is: None while no slice has a gradient."""
    if all(one.grad is None for one in slices_of(parameter)):
        parameter.__dict__.pop("_gradient", None)
        return None
    made: SlicedGradient | None = parameter.__dict__.get("_gradient")
    if made is None:
        made = parameter.__dict__["_gradient"] = SlicedGradient.of(parameter, (), meta_of(parameter))
    return made


def set_gradient(parameter: nn.Parameter, value: Any) -> None:
    if value is None:
        parameter.__dict__.pop("_gradient", None)
        for one in slices_of(parameter):
            one.grad = None
        return
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        raise RuntimeError(f"assigned grad has another shape or type than parameter {handle_of(parameter).name!r}")
    if isinstance(value, SlicedGradient) and value.parameter is parameter and not value.path:
        value._parts()
        return
    values = value.values() if isinstance(value, SlicedGradient) else value
    parameter.__dict__.pop("_gradient", None)
    for one, mine in zip(slices_of(parameter), divided(parameter, values.detach()), strict=True):
        one.grad = mine  # a view: what is written to ``value`` before the step counts, as it does for torch


def _like(gradient: SlicedGradient) -> torch.Tensor:
    """Return a tensor without values of the same shape and strides, and in the same place of the whole."""
    like: torch.Tensor = functools.reduce(lambda base, step: step(base), gradient.path, meta_of(gradient.parameter))
    return like


def _view_of(gradient: SlicedGradient, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    step = Step(func, args, kwargs)
    like = step(_like(gradient))
    if isinstance(like, list | tuple):
        return [
            SlicedGradient.of(gradient.parameter, (*gradient.path, step._replace(which=which)), one, gradient.origin)
            for which, one in enumerate(like)
        ]
    return SlicedGradient.of(gradient.parameter, (*gradient.path, step), like, gradient.origin)


_EACH = {
    *(_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar, _aten.zero_.default),
}
"""Operations that do the same with each slice, with one number or none, and leave zeros as they are."""


def _dispatched(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.removeprefix("aten::")
    first: Any = args[0] if args else None
    if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
        func([part for one in args[0] for part in _parts_of(one)], *args[1:])
        return None
    if name.startswith("_foreach_"):
        return _one_at_a_time(func, args, kwargs)
    if func is _aten.linalg_vector_norm.default and _is_whole(first):
        given = [*args[1:], *(2, None, False)[len(args) - 1 :]]
        if not given[1] and not given[2] and kwargs.get("dtype") is None:
            return _norm(first, float(given[0]))
    if func in _EACH and _is_whole(first) and _is_number(args[1:]):
        for part in first._parts():
            func(part, *args[1:])
        return first
    copies: dict[int, tuple[SlicedGradient, torch.Tensor, torch.Tensor]] = {}
    wholes: dict[int, torch.Tensor] = {}

    def plain(value: Any) -> Any:
        if not isinstance(value, SlicedGradient):
            return value
        whole = wholes.setdefault(id(value.parameter), value._whole())
        made = functools.reduce(lambda base, step: step(base), value.path, whole)
        copies[id(made)] = value, made, whole
        return made

    given = tree_map(plain, (tuple(args), kwargs))
    result = func(*given[0], **given[1])
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for one in tree_flatten(args[index] if index < len(args) else kwargs.get(argument.name))[0]:
                if isinstance(one, SlicedGradient):
                    one._write(wholes[id(one.parameter)])
    return tree_map(lambda value: copies[id(value)][0] if id(value) in copies else value, result)


def _parts_of(value: Any) -> list[torch.Tensor]:
    return value._parts() if isinstance(value, SlicedGradient) else [value]


def _is_whole(value: Any) -> bool:
    return isinstance(value, SlicedGradient) and not value.path


def _is_number(values: Sequence[Any]) -> bool:
    return all(
        isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0 and type(value) is torch.Tensor)
        for value in values
    )


def _norm(gradient: SlicedGradient, order: float) -> torch.Tensor:
    """Return the norm of the norms of all slices."""
    norms = [torch.linalg.vector_norm(part, order) for part in gradient._parts()]
    if len(norms) < len(slices_of(gradient.parameter)):
        norms.append(torch.linalg.vector_norm(torch.zeros(1, dtype=gradient.dtype, device=gradient.device), order))
    return combined(norms, order)


def combined(norms: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """Return the norm, 0-d, of a tensor whose parts have these ``norms`` of that ``order``."""
    stacked = torch.stack(list(norms))
    found: torch.Tensor = stacked.sum() if order == 0 else torch.linalg.vector_norm(stacked, order)
    return found


def _one_at_a_time(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what ``func``, which does the same with each tensor of a list, returns for lists of one."""
    names = [argument.name for argument in func._schema.arguments]
    count = next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, list | tuple))
    if count == 1:
        return _alone(func, args, kwargs)

    def cut(name: str, value: Any, index: int) -> Any:
        if name == "scalars" and isinstance(value, torch.Tensor):  # one number for each
            return value[index : index + 1]
        return [value[index]] if isinstance(value, list | tuple) else value

    made: list[Any] = []
    for index in range(count):
        here = [cut(name, value, index) for name, value in zip(names, args, strict=False)]
        made.extend(func(*here, **{name: cut(name, value, index) for name, value in kwargs.items()}) or ())
    return made or None


_SINGLE = {
    _aten._foreach_mul_.Scalar: _aten.mul_.Scalar,
    _aten._foreach_mul_.Tensor: _aten.mul_.Tensor,
    _aten._foreach_div_.Scalar: _aten.div_.Scalar,
    _aten._foreach_div_.Tensor: _aten.div_.Tensor,
    _aten._foreach_zero_.default: _aten.zero_.default,
}


def _alone(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what ``func`` returns for lists of one gradient."""
    gradient = args[0][0]
    if func is _aten._foreach_norm.Scalar and _is_whole(gradient) and len(args) < 3 and not kwargs.get("dtype"):
        return [_norm(gradient, float(args[1] if len(args) > 1 else kwargs.get("ord", 2)))]
    if func in _SINGLE and _is_whole(gradient) and _is_number(args[1:]):
        for part in gradient._parts():
            func([part], *args[1:])
        return None
    whole = [one.values() if isinstance(one, SlicedGradient) else one for one in args[0]]
    rest = tree_map(lambda one: one.values() if isinstance(one, SlicedGradient) else one, (tuple(args[1:]), kwargs))
    result = func(whole, *rest[0], **rest[1])
    if func._schema.arguments[0].alias_info is not None and isinstance(gradient, SlicedGradient):
        base = gradient._whole()
        functools.reduce(lambda value, step: step(value), gradient.path, base).copy_(whole[0])
        gradient._write(base)
    return result
