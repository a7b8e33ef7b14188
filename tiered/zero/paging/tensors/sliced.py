"""Parameters that are divided into slices: experts, of which each has a slice, and the weights of large embeddings and linear
layers, which have some rows in each slice.

Each slice along the first dimension is a parameter by itself, in a unit of its own (``units.Sliced``). The parameter that the
model has is made of them. It has the class ``PagedParameter`` as long as the model is paged, and no memory. What it answers
itself:

- ``parameter[i]`` is slice i, or a row of a slice: what follows fetches one expert, and its gradient goes to one expert.
- ``torch.nn.functional.grouped_mm`` multiplies with the slices that have rows, one after the other; ``linear`` and
  ``embedding`` use one slice of rows after the other.

Everything else gets a copy of all slices, through which gradients go to each; what writes has its copy written back.

The gradient (``DividedGradient``) is there while any slice has one. A slice without one has a gradient of zero, as in the
whole.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from tiered.errors import MisuseError
from tiered.types import Access
from tiered.zero.paging.tensors.functions import SCALING, asks_for_gradient, name_of, order_of
from tiered.zero.paging.tensors.parameters import paged_class, refuse_replacing, refuse_sharing
from tiered.zero.paging.tensors.sources import Call, ParameterOwner, Source, without_us
from tiered.zero.paging.tensors.stored import StoredTensor, is_without_memory

__all__ = ["Divided", "Handle", "norm_of_parts", "slice_up", "slices_of"]

HOOKS = {
    *("register_hook", "register_post_accumulate_grad_hook", "get_gradient_edge", "retain_grad"),
    *(f"{name}.__set__" for name in ("_backward_hooks", "_post_accumulate_grad_hooks", "_grad")),
}
"""Functions that ask for the one gradient of a parameter, of which each slice has a part."""

GROUPED = {"grouped_mm", "_grouped_mm", "grouped_mm_fallback"}


def slice_up(parameter: nn.Parameter, handle: Handle, device: torch.device) -> None:
    """Make ``parameter`` one that is made of the slices of ``handle``. It has no memory from here on."""
    with torch.inference_mode(False):
        one = torch.full((), float("nan"), dtype=parameter.dtype, device=device)
        parameter.data = one.expand(parameter.shape)
    parameter._tiered = handle  # type: ignore[attr-defined]
    parameter.__class__ = paged_class(type(parameter))


class Handle(Protocol):
    """What leads from a sliced parameter to its slices."""

    name: str
    slices: list[nn.Parameter]
    views: MutableMapping[int, Any]
    rows: int | None
    """How many rows each slice has, but for the last; None: one, without that dimension."""

    def owner(self) -> ParameterOwner | None:
        """Return the pager, or None where the model is gone."""


def handle_of(parameter: nn.Parameter) -> Handle:
    handle: Handle = parameter.__dict__["_tiered"]
    return handle


def slices_of(parameter: nn.Parameter) -> list[nn.Parameter]:
    return handle_of(parameter).slices


def device_of(parameter: nn.Parameter) -> torch.device:
    return slices_of(parameter)[0].device


def divided(parameter: nn.Parameter, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the views of ``whole`` that the slices have the values of."""
    rows = handle_of(parameter).rows
    return whole.unbind() if rows is None else torch.split(whole, rows)


def meta_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return a tensor on the meta device with the size, strides and type of the whole parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


