"""Show gradients that are in the store in ``parameter.grad``, as tensors that torch computes with.

A ``StoredGradient`` has the shape, strides and type of its gradient, and no memory. Torch's functions reach it below autograd,
one operation at a time:

- One that reads is given a copy of the values, and one that writes has its copy written back: at once, so that nothing is lost.
- A view is a ``StoredGradient``, too, which knows how to make itself of the whole.
- Multiplication by one number only notes the number, which the next use multiplies by (``UnitGradients.scaled``); a norm is the
  one that was computed when the gradient arrived. So clipping and unscaling need not read.
- A list is gone through one gradient at a time: one copy is in memory, however many gradients there are. Its norms take one
  collective where there are ranks.

A gradient leads to its model by its parameter's handle, and keeps neither. It computes while ``parameter.grad`` shows it.
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils._foreach_utils
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_flatten, tree_map

from tiered import MisuseError, TieredError
from tiered.zero.intent import Intent, decide
from tiered.zero.paging.storage import CheckpointRecord
from tiered.zero.paging.units import Placement

__all__ = ["Graded", "SpentGradient", "StoredGradient", "synchronised", "whole_norms"]

_aten = torch.ops.aten


class Stored(Protocol):
    """Gradients of one unit: what ``UnitGradients`` does for a ``StoredGradient``."""

    def shows(self, placement: Placement, origin: StoredGradient) -> bool:
        """Return whether ``parameter.grad`` is the stored gradient ``origin``, or a view of it."""
        ...

    def is_shown(self, placement: Placement) -> bool:
        """Return whether ``parameter.grad`` is the stored gradient, and not a view of it that somebody assigned."""
        ...

    def refuse_interrupted(self, placement: Placement) -> None: ...

    def norm(self, placement: Placement, order: float, listed: bool = False) -> torch.Tensor: ...

    def scaled(self, placement: Placement, factor: torch.Tensor) -> Callable[[], None]: ...

    def unscaled(self, placement: Placement, factor: torch.Tensor) -> tuple[bool, Callable[[], None]]: ...

    def is_finite(self, placement: Placement) -> bool: ...

    def overwrite(self, placement: Placement, values: torch.Tensor) -> None: ...


class PagedUnit(Protocol):
    """Unit of a paged model."""

    @property
    def gradients(self) -> Stored: ...

    def stored_gradient(self, placement: Placement) -> torch.Tensor:
        """Return a copy of the whole gradient. All ranks call it together."""
        ...


class Sync(Protocol):
    """What gradients need of other processes."""

    def synchronise(self) -> None: ...

    def norms(self, partial: torch.Tensor, order: float) -> torch.Tensor: ...


class Divided(Protocol):
    """How many processes a model is divided among."""

    @property
    def shares(self) -> int: ...


class PagedModel(Protocol):
    """Model whose gradients these are."""

    intent: Intent
    checkpoint: CheckpointRecord

    @property
    def computing(self) -> bool: ...

    @property
    def partition(self) -> Divided: ...

    @property
    def gradient_sync(self) -> Sync: ...

    def start(self) -> None:
        """Make the model ready for a use outside of forward and backward."""
        ...


Graded = tuple[PagedModel, PagedUnit, Placement]
"""Where a gradient is: the pager, the unit and the placement of its parameter."""


def synchronised(models: Iterable[PagedModel]) -> None:
    """Have the gradients of ``models`` as ``step()`` would use them. All ranks call it together.

    Raises MisuseError within forward and backward of a model that is divided among ranks, where each has its own part yet.
    """
    for model in dict.fromkeys(models):
        model.start()
        if not model.computing:
            model.gradient_sync.synchronise()
        elif model.partition.shares > 1:
            raise MisuseError(
                "within forward and backward each rank has gradients of its own, whose mean is not there yet: use them "
                "after backward"
            )


def whole_norms(graded: Sequence[Graded], order: float, *, listed: bool) -> list[torch.Tensor]:
    """Return the norm of each whole gradient, 0-d; ``listed``: by torch's kernel for lists of tensors. With ranks all call it
    together; it takes one collective for each model."""
    norms: list[torch.Tensor | None] = [None] * len(graded)
    for model in dict.fromkeys(model for model, _, _ in graded):
        mine = [index for index, (home, _, _) in enumerate(graded) if home is model]
        here = [graded[index][1].gradients.norm(graded[index][2], order, listed) for index in mine]
        if model.partition.shares > 1:
            whole = model.gradient_sync.norms(torch.stack([norm.double() for norm in here]), order)
            here = [norm.to(part.dtype) for norm, part in zip(whole, here, strict=True)]
        for index, norm in zip(mine, here, strict=True):
            norms[index] = norm
    return [norm for norm in norms if norm is not None]


class View(NamedTuple):
    """Operation that makes a view, and which of its results is meant (None: there is one)."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    which: int | None = None

    def __call__(self, base: torch.Tensor) -> torch.Tensor:
        made = self.func(base, *self.args, **self.kwargs)
        result: torch.Tensor = made if self.which is None else made[self.which]
        return result


