"""Let a parameter that is divided into slices be used like any other: experts, of which each has a slice, and the weights of
large embeddings and linear layers, which have some rows in each slice.

Each slice along the first dimension is a parameter by itself, in a unit of its own (``units.Sliced``). The parameter that the
model has is made of them. It has the class ``SlicedParameter`` as long as the model is paged, and no memory. There are these
answers to a function of torch:

- ``parameter[i]`` is slice i, or a row of a slice: what follows fetches one expert, and its gradient goes to one expert.
- ``torch.nn.functional.grouped_mm`` multiplies with the slices that have rows, one after the other; ``linear`` and
  ``embedding`` use one slice of rows after the other.
- A view (``transpose``, ``.data``, several rows) is a ``SlicedView``, which has no memory and knows how it is made.
- Everything else gets a copy of all slices, through which gradients go to each; what writes has its copy written back.

The gradient is a ``SlicedGradient`` while any slice has one. A slice without one has a gradient of zero, as in the whole.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tiered import Access, MisuseError
from tiered.zero.paging.tensors.compiling import break_graph
from tiered.zero.paging.tensors.parameters import (
    AS_IT_IS,
    CONVERSIONS,
    GEOMETRY,
    LIKE,
    REFUSED,
    VIEWS,
    Function,
    PagedParameter,
    PagedView,
    _leaves,
    _map,
    _refuse_wrapper,
    _without_us,
    _writes,
    asks_for_gradient,
    into,
    name_of,
)
from tiered.zero.paging.tensors.sliced_gradients import gradient_of, set_gradient
from tiered.zero.paging.tensors.slices import Handle, Step, device_of, divided, handle_of, meta_of, slices_of

__all__ = ["SlicedParameter", "SlicedView", "slice_up"]

HOOKS = {
    *("register_hook", "register_post_accumulate_grad_hook", "get_gradient_edge", "retain_grad"),
    *(f"{name}.__set__" for name in ("_backward_hooks", "_post_accumulate_grad_hooks", "_grad")),
}
"""Functions that ask for the one gradient of a parameter, of which each slice has a part."""

GROUPED = {"grouped_mm", "_grouped_mm", "grouped_mm_fallback"}


class SlicedParameter(nn.Parameter):
    """Parameter that is divided into slices along its first dimension. Use it like any other parameter."""

    held_class: type[nn.Parameter] = nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(func, tuple(types), args, dict(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        raise _no_copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _no_copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found: Any = self.numpy()
        return found if dtype is None else found.astype(dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub misnames it
        return f"Parameter containing:\n{_whole(self).detach()!r}"


class SlicedView(torch.Tensor):
    """A view of a sliced parameter: ``path`` makes it of the whole one. It has no memory."""

    parameter: SlicedParameter
    path: tuple[Step, ...]
    geometry: torch.Tensor
    """A tensor on the meta device of the same size and strides."""

    @staticmethod
    def of(parameter: SlicedParameter, path: tuple[Step, ...], geometry: torch.Tensor) -> SlicedView:
        view: SlicedView = torch.Tensor._make_wrapper_subclass(
            SlicedView,
            geometry.size(),
            strides=geometry.stride(),
            storage_offset=geometry.storage_offset(),
            dtype=geometry.dtype,
            device=device_of(parameter),
        )
        view.parameter, view.path, view.geometry = parameter, path, geometry
        return view

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(func, tuple(types), args, dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the classmethod
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise MisuseError(f"{func} cannot compute with a view of a parameter that is in the store: give it a copy (.clone())")

    def __deepcopy__(self, memo: Any) -> Any:
        raise _no_copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _no_copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found: Any = self.numpy()
        return found if dtype is None else found.astype(dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub misnames it
        return repr(_value(self))


@functools.cache
def _sliced_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    if kind is nn.Parameter:
        return SlicedParameter
    return type(f"Sliced{kind.__name__}", (SlicedParameter, kind), {"held_class": kind})


def slice_up(parameter: nn.Parameter, handle: Handle, device: torch.device) -> None:
    """Make ``parameter`` one that is made of the slices of ``handle``. It has no memory from here on."""
    with torch.inference_mode(False):
        one = torch.full((), float("nan"), dtype=parameter.dtype, device=device)
        parameter.data = one.expand(parameter.shape)
    parameter._tiered = handle  # type: ignore[attr-defined]
    parameter.__class__ = _sliced_class(type(parameter))


def _no_copy() -> MisuseError:
    return MisuseError("a paged model cannot be copied or pickled: copy or save model.state_dict() instead")


def _is_sliced(value: Any) -> bool:
    return isinstance(value, SlicedParameter | SlicedView)


def _of(value: SlicedParameter | SlicedView) -> tuple[SlicedParameter, tuple[Step, ...]]:
    """Return the parameter, and what makes ``value`` of it."""
    return (value.parameter, value.path) if isinstance(value, SlicedView) else (value, ())


def _geometry(value: Any) -> Any:
    """Return a tensor on the meta device with the size, strides and type of ``value``, where that is sliced."""
    if isinstance(value, SlicedView):
        return value.geometry
    if isinstance(value, SlicedParameter):
        return meta_of(value)
    return value


# -- values --------------------------------------------------------------------------------------------------------------------


def _whole(parameter: SlicedParameter) -> torch.Tensor:
    """Return a copy of all slices, through which gradients go to each of them."""
    slices = slices_of(parameter)
    if torch.is_grad_enabled() and any(one.requires_grad for one in slices):
        join = torch.stack if handle_of(parameter).rows is None else torch.cat
        return join([one.clone() for one in slices])
    whole = torch.empty(_geometry(parameter).shape, dtype=slices[0].dtype, device=slices[0].device)
    for target, one in zip(divided(parameter, whole), slices, strict=True):
        target.copy_(one)
    return whole


def _value(value: SlicedParameter | SlicedView) -> torch.Tensor:
    """Return a copy of ``value``."""
    parameter, path = _of(value)
    return functools.reduce(lambda base, step: step(base), path, _whole(parameter))


@torch.no_grad()
def _write(parameter: SlicedParameter, whole: torch.Tensor) -> None:
    for one, values in zip(slices_of(parameter), divided(parameter, whole), strict=True):
        one.copy_(values)


def _part(value: SlicedParameter | SlicedView, index: int) -> torch.Tensor | None:
    """Return ``value[index]`` as a view of one slice; None where it is not one, because a step of ``value`` does more than to
    swap the dimensions after the first."""
    parameter, path = _of(value)
    rows = handle_of(parameter).rows
    part: torch.Tensor = slices_of(parameter)[index] if rows is None else slices_of(parameter)[index // rows][index % rows]
    for step in path:
        name = name_of(step.func)
        if name in ("detach", "data.__get__"):
            part = part.detach()
            continue
        dims = [*step.args, *step.kwargs.values()]
        if name == "mT.__get__":
            dims = [-1, -2]
        if (
            name not in ("transpose", "swapaxes", "swapdims", "mT.__get__")
            or len(dims) != 2
            or part.dim() != 2
            or {dim % 3 for dim in dims if isinstance(dim, int)} != {1, 2}
        ):
            return None
        part = part.transpose(0, 1)
    return part


# -- answers -------------------------------------------------------------------------------------------------------------------


def _call(func: Function, types: tuple[type, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = name_of(func)
    first: Any = args[0] if args else None
    caller = sys._getframe(1).f_back
    if caller is not None and caller.f_globals.get("__name__", "").startswith("torch."):
        break_graph(caller.f_globals["__name__"])
        _refuse_wrapper(caller.f_globals["__name__"], args)
    if name in HOOKS and _is_sliced(first):
        raise MisuseError(
            f"{_shown(first)} is divided into slices, of which each has a gradient of its own: {name.partition('.')[0]} is not "
            "for all of it; use the gradient after backward, or page the model with zero.page(experts='whole')"
        )
    if name == "_has_compatible_shallow_copy_type" and args[1].device.type != first.device.type:
        raise MisuseError(f"{_shown(first)} is paged and computes on {first.device}: it cannot be moved to {args[1].device}")
    if name in AS_IT_IS:
        return _as_it_is(name, func, args, kwargs)
    if name in REFUSED:
        raise MisuseError(f"{_shown(args)}: {name} {REFUSED[name]}; use a copy (.clone())")
    if func is torch.autograd.grad:
        return _gradients(args, kwargs)
    if torch._C._are_functorch_transforms_active():
        raise MisuseError(f"{_shown(args)} cannot be used within torch.func.grad, vmap and the like: use a copy (.clone())")
    if name in GEOMETRY or (name in LIKE and "out" not in kwargs):
        if name in LIKE:
            kwargs = {"device": device_of(_of(next(v for v in _leaves((args, kwargs)) if _is_sliced(v)))[0]), **kwargs}
        return func(*_map(args, _geometry), **_map(kwargs, _geometry))
    if name == "data.__set__":
        return _set_data(args[0], args[1])
    if name == "linear" and len(args) >= 2 and isinstance(args[1], SlicedParameter) and not _is_sliced(first):
        return _linear(*args, **kwargs)
    if name == "embedding" and len(args) >= 2 and isinstance(args[1], SlicedParameter):
        return _embedding(*args, **kwargs)
    if name in GROUPED and len(args) >= 2 and _is_sliced(args[1]):
        found = _grouped(args, kwargs)
        if found is not None:
            return found
    if _is_sliced(first):
        one_each = not _of(first)[1] and handle_of(_of(first)[0]).rows is None
        if name in ("__iter__", "unbind") and one_each and (kwargs.get("dim") or [*args, 0][1]) == 0:
            slices = slices_of(_of(first)[0])
            return iter(slices) if name == "__iter__" else tuple(slices)
        if name in ("__getitem__", "select"):
            found = _indexed(name, first, args[1:], kwargs)
            if found is not None:
                return found
        if name in VIEWS or name in CONVERSIONS:
            found = _viewed(name, func, first, tuple(args[1:]), kwargs)
            if found is not None:
                return found
        if name == "numpy":
            array = _value(first).detach().numpy(**kwargs) if not _requires_grad(first) else _value(first).numpy(**kwargs)
            array.flags.writeable = False
            return array
    if any(map(_is_sliced, _leaves(kwargs.get("out")))):
        return into(func, args, kwargs, _is_sliced, _shown)
    if name.startswith("_foreach_"):
        return _for_each(func, args, kwargs)
    return _compute(name, func, args, kwargs)


def _requires_grad(value: SlicedParameter | SlicedView) -> bool:
    parameter, path = _of(value)
    detached = any(name_of(step.func) in ("detach", "data.__get__") for step in path)
    return not detached and slices_of(parameter)[0].requires_grad


def _as_it_is(name: str, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Answer what needs no values."""
    first = args[0] if args else None
    if isinstance(first, SlicedView):
        if name == "requires_grad.__get__":
            return _requires_grad(first)
        if name.endswith((".__set__", ".__delete__")) or name == "requires_grad_":
            raise MisuseError(
                f"{_shown(first)}: {name.partition('.')[0]} of a view of a parameter in the store would be lost: use the "
                "parameter itself, or a copy (.clone())"
            )
    elif isinstance(first, SlicedParameter):
        if name == "grad.__get__":
            return gradient_of(first)
        if name in ("grad.__set__", "grad.__delete__"):
            return set_gradient(first, args[1] if name == "grad.__set__" else None)
        if name in ("requires_grad.__set__", "requires_grad_"):
            wanted = asks_for_gradient(name, args, kwargs)
            owner = handle_of(first).owner()
            if wanted and owner is not None:
                owner.refuse_training()
            for one in slices_of(first):
                one.requires_grad = wanted
    return _without_us(func, (), args, kwargs)