class Divided(Source):
    """A parameter that is divided into slices. Its values are a copy of all of them."""

    @property
    def shown(self) -> str:
        return f"parameter {handle_of(self.parameter).name!r}"

    @property
    def device(self) -> torch.device:
        return device_of(self.parameter)

    @property
    def views(self) -> MutableMapping[int, Any] | None:
        return handle_of(self.parameter).views

    def divided_into(self) -> Sequence[Source]:
        slices: list[Any] = slices_of(self.parameter)
        return [one.source for one in slices if is_without_memory(one)]

    def like(self) -> torch.Tensor:
        made = meta_of(self.parameter)
        return made.requires_grad_() if slices_of(self.parameter)[0].requires_grad else made

    def whole(self) -> torch.Tensor:
        """Return a copy of all slices, through which gradients go to each of them."""
        slices = slices_of(self.parameter)
        if torch.is_grad_enabled() and any(one.requires_grad for one in slices):
            join = torch.stack if handle_of(self.parameter).rows is None else torch.cat
            return join([one.clone() for one in slices])
        whole = torch.empty(meta_of(self.parameter).shape, dtype=slices[0].dtype, device=slices[0].device)
        for target, one in zip(divided(self.parameter, whole), slices, strict=True):
            target.copy_(one)
        return whole

    @torch.no_grad()
    def write(self, whole: torch.Tensor) -> None:
        for one, values in zip(slices_of(self.parameter), divided(self.parameter, whole), strict=True):
            one.copy_(values)

    def refuse_in_place(self, value: StoredTensor, call: Call) -> None:
        initialises = getattr(call.func, "__module__", "") == nn.init.__name__  # which records nothing
        if not initialises and torch.is_grad_enabled() and value.requires_grad:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")  # as torch says it

    def refuse_data(self, value: StoredTensor, data: Any) -> None:
        refuse_sharing(self, data)

    def edges(self) -> list[Any]:
        return [without_us(get_gradient_edge, (), (one,), {}) for one in slices_of(self.parameter)]

    def joined(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        slices = slices_of(self.parameter)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(slices, parts, strict=True)]
        return torch.stack(filled) if handle_of(self.parameter).rows is None else torch.cat(filled)

    def printed(self, value: StoredTensor) -> str | None:
        if value.step is None:
            return f"Parameter containing:\n{self.whole().detach()!r}"
        return None

    def itself(self, value: StoredTensor, call: Call) -> Any:
        name, args = call.name, call.args
        recorded = name == "grad_fn.__get__" and value.step is not None and value.geometry.grad_fn is not None
        if name in HOOKS or recorded:
            whole = "page the model with zero.page(paging=zero.Paging(experts='whole'))"
            if handle_of(self.parameter).rows is not None:
                whole = "open the store with a larger dram=, in which it is not divided"
            raise MisuseError(
                f"{self.shown} is divided into slices, of which each has a gradient of its own: {name.partition('.')[0]} is "
                f"not for all of it; use the gradient after backward, or {whole}"
            )
        if name == "_has_compatible_shallow_copy_type":
            refuse_replacing(self, value, args[1])
        if value.step is not None:
            if name == "requires_grad.__get__":
                return value.geometry.requires_grad or value.has_own_gradient()
            if value.geometry.requires_grad and (name.endswith((".__set__", ".__delete__")) or name == "requires_grad_"):
                raise MisuseError(
                    f"{self.shown}: {name.partition('.')[0]} of a view of a parameter in the store would be lost: use the "
                    "parameter itself, or a copy (.clone())"
                )
        elif name == "grad.__get__":
            return gradient_of(self.parameter)
        elif name in ("grad.__set__", "grad.__delete__"):
            return set_gradient(self.parameter, args[1] if name == "grad.__set__" else None)
        elif name in ("requires_grad.__set__", "requires_grad_"):
            wanted = asks_for_gradient(name, args, call.kwargs)
            owner = handle_of(self.parameter).owner()
            if wanted and owner is not None:
                owner.refuse_training(self.parameter)
            for one in slices_of(self.parameter):
                one.requires_grad = wanted
        return call.as_it_is()

    def answer(self, value: StoredTensor, call: Call) -> Any:
        name, args, kwargs = call.name, call.args, call.kwargs
        first: Any = args[0] if args else None
        if any(_is_divided(one) and one.has_own_gradient() for one in args[:2]):
            return NotImplemented  # the slices' gradients are not its own
        if name in ("linear", "embedding") and len(args) >= 2 and _is_whole(args[1]) and not _is_divided(first):
            return _linear(*args, **kwargs) if name == "linear" else _embedding(*args, **kwargs)
        if name in GROUPED and len(args) >= 2 and _is_divided(args[1]):
            return _grouped(args, kwargs)
        if not _is_divided(first):
            return NotImplemented
        if name in ("__iter__", "unbind") and _is_whole(first) and handle_of(first.source.parameter).rows is None:
            slices = slices_of(first.source.parameter)
            if (kwargs.get("dim") or [*args, 0][1]) == 0:
                return iter(slices) if name == "__iter__" else tuple(slices)
        if name in ("__getitem__", "select"):
            return _indexed(name, first, args[1:], kwargs)
        return NotImplemented