class StoredGradient(torch.Tensor):
    """Gradient of a parameter that is in the store. It computes as an ordinary tensor does, bit for bit; what is written to it
    is in the store when the call returns.

    ``cpu()``, ``clone()`` and arithmetic give ordinary tensors. Raises MisuseError once the gradient is gone (``zero_grad``).
    """

    _placement: weakref.ref[Placement]
    parameter_name: str
    _origin: StoredGradient | None
    path: tuple[View, ...]
    """How this is made of the whole gradient."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, placement: Placement) -> StoredGradient:
        made: StoredGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            placement.shape,
            strides=placement.stride,
            dtype=placement.dtype,
            device=placement.parameter.device,
        )
        made._placement, made.parameter_name = weakref.ref(placement), placement.name
        made._origin, made.path = None, ()
        return made

    @property
    def origin(self) -> StoredGradient:
        """The whole gradient: this object, but for views and aliases."""
        return self if self._origin is None else self._origin

    def _viewed(self, view: View) -> Any:
        """Return what ``view`` makes of this, one object or several."""
        like = view(self._like())
        if isinstance(like, list | tuple):
            return [self._shaped(one, view._replace(which=index)) for index, one in enumerate(like)]
        return self._shaped(like, view)

    def _like(self) -> torch.Tensor:
        """Return a tensor without values of the same shape and strides, and in the same place of the whole."""
        whole = self.origin
        like = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device="meta")
        return functools.reduce(lambda base, view: view(base), self.path, like)

    def _shaped(self, like: torch.Tensor, *view: View) -> StoredGradient:
        made: StoredGradient = torch.Tensor._make_wrapper_subclass(
            StoredGradient,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=self.device,
        )
        made._placement, made.parameter_name = self._placement, self.parameter_name
        made._origin, made.path = self.origin, (*self.path, *view)
        return made

    # -- what torch does not dispatch --------------------------------------------------------------------------------------

    def values(self) -> torch.Tensor:
        """Return a copy of the values in ordinary memory. All ranks call it together."""
        with torch.no_grad():
            synchronised([self._found()[0]])
            return _Copies().of(self)

    def collected(self) -> torch.Tensor:
        """Return a copy of the values, because this was assigned to another parameter's ``grad``, or is a view of its own."""
        if self._found()[0].partition.shares > 1:
            raise MisuseError(
                f"a gradient of {self.parameter_name!r}, of which each rank has a share, was assigned to a parameter's grad: "
                "assign grad.clone()"
            )
        with torch.no_grad():
            return _Copies().of(self)

    def is_whole(self) -> bool:
        """Return whether this is the stored gradient, and ``parameter.grad`` shows it as it is."""
        _, unit, placement = self._found()
        return not self.path and unit.gradients.is_shown(placement)

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
        return copy.deepcopy(self.values(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by copy and pickle."""
        return self.values().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __format__(self, spec: str) -> str:
        return format(self.values(), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub misnames it
        """Return what torch prints; where ranks would have to be asked, or there are no values, what this is."""
        try:
            if self._found()[0].partition.shares == 1:
                return repr(self.values())
        except TieredError:
            pass
        return f"{type(self).__name__}(of={self.parameter_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

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
                f"the gradient of {self.parameter_name!r} is {tuple(self.shape)}, {self.dtype}; its data cannot become "
                f"{tuple(values.shape)}, {values.dtype}: assign parameter.grad"
            )
        with torch.no_grad():
            self.copy_(values)

    # -- what torch dispatches ---------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the classmethod
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, StoredGradient):
            if func in (_aten.detach.default, _aten.alias.default):
                first._refuse(func)
                return first._shaped(first)
            if func is _aten.detach_.default:
                return first
            if func.is_view:
                first._refuse(func)
                return first._viewed(View(func, tuple(args[1:]), kwargs))
            if _makes_another(func):
                like = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=first.device)
                return func(like, *args[1:], **kwargs)
        stored = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, StoredGradient)]
        for one in stored:
            one._refuse(func)
        with enable_reentrant_dispatch():  # autograd is as the caller has it; what an interruption left may need it
            synchronised([one._found()[0] for one in stored])
        return _dispatched(func, args, kwargs)

    def _refuse(self, func: object) -> None:
        """Raise MisuseError if ``func`` cannot compute with this."""

    def _found(self) -> Graded:
        """Return where the gradient is. Raises MisuseError where it is gone, InterruptedStep where it is not right."""
        placement = self._placement()
        handle = None if placement is None else getattr(placement.parameter, "_tiered", None)
        found: Graded | None = None if handle is None else handle.resolve()
        if found is None:
            raise MisuseError(f"the model of {self.parameter_name!r} is gone, with its gradients: keep parameter.grad.clone()")
        _, unit, placement = found
        unit.gradients.refuse_interrupted(placement)
        if not unit.gradients.shows(placement, self.origin):
            raise MisuseError(
                f"this gradient of {self.parameter_name!r} is gone, for parameter.grad is another one or None: keep "
                "parameter.grad.clone()"
            )
        return found


class SpentGradient(StoredGradient):
    """Marker for a gradient that is gone, because its parameter was updated with it during backward. Computing with it raises
    MisuseError."""

    def _refuse(self, func: object) -> None:
        raise self._gone(f"so {func} cannot compute with it")

    def _found(self) -> Graded:
        raise self._gone("so it has no values")

    def _gone(self, consequence: str) -> MisuseError:
        return MisuseError(
            f"{self.parameter_name!r} was updated during backward, and its gradient is gone, {consequence}: clipping, loss "
            'scaling and accumulation need update="on_fetch"'
        )


# So that torch's functions take their list forms, which read one gradient at a time and ask other ranks once. As for DTensor.
_FOREACH: list[type] = getattr(torch.utils._foreach_utils, "_foreach_supported_types", [])
_FOREACH.extend((StoredGradient, SpentGradient))


class _Copies:
    """Copies of the whole gradients that one operation computes with: one of each, however many views of it there are."""

    def __init__(self) -> None:
        self._copies: dict[Placement, tuple[PagedUnit, torch.Tensor]] = {}
        self._made: dict[int, tuple[torch.Tensor, StoredGradient]] = {}

    def of(self, stored: StoredGradient) -> torch.Tensor:
        """Return the values of ``stored``, as memory of the copy of its gradient."""
        _, unit, placement = stored._found()
        if placement not in self._copies:
            self._copies[placement] = unit, unit.stored_gradient(placement)
        made = functools.reduce(lambda base, view: view(base), stored.path, self._copies[placement][1])
        self._made[id(made)] = made, stored
        return made

    def plain(self, value: Any) -> Any:
        return self.of(value) if isinstance(value, StoredGradient) else value

    def restored(self, value: Any) -> Any:
        """Return the gradient that ``value`` is the copy of, if it is one."""
        found = self._made.get(id(value))
        return value if found is None else found[1]

    def write_back(self, written: Iterable[StoredGradient]) -> None:
        placements = dict.fromkeys(placement for one in written if (placement := one._placement()) is not None)
        for unit, placement, values in [(self._copies[one][0], one, self._copies[one][1]) for one in placements]:
            unit.gradients.overwrite(placement, values)


def _dispatched(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what ``func`` returns. The gradients among its arguments are there, and synchronised."""
    if func in _SCALING:
        return _scale(func, args, kwargs)
    if func is _aten._foreach_norm.Scalar:
        return _norms(func, *args, **kwargs)
    if func is _aten.linalg_vector_norm.default:
        return _norm(func, *args, **kwargs)
    if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
        return _unscale(func, *args)
    if func is _aten.clone.default and kwargs.get("memory_format") in (None, torch.preserve_format):
        return _Copies().of(args[0])
    if func._schema.name.startswith("aten::_foreach_"):
        return _one_at_a_time(func, args, kwargs)
    return _compute(func, args, kwargs)


def _compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what ``func`` returns for copies of the gradients, after writing back those that it has written to."""
    written = [one for one in tree_flatten(_written(func, args, kwargs))[0] if isinstance(one, StoredGradient)]
    if written and torch.Tag.inplace_view in func.tags:
        raise MisuseError(f"{func} would change the shape of the gradient of {written[0].parameter_name!r} in place")
    copies = _Copies()
    with_values = tree_map(copies.plain, (tuple(args), kwargs))
    result = func(*with_values[0], **with_values[1])
    copies.write_back(written)
    return tree_map(copies.restored, result)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that ``func`` writes to."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


@functools.cache
def _makes_another(func: Any) -> bool:
    """Return whether ``func`` makes a tensor of the shape or type of another one, whose values it does not look at."""
    name = func._schema.name.removeprefix("aten::")
    return bool(name.endswith("_like") or name.startswith("new_"))


# -- lists -----------------------------------------------------------------------------------------------------------------


def _one_at_a_time(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what ``func``, which does the same with each tensor of a list, returns for lists of one."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    count = next(len(value) for value in given.values() if isinstance(value, list | tuple))

    def cut(name: str, value: Any, index: int) -> Any:
        if name == "scalars" and isinstance(value, torch.Tensor):  # one number for each
            return value[index : index + 1]
        return [value[index]] if isinstance(value, list | tuple) else value

    made: list[Any] = []
    for index in range(count):
        here = [cut(name, value, index) for name, value in zip(names, args, strict=False)]
        result = _compute(func, here, {name: cut(name, value, index) for name, value in kwargs.items()})
        made.extend(result or ())
    return made or None


# -- norms -----------------------------------------------------------------------------------------------------------------


def _norms(func: Any, tensors: Sequence[torch.Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    if dtype is not None or not all(one.is_whole() for one in tensors if isinstance(one, StoredGradient)):
        return _one_at_a_time(func, (tensors, ord, dtype), {})  # type: ignore[no-any-return]
    found = iter(_known([one for one in tensors if isinstance(one, StoredGradient)], float(ord), listed=True))
    return [next(found) if isinstance(one, StoredGradient) else func([one], ord)[0] for one in tensors]


def _norm(
    func: Any,
    stored: Any,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    whole = not dim or sorted(one % stored.dim() for one in dim) == list(range(stored.dim()))
    if keepdim or dtype is not None or not whole or not stored.is_whole():
        return _compute(func, (stored, ord, dim, keepdim), {"dtype": dtype})
    return _known([stored], float(ord), listed=False)[0]


def _known(stored: Sequence[StoredGradient], order: float, *, listed: bool) -> list[torch.Tensor]:
    """Return the norms of whole gradients, which need not be read where they were asked for before."""
    norms = whole_norms([one._found() for one in stored], order, listed=listed)
    return [norm.to(one.device, copy=True) for norm, one in zip(norms, stored, strict=True)]


# -- factors ---------------------------------------------------------------------------------------------------------------


_SCALING = {
    **dict.fromkeys((_aten.mul_.Tensor, _aten.mul_.Scalar, _aten._foreach_mul_.Scalar), False),
    **dict.fromkeys((_aten._foreach_mul_.Tensor, _aten._foreach_mul_.ScalarList), False),
    **dict.fromkeys((_aten.div_.Tensor, _aten.div_.Scalar, _aten._foreach_div_.Scalar), True),
    **dict.fromkeys((_aten._foreach_div_.Tensor, _aten._foreach_div_.ScalarList), True),
}
"""Operations that multiply gradients by numbers in place, and whether they divide."""


def _scale(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Multiply gradients by one number each: those whose factor can wait take it when they are used, all of a list or none."""
    listed = isinstance(args[0], list | tuple)
    tensors = list(args[0]) if listed else [args[0]]
    others = list(args[1]) if isinstance(args[1], list | tuple) else [args[1]] * len(tensors)
    waiting: dict[Placement, tuple[Graded, torch.Tensor]] = {}
    for index, (tensor, other) in enumerate(zip(tensors, others, strict=True)):
        factor = _factor(tensor, other, func)
        found = None if factor is None else tensor._found()
        if factor is None or found is None or found[2] in waiting:
            here = [tensors[index]] if listed else tensors[index]
            _write_down(waiting)
            waiting.clear()
            _compute(func, (here, [other] if isinstance(args[1], list | tuple) else other), kwargs)
        else:
            waiting[found[2]] = found, factor
    _write_down(waiting)
    return None if listed else args[0]


def _write_down(waiting: dict[Placement, tuple[Graded, torch.Tensor]]) -> None:
    """Note the factors that gradients take when they are used."""
    graded = [found for found, _ in waiting.values()]
    _decide(graded, [unit.gradients.scaled(placement, factor) for (_, unit, placement), factor in waiting.values()])


def _decide(graded: Sequence[Graded], deeds: Sequence[Callable[[], object]]) -> None:
    models = list(dict.fromkeys(model for model, _, _ in graded))
    for model in models:
        model.checkpoint.note()
    decide([model.intent for model in models], deeds)


def _factor(tensor: Any, other: Any, func: Any) -> torch.Tensor | None:
    """Return the factor, 0-d, by which the next use may multiply ``tensor`` with the same bits as ``func`` with ``other`` now;
    or None.

    None for what could become infinite by it: whether gradients are finite is known from when they arrived.
    """
    if not isinstance(tensor, StoredGradient) or tensor.dim() == 0 or not tensor.is_whole():
        return None
    divide = _SCALING.get(func, False)
    if isinstance(other, torch.Tensor):
        if isinstance(other, StoredGradient) or other.dim() > 0 or not other.is_floating_point():
            return None
        factor = other.detach().to("cpu", copy=True)
    elif isinstance(other, float) or (isinstance(other, int) and abs(other) <= 1 << 24):
        rounded = func._overloadname in ("Scalar", "ScalarList")  # these round to the type of the gradient first
        dtype = tensor.dtype if rounded and not divide else torch.float64
        factor = torch.tensor(float(other), dtype=dtype, device="cpu")
    else:
        return None
    value = factor.item()
    if divide:
        if not math.isfinite(value) or abs(math.frexp(value)[0]) != 0.5 or not 1 <= abs(value) <= 2.0**100:
            return None  # but for powers of two a quotient is not the product with the inverse
        return torch.tensor(1.0 / value, dtype=torch.float64, device="cpu")
    return factor if not 1 < abs(value) < math.inf else None


def _unscale(func: Any, tensors: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiply gradients by ``inv_scale``; set ``found_inf`` where one is not finite before."""
    graded: list[Graded] = []
    deeds: list[Callable[[], object]] = []
    for tensor in tensors:
        factor = _factor(tensor, inv_scale.reshape(()), func)
        if factor is None or not isinstance(tensor, StoredGradient):
            _compute(func, ([tensor], found_inf, inv_scale), {})
            continue
        _, unit, placement = found = tensor._found()
        if tensor.dtype in (torch.float32, torch.float64):  # the next gradient's norm is computed for this factor, too
            finite, deed = unit.gradients.unscaled(placement, factor)
        else:
            finite, deed = unit.gradients.is_finite(placement), unit.gradients.scaled(placement, factor)
        graded.append(found)
        deeds.append(deed)
        if not finite:
            found_inf.fill_(1.0)
    _decide(graded, deeds)