def _indexed(name: str, value: SlicedParameter | SlicedView, rest: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return ``value[i]`` or ``value[i, ...]``, which are of one slice, or ``value[numbers]``; None for anything else."""
    parameter, _ = _of(value)
    if name == "select":
        dim, index = (*rest, *kwargs.values()) if len(rest) + len(kwargs) == 2 else (None, None)
        if dim != 0:
            return None
        inside: tuple[Any, ...] = ()
    else:
        index, inside = (rest[0][0], rest[0][1:]) if isinstance(rest[0], tuple) and rest[0] else (rest[0], ())
    count = len(parameter)
    if isinstance(index, torch.Tensor) and index.dim() == 1 and index.dtype in (torch.int64, torch.int32) and not inside:
        if handle_of(parameter).rows is not None and isinstance(value, SlicedParameter):
            return _embedding(torch.where(index < 0, index + count, index), value)
        numbers = [_checked(number, count) for number in index.tolist()]
        if not numbers or handle_of(parameter).rows is not None or _part(value, 0) is None:
            return None
        slices = slices_of(parameter)
        chosen = torch.stack([slices[number] for number in numbers])  # whose gradients add up in this order
        return functools.reduce(lambda base, step: step(base), _of(value)[1], chosen)
    if isinstance(index, torch.Tensor) and (index.dim() or index.dtype not in (torch.int64, torch.int32)):
        return None
    if isinstance(index, bool | slice) or index is None or index is Ellipsis:
        return None
    try:
        number = operator.index(index)
    except TypeError:
        return None
    part = _part(value, _checked(number, count))
    return part if part is None or not inside else part[inside]


def _checked(index: int, count: int) -> int:
    if not -count <= index < count:
        raise IndexError(f"index {index} is out of bounds for dimension 0 with size {count}")
    return index % count


def _viewed(
    name: str, func: Function, value: SlicedParameter | SlicedView, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what ``func`` returns where that is a view, in whole or in its parts, or ``value`` itself; None otherwise."""
    parameter, path = _of(value)
    geometry = _geometry(value)
    rest = _map(args, _geometry), _map(kwargs, _geometry)
    if name in CONVERSIONS:
        like = torch.empty((), dtype=geometry.dtype, device=device_of(parameter))
        if name == "contiguous":
            return value if geometry.is_contiguous() and not args and not kwargs else None
        try:
            return value if func(like, *rest[0], **rest[1]) is like else None
        except (RuntimeError, TypeError):
            return None
    getter = name.endswith(".__get__")
    try:
        found = geometry.detach() if name == "data.__get__" else func(geometry, *rest[0], **rest[1])
    except (RuntimeError, NotImplementedError, TypeError, IndexError):
        return None  # the real one says why, or can
    memory = geometry.untyped_storage()._cdata

    def shown(view: Any, which: int | None) -> Any:
        if not isinstance(view, torch.Tensor) or view.untyped_storage()._cdata != memory:
            return None
        step = Step(torch.Tensor.detach if name == "data.__get__" else func, () if getter else args, kwargs, which)
        return value if view is geometry else SlicedView.of(parameter, (*path, step), view)

    if isinstance(found, tuple | list):
        views = [shown(view, which) for which, view in enumerate(found)]
        return None if any(view is None for view in views) else type(found)(views)
    return shown(found, None)


def _grouped(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Multiply the rows of each group with its expert's matrix. Each group that has rows fetches one expert.

    The groups are those of ``offs``, as in ``torch.nn.functional.grouped_mm``; rows after the last one are zero.
    """
    names = ("mat_a", "mat_b", "offs", "bias", "out_dtype")
    given = dict(zip(names, args, strict=False)) | {{"mat2": "mat_b"}.get(key, key): value for key, value in kwargs.items()}
    rows, matrices, ends = given["mat_a"], given["mat_b"], given.get("offs")
    others = given.get("bias"), given.get("out_dtype")
    if _is_sliced(rows) or rows.dim() != 2 or ends is None or others != (None, None) or _part(matrices, 0) is None:
        return None
    limits = [0, *ends.tolist()]
    sizes = [stop - start for start, stop in itertools.pairwise(limits)]
    left = rows.shape[0] - limits[-1]
    used = [index for index, size in enumerate(sizes) if size]
    groups = torch.split(rows, [*sizes, left])
    made = _products(groups, matrices, used)
    if left or not made:
        made.append(rows.new_zeros(left, _geometry(matrices).shape[2]))
    return torch.cat(made)


def _linear(x: torch.Tensor, weight: SlicedParameter, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply with some rows of the weight after the other, which are columns of the result."""
    rows = handle_of(weight).rows
    if rows is None:
        return torch.nn.functional.linear(x, _whole(weight), bias)
    made = [
        torch.nn.functional.linear(x, one, None if bias is None else bias[number * rows : (number + 1) * rows])
        for number, one in enumerate(slices_of(weight))
    ]
    return torch.cat(made, -1)


def _embedding(
    index: torch.Tensor,
    weight: SlicedParameter,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Look up the rows of each slice that ``index`` asks for. A row's gradients are added in the order of ``index``, as in the
    whole."""
    handle = handle_of(weight)
    if max_norm is not None or sparse:
        raise MisuseError(
            f"parameter {handle.name!r} is larger than a third of the memory budget, and divided into slices: max_norm= and "
            "sparse=True need it whole; open the store with a larger dram="
        )
    count = weight.shape[0]
    flat = index.reshape(-1)
    if handle.rows is None or not flat.numel():
        return torch.nn.functional.embedding(index, _whole(weight), padding_idx, None, 2.0, scale_grad_by_freq)
    if int(flat.min()) < 0 or int(flat.max()) >= count:
        raise IndexError("index out of range in self")  # as torch says it
    padding = None if padding_idx is None else padding_idx % count
    number = flat // handle.rows
    order = number.argsort(stable=True)
    asked = torch.bincount(number).tolist()
    made: list[torch.Tensor] = []
    for which, mine in enumerate(torch.split(order, asked)):
        if asked[which]:
            begin, one = which * handle.rows, slices_of(weight)[which]
            here = None if padding is None or not begin <= padding < begin + handle.rows else padding - begin
            made.append(torch.nn.functional.embedding(flat[mine] - begin, one, here, None, 2.0, scale_grad_by_freq))
    return torch.cat(made)[order.argsort()].view(*index.shape, weight.shape[1])


def _products(
    groups: Sequence[torch.Tensor], matrices: SlicedParameter | SlicedView, used: Sequence[int]
) -> list[torch.Tensor]:
    """Multiply the groups ``used`` with their matrices. These slices are read at the same time, and not each one when it is
    used; where no graph is recorded, as many of them as may be are held at a time."""

    def product(index: int) -> torch.Tensor:
        return torch.mm(groups[index], _matrix(matrices, index))

    parameter = _of(matrices)[0]
    slices = [slices_of(parameter)[index] for index in used]
    owner = handle_of(parameter).owner()
    if owner is None or len(used) < 2:
        return [product(index) for index in used]
    owner.coming(slices)
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return [product(index) for index in used]
    count = max(1, owner.room // max(owner.nbytes([one]) for one in slices))
    made: list[torch.Tensor] = []
    for begin in range(0, len(used), count):
        with owner.accessing(slices[begin : begin + count], Access.READ):
            made += [product(index) for index in used[begin : begin + count]]
    return made


def _matrix(value: SlicedParameter | SlicedView, index: int) -> torch.Tensor:
    part = _part(value, index)
    assert part is not None
    return part


def _set_data(value: Any, data: Any) -> None:
    """Write ``data`` to what its ``.data`` is assigned to. The values are copied."""
    if data is value:
        return
    if not isinstance(data, torch.Tensor) or (data.shape, data.dtype) != (value.shape, value.dtype):
        what = f"{tuple(data.shape)} of {data.dtype}" if isinstance(data, torch.Tensor) else type(data).__name__
        raise MisuseError(
            f"{_shown(value)} has shape {tuple(value.shape)} of {value.dtype} in the store and cannot be given .data of "
            f"{what}: page a model that has them"
        )
    if data.device.type != device_of(_of(value)[0]).type:
        raise MisuseError(f"{_shown(value)} computes on {device_of(_of(value)[0])}, and cannot be moved to {data.device}")
    if isinstance(data, SlicedView) and data.parameter is _of(value)[0] and data.geometry.shape == value.shape:
        return  # the same elements: written to already
    if isinstance(data, SlicedParameter | SlicedView | PagedParameter | PagedView):
        raise MisuseError(
            f"{_shown(value)} would share its memory with another parameter, and they are apart in the store: give it a copy "
            "(.clone()), or tie the modules, with one Parameter object, before zero.page"
        )
    with torch.no_grad():
        value.copy_(data)


def _gradients(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call ``torch.autograd.grad`` with the slices in place of parameters."""
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs = given.pop("inputs")
    sources = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    if any(_is_sliced(value) for value in _leaves(given)) or any(isinstance(value, SlicedView) for value in sources):
        raise MisuseError(f"{_shown((args, kwargs))}: torch.autograd.grad takes parameters as inputs, not views of them")
    zeros, allowed = given.pop("materialize_grads", False), given.pop("allow_unused", None)
    parts = [slices_of(one) if isinstance(one, SlicedParameter) else [one] for one in sources]
    found = iter(torch.autograd.grad(inputs=[part for one in parts for part in one], allow_unused=True, **given))
    made: list[torch.Tensor | None] = []
    for one, mine in zip(sources, parts, strict=True):
        gradients = [next(found) for _ in mine]
        if all(gradient is None for gradient in gradients):
            if not (zeros or allowed):
                raise RuntimeError(
                    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
                    "this is the desired behavior."
                )
            made.append(torch.zeros_like(one) if zeros else None)
        elif isinstance(one, SlicedParameter):
            filled = [torch.zeros_like(p) if g is None else g for p, g in zip(mine, gradients, strict=True)]
            made.append(torch.stack(filled) if handle_of(one).rows is None else torch.cat(filled))
        else:
            made.append(gradients[0])
    return tuple(made)


def _for_each(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` for one element of its lists after the other."""
    length = next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, list | tuple))
    if length == 1:
        return _compute(name_of(func), func, args, kwargs)
    results: list[Any] = []
    for index in range(length):

        def one(value: Any, index: int = index) -> Any:
            return [value[index]] if isinstance(value, list | tuple) and len(value) == length else value

        results.extend(func(*map(one, args), **{key: one(value) for key, value in kwargs.items()}) or ())
    return results or None


def _compute(name: str, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` with copies, and write back those that it writes to."""
    written: list[Any] = []
    if _writes(name):
        written.append(args[0] if args else [kwargs[key] for key in ("self", "input", "tensor") if key in kwargs])
    targets = [value for value in _leaves(written) if _is_sliced(value)]
    initialises = getattr(func, "__module__", "") == nn.init.__name__  # which records nothing
    if targets and not initialises and torch.is_grad_enabled() and any(_requires_grad(value) for value in targets):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")  # as torch says it
    copies: dict[int, torch.Tensor] = {}
    wholes: dict[int, torch.Tensor] = {}

    def real(value: Any) -> Any:
        if not _is_sliced(value):
            return value
        if id(value) not in copies:
            parameter, path = _of(value)
            if id(parameter) not in wholes:
                wholes[id(parameter)] = _whole(parameter)
            copies[id(value)] = functools.reduce(lambda base, step: step(base), path, wholes[id(parameter)])
        return copies[id(value)]

    result = func(*_map(args, real), **_map(kwargs, real))
    for parameter in {id(_of(value)[0]): _of(value)[0] for value in targets}.values():
        _write(parameter, wholes[id(parameter)])
    return next((value for value in targets if copies[id(value)] is result), result)


def _shown(values: Any) -> str:
    """Return how errors name the first parameter among ``values``."""
    found = next((value for value in _leaves(values) if _is_sliced(value)), None)
    return "a parameter" if found is None else f"parameter {handle_of(_of(found)[0]).name!r}"


def _with_slices(module: Any, name: str) -> None:
    """Have a function of torch with an argument ``inputs`` take slices where it is given sliced parameters."""
    takes: Callable[..., Any] = getattr(module, name)

    @functools.wraps(takes)
    def take(*args: Any, **kwargs: Any) -> Any:
        inputs = kwargs.get("inputs")
        if inputs is not None:
            given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
            if any(isinstance(one, SlicedParameter) for one in given):
                kwargs["inputs"] = [
                    part for one in given for part in (slices_of(one) if isinstance(one, SlicedParameter) else [one])
                ]
        return takes(*args, **kwargs)

    setattr(module, name, take)


_with_slices(torch.autograd, "backward")