def _is_divided(value: Any) -> bool:
    return isinstance(value, StoredTensor) and isinstance(value.source, Divided)


def _is_whole(value: Any) -> bool:
    return _is_divided(value) and value.step is None


def _part(value: StoredTensor, index: int) -> torch.Tensor | None:
    """Return ``value[index]`` as a view of one slice; None where it is not one, because a step of ``value`` does more than to
    swap the dimensions after the first."""
    parameter, path = value.source.parameter, value.path
    rows = handle_of(parameter).rows
    part: torch.Tensor = slices_of(parameter)[index] if rows is None else slices_of(parameter)[index // rows][index % rows]
    for step in path:
        name = name_of(step.func)
        if name in ("detach", "data.__get__"):
            part = part.detach()
            continue
        dims = [*step.args[1:], *step.kwargs.values()]
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


def _indexed(name: str, value: StoredTensor, rest: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return ``value[i]`` or ``value[i, ...]``, which are of one slice, or ``value[numbers]``; else NotImplemented."""
    parameter: Any = value.source.parameter
    if name == "select":
        dim, index = (*rest, *kwargs.values()) if len(rest) + len(kwargs) == 2 else (None, None)
        if dim != 0:
            return NotImplemented
        inside: tuple[Any, ...] = ()
    else:
        index, inside = (rest[0][0], rest[0][1:]) if isinstance(rest[0], tuple) and rest[0] else (rest[0], ())
    count = len(parameter)
    if isinstance(index, torch.Tensor) and index.dim() == 1 and index.dtype in (torch.int64, torch.int32) and not inside:
        if handle_of(parameter).rows is not None and _is_whole(value):
            return _embedding(torch.where(index < 0, index + count, index), value)
        numbers = [_checked(number, count) for number in index.tolist()]
        if not numbers or handle_of(parameter).rows is not None or _part(value, 0) is None:
            return NotImplemented
        slices = slices_of(parameter)
        chosen = torch.stack([slices[number] for number in numbers])  # whose gradients add up in this order
        return functools.reduce(lambda base, step: step(value.source, base, base), value.path, chosen)
    if isinstance(index, torch.Tensor) and (index.dim() or index.dtype not in (torch.int64, torch.int32)):
        return NotImplemented
    if isinstance(index, bool | slice) or index is None or index is Ellipsis:
        return NotImplemented
    try:
        number = operator.index(index)
    except TypeError:
        return NotImplemented
    part = _part(value, _checked(number, count))
    return NotImplemented if part is None else part[inside] if inside else part


def _checked(index: int, count: int) -> int:
    if not -count <= index < count:
        raise IndexError(f"index {index} is out of bounds for dimension 0 with size {count}")
    return index % count


def _grouped(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Multiply the rows of each group with its expert's matrix. Each group that has rows fetches one expert.

    The groups are those of ``offs``, as in ``torch.nn.functional.grouped_mm``; rows after the last one are zero.
    """
    names = ("mat_a", "mat_b", "offs", "bias", "out_dtype")
    given = dict(zip(names, args, strict=False)) | {{"mat2": "mat_b"}.get(key, key): value for key, value in kwargs.items()}
    rows, matrices, ends = given["mat_a"], given["mat_b"], given.get("offs")
    others = given.get("bias"), given.get("out_dtype")
    if _is_divided(rows) or rows.dim() != 2 or ends is None or others != (None, None) or _part(matrices, 0) is None:
        return NotImplemented
    limits = [0, *_limits(ends, rows.shape[0])]
    sizes = [stop - start for start, stop in itertools.pairwise(limits)]
    left = rows.shape[0] - limits[-1]
    used = [index for index, size in enumerate(sizes) if size]
    groups = torch.split(rows, [*sizes, left])
    made = _products(groups, matrices, used)
    if left or not made:
        made.append(rows.new_zeros(left, matrices.shape[2]))
    return torch.cat(made)


def _linear(x: torch.Tensor, weight: StoredTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply with some rows of the weight after the other, which are columns of the result."""
    rows = handle_of(weight.source.parameter).rows
    if rows is None:
        return torch.nn.functional.linear(x, weight.source.whole(), bias)
    made = [
        torch.nn.functional.linear(x, one, None if bias is None else bias[number * rows : (number + 1) * rows])
        for number, one in enumerate(slices_of(weight.source.parameter))
    ]
    return torch.cat(made, -1)


def _embedding(
    index: torch.Tensor,
    weight: StoredTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Look up the rows of each slice that ``index`` asks for. A row's gradients are added in the order of ``index``, as in the
    whole."""
    handle = handle_of(weight.source.parameter)
    if max_norm is not None or sparse:
        raise MisuseError(
            f"parameter {handle.name!r} is larger than a third of the memory budget, and divided into slices: max_norm= and "
            "sparse=True need it whole; open the store with a larger dram="
        )
    count = weight.shape[0]
    flat = index.reshape(-1)
    if handle.rows is None or not flat.numel():
        return torch.nn.functional.embedding(index, weight.source.whole(), padding_idx, None, 2.0, scale_grad_by_freq)
    if not flat.is_meta and (int(flat.min()) < 0 or int(flat.max()) >= count):
        raise IndexError("index out of range in self")  # as torch says it
    padding = None if padding_idx is None else padding_idx % count
    number = flat // handle.rows
    order = number.argsort(stable=True)
    asked = _evenly(flat.numel(), -(-count // handle.rows)) if flat.is_meta else torch.bincount(number).tolist()
    made: list[torch.Tensor] = []
    for which, mine in enumerate(torch.split(order, asked)):
        if asked[which]:
            begin, one = which * handle.rows, slices_of(weight.source.parameter)[which]
            here = None if padding is None or not begin <= padding < begin + handle.rows else padding - begin
            made.append(torch.nn.functional.embedding(flat[mine] - begin, one, here, None, 2.0, scale_grad_by_freq))
    return torch.cat(made)[order.argsort()].view(*index.shape, weight.shape[1])


def _limits(ends: torch.Tensor, rows: int) -> list[int]:
    """Return where groups of so many rows end."""
    if ends.is_meta:
        return list(itertools.accumulate(_evenly(rows, ends.numel())))
    found: list[int] = ends.tolist()
    return found


def _evenly(count: int, parts: int) -> list[int]:
    """Return how many of ``count`` each part gets where there are no values that say so, as on the meta device: as many as the
    others, or one more."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def _products(groups: Sequence[torch.Tensor], matrices: StoredTensor, used: Sequence[int]) -> list[torch.Tensor]:
    """Multiply the groups ``used`` with their matrices. These slices are read at the same time, and not each one when it is
    used; where no graph is recorded, as many of them as may be are held at a time."""

    def product(index: int) -> torch.Tensor:
        return torch.mm(groups[index], _matrix(matrices, index))

    parameter = matrices.source.parameter
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


def _matrix(value: StoredTensor, index: int) -> torch.Tensor:
    part = _part(value, index)
    assert part is not None
    return part


# -- gradients -----------------------------------------------------------------------------------------------------------------


class DividedGradient(Source):
    """Gradient of a parameter that is divided: that of each slice, or zero where a slice has none. Its norm is the norm of the
    norms of its slices."""

    another = "assign parameter.grad"

    @property
    def shown(self) -> str:
        return f"the gradient of {handle_of(self.parameter).name!r}"

    @property
    def device(self) -> torch.device:
        return device_of(self.parameter)

    def like(self) -> torch.Tensor:
        return meta_of(self.parameter)

    def parts(self) -> list[torch.Tensor]:
        """Return the gradients of the slices that have one. Raises MisuseError where none has."""
        found = [one.grad for one in slices_of(self.parameter) if one.grad is not None]
        shown = self.parameter.__dict__.get("_gradient")
        if not found or shown is None or shown.source is not self:
            raise MisuseError(
                f"this gradient of {handle_of(self.parameter).name!r} is gone, for parameter.grad is another one or None: keep "
                "parameter.grad.clone()"
            )
        return found

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    @torch.no_grad()
    def whole(self) -> torch.Tensor:
        self.parts()
        slices = slices_of(self.parameter)
        whole = torch.zeros(meta_of(self.parameter).shape, dtype=slices[0].dtype, device=slices[0].device)
        for target, one in zip(divided(self.parameter, whole), slices, strict=True):
            if one.grad is not None:
                target.copy_(one.grad)
        return whole

    @torch.no_grad()
    def write(self, whole: torch.Tensor) -> None:
        self.parts()
        for one, values in zip(slices_of(self.parameter), divided(self.parameter, whole), strict=True):
            if one.grad is None:
                one.grad = values.clone()
            else:
                one.grad.copy_(values)

    @torch.no_grad()
    def answer(self, value: StoredTensor, call: Call) -> Any:
        name, func, _, args, kwargs = call
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            parts = [part for one in args[0] for part in (one.source.parts() if _is_gradient(one) else [one])]
            return func(parts, *args[1:], **kwargs)
        listed = name.startswith("_foreach_")
        if listed and (not isinstance(args[0], list | tuple) or len(args[0]) != 1):
            return NotImplemented
        first: Any = (args[0][0] if listed else args[0]) if args else None
        if not _is_gradient(first):
            return NotImplemented
        order = order_of(name, args, kwargs)
        if order is not None:
            norm = self._norm(order, listed)
            return [norm] if listed else norm
        if name in SCALING or name in ("zero_", "_foreach_zero_"):
            if not _is_number((*args[1:], *kwargs.values())):
                return NotImplemented
            for part in first.source.parts():
                func([part] if listed else part, *args[1:], **kwargs)
            return None if listed else first
        return NotImplemented

    def _norm(self, order: float, listed: bool) -> torch.Tensor:
        """Return the norm of the norms of all slices; ``listed``: of each by torch's kernel for lists."""
        norms = [torch._foreach_norm([p], order)[0] if listed else torch.linalg.vector_norm(p, order) for p in self.parts()]
        return norm_of_parts(norms, len(slices_of(self.parameter)), order)


def _is_gradient(value: Any) -> bool:
    return isinstance(value, StoredTensor) and isinstance(value.source, DividedGradient) and value.is_all()


def _is_number(values: Sequence[Any]) -> bool:
    return all(
        isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0 and type(value) is torch.Tensor)
        for value in values
    )


def gradient_of(parameter: nn.Parameter) -> StoredTensor | None:
    """Return what ``parameter.grad`` is: None while no slice has a gradient."""
    if all(one.grad is None for one in slices_of(parameter)):
        parameter.__dict__.pop("_gradient", None)
        return None
    made: StoredTensor | None = parameter.__dict__.get("_gradient")
    if made is None:
        made = parameter.__dict__["_gradient"] = StoredTensor.of(DividedGradient(parameter), meta_of(parameter))
    return made


def set_gradient(parameter: nn.Parameter, value: Any) -> None:
    if value is None:
        parameter.__dict__.pop("_gradient", None)
        for one in slices_of(parameter):
            one.grad = None
        return
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        raise RuntimeError(f"assigned grad has another shape or type than parameter {handle_of(parameter).name!r}")
    if _is_gradient(value) and value.source.parameter is parameter:  # type: ignore[attr-defined]
        value.source.parts()  # type: ignore[attr-defined]
        return
    values = value.values() if isinstance(value, StoredTensor) else value
    parameter.__dict__.pop("_gradient", None)
    for one, mine in zip(slices_of(parameter), divided(parameter, values.detach()), strict=True):
        one.grad = mine  # a view: what is written to ``value`` before the step counts, as it does for torch


def norm_of_parts(norms: Sequence[torch.Tensor], count: int, order: float) -> torch.Tensor:
    """Return the norm, 0-d, of a tensor of ``count`` parts: some have ``norms`` of that ``order``, the others are zeros."""
    stacked = torch.stack(list(norms))
    if len(norms) < count:
        nothing = torch.linalg.vector_norm(torch.zeros_like(stacked[:1]), order)
        stacked = torch.cat([stacked, nothing[None]])
    found: torch.Tensor = stacked.sum() if order == 0 else torch.linalg.vector_norm(stacked, order)
    return found
