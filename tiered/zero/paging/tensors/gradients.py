"""Show gradients that are in the store in ``parameter.grad``, as tensors that torch computes with.

``Gradient`` is where the values of such a tensor are. A function of torch gets a copy, and one that writes has its copy written
back at once, so that nothing is lost. What it answers itself:

- Multiplication by one number only notes the number, which the next use multiplies by (``UnitGradients.scaled``); a norm is the
  one that was computed when the gradient arrived. So clipping and unscaling need not read.
- The norms of a list take one collective where there are ranks.

A gradient leads to its model by its parameter's handle, and keeps neither. It computes while ``parameter.grad`` shows it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from tiered.errors import MisuseError, TieredError
from tiered.zero.intent import Intent, all_or_none
from tiered.zero.paging.storage import CheckpointRecord
from tiered.zero.paging.tensors.functions import SCALING, order_of
from tiered.zero.paging.tensors.sources import Call, Source
from tiered.zero.paging.tensors.stored import StoredTensor, compute, reading
from tiered.zero.paging.units import Placement

__all__ = [
    *("Graded", "Gradient", "Spent"),
    *("gradient", "is_gradient", "is_gradient_of", "is_spent", "synchronised", "whole_norms"),
]


class Stored(Protocol):
    """Gradients of one unit: what ``UnitGradients`` does for a ``Gradient``."""

    def shown(self, placement: Placement) -> StoredTensor | None:
        """Return what ``parameter.grad`` is, where that is the stored gradient, or a view of it that somebody assigned."""
        ...

    def refuse_interrupted(self, placement: Placement) -> None: ...

    def norm(self, placement: Placement, order: float, listed: bool = False) -> torch.Tensor: ...

    def scaled(self, placement: Placement, factor: torch.Tensor) -> Callable[[], object]: ...

    def unscaled(self, placement: Placement, factor: torch.Tensor) -> tuple[bool, Callable[[], object]]: ...

    def is_finite(self, placement: Placement) -> bool: ...

    def overwrite(self, placement: Placement, values: torch.Tensor) -> None: ...


class GradientUnit(Protocol):
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


class Sharing(Protocol):
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
    def partition(self) -> Sharing: ...

    @property
    def gradient_sync(self) -> Sync: ...

    def start(self) -> None:
        """Make the model ready for a use outside of forward and backward."""
        ...


Graded = tuple[PagedModel, GradientUnit, Placement]
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


class Gradient(Source):
    """A gradient that ``parameter.grad`` shows. Raises MisuseError once it is gone (``zero_grad``)."""

    another = "assign parameter.grad"
    lost_history = (
        "it was stored without its graph (backward(create_graph=True)), and what uses it would lead no gradient through it: "
        "use torch.autograd.grad(loss, parameters, create_graph=True), or, for its values alone, torch.no_grad()"
    )
    allowed = frozenset({"detach_"})

    def __init__(self, placement: Placement) -> None:
        self._placement, self.name = weakref.ref(placement), placement.name
        self._like = torch.empty_strided(placement.shape, placement.stride, dtype=placement.dtype, device="meta")
        self._device = placement.parameter.device
        self.shown_by: weakref.ref[StoredTensor] | None = None

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def is_of(self, placement: Placement) -> bool:
        """Return whether it is a gradient of that parameter."""
        return self._placement() is placement

    @property
    def shown(self) -> str:
        return f"the gradient of {self.name!r}"

    @property
    def device(self) -> torch.device:
        return self._device

    def like(self) -> torch.Tensor:
        return self._like

    def found(self) -> Graded:
        """Return where the gradient is. Raises MisuseError where it is gone, InterruptedStep where it is not right."""
        return self.located()[0]

    def located(self) -> tuple[Graded, bool]:
        """Return where the gradient is, and whether ``parameter.grad`` shows it as it is. Raises as ``found``."""
        placement = self._placement()
        handle = None if placement is None else getattr(placement.parameter, "_tiered", None)
        found: Graded | None = None if handle is None else handle.resolve()
        if found is None:
            raise MisuseError(f"the model of {self.name!r} is gone, with its gradients: keep parameter.grad.clone()")
        _, unit, placement = found
        unit.gradients.refuse_interrupted(placement)
        grad, origin = unit.gradients.shown(placement), None if self.shown_by is None else self.shown_by()
        if grad is None or grad.root is not origin:
            raise MisuseError(
                f"this gradient of {self.name!r} is gone, for parameter.grad is another one or None: keep "
                "parameter.grad.clone()"
            )
        return found, grad.is_all()

    @classmethod
    def prepare(cls, sources: Sequence[Gradient]) -> None:
        synchronised([source.found()[0] for source in sources])

    @torch.no_grad()
    def whole(self) -> torch.Tensor:
        _, unit, placement = self.found()
        return unit.stored_gradient(placement)

    @torch.no_grad()
    def write(self, whole: torch.Tensor) -> None:
        placement = self._placement()
        if placement is not None:
            self.found()[1].gradients.overwrite(placement, whole)

    def collected(self, value: StoredTensor) -> torch.Tensor:
        """Return a copy of ``value``, because it was assigned to another parameter's ``grad``, or is a view of its own."""
        if self.found()[0].partition.shares > 1:
            raise MisuseError(
                f"a gradient of {self.name!r}, of which each rank has a share, was assigned to a parameter's grad: assign "
                "grad.clone()"
            )
        with torch.no_grad():
            return value.made(self.whole())

    def printed(self, value: StoredTensor) -> str:
        """Return what torch prints; where ranks would have to be asked, or there are no values, what this is."""
        try:
            if self.found()[0].partition.shares == 1:
                with reading(value) as values:
                    return repr(values)
        except TieredError:
            pass
        return f"{type(value).__name__}(gradient of {self.name!r}, shape={tuple(value.shape)}, dtype={value.dtype})"

    def answer(self, value: StoredTensor, call: Call) -> Any:
        name, args, kwargs = call.name, call.args, call.kwargs
        first: Any = args[0] if args else None
        if name in ("detach_", "zero_") and isinstance(first, StoredTensor):
            first.of_graph = False
        if name == "detach_":
            return first
        if name == "cpu" and is_gradient(first):
            return first.values().cpu(*args[1:], **kwargs)
        if name == "clone" and len(args) == 1 and kwargs.get("memory_format") in (None, torch.preserve_format):
            return first.values()
        with torch.no_grad():
            if name == "_amp_foreach_non_finite_check_and_unscale_":
                return _unscale(*args, **kwargs)
            if name in SCALING and len(args) == 2 and not kwargs:
                return _scale(call)
            order = order_of(name, args, kwargs)
            if order is not None and name == "_foreach_norm":
                return _norms(call.func, first, order, listed=True)
            if order is not None:
                found = _norms(call.func, [first], order, listed=False)
                return found if found is NotImplemented else found[0]
        return NotImplemented


class Spent(Gradient):
    """A gradient that is gone, because its parameter was updated with it during backward. Whatever computes with it raises."""

    def refuse(self, call: Call) -> None:
        raise self._gone(f"so {call.name} cannot compute with it")

    def located(self) -> tuple[Graded, bool]:
        raise self._gone("so it has no values")

    def _gone(self, consequence: str) -> MisuseError:
        return MisuseError(
            f"{self.name!r} was updated during backward, and its gradient is gone, {consequence}: clipping, loss scaling and "
            'accumulation need update="on_fetch"'
        )


def gradient(placement: Placement, kind: type[Gradient] = Gradient) -> StoredTensor:
    """Return what ``parameter.grad`` shows."""
    source = kind(placement)
    made = StoredTensor.of(source, source.like())
    source.shown_by = weakref.ref(made)
    return made


def is_gradient(value: Any) -> bool:
    """Return whether ``value`` is a stored gradient, or a view of one."""
    return isinstance(value, StoredTensor) and isinstance(value.source, Gradient)


def is_gradient_of(value: Any, placement: Placement) -> bool:
    """Return whether ``value`` is the stored gradient of that parameter, or a view of it."""
    source = value.source if isinstance(value, StoredTensor) else None
    return isinstance(source, Gradient) and source.is_of(placement)


def is_spent(value: Any) -> bool:
    """Return whether ``value`` stands for a gradient that is gone."""
    return isinstance(value, StoredTensor) and isinstance(value.source, Spent)


def _located(value: Any) -> Graded | None:
    """Return where a stored gradient is that ``parameter.grad`` shows as it is; None for anything else."""
    if not is_gradient(value) or not value.is_all():
        return None
    found, as_it_is = value.source.located()
    return found if as_it_is else None


# -- norms ---------------------------------------------------------------------------------------------------------------------


def _norms(func: Callable[..., Any], tensors: Sequence[Any], order: float, *, listed: bool) -> Any:
    """Return the norms of ``tensors``; those of whole gradients need not be read where they were asked for before. Return
    NotImplemented where a stored gradient is not whole."""
    located = {index: _located(one) for index, one in enumerate(tensors) if is_gradient(one)}
    graded = [found for found in located.values() if found is not None]
    if len(graded) < len(located):
        return NotImplemented
    synchronised([model for model, _, _ in graded])
    norms = iter(whole_norms(graded, order, listed=listed))
    return [
        next(norms).to(one.device, copy=True) if index in located else func([one], order)[0]
        for index, one in enumerate(tensors)
    ]


# -- factors -------------------------------------------------------------------------------------------------------------------


def _scale(call: Call) -> Any:
    """Multiply gradients by one number each: those whose factor can wait take it when they are used, all of a list or none."""
    args, listed = call.args, isinstance(call.args[0], list | tuple)
    tensors = list(args[0]) if listed else [args[0]]
    others = list(args[1]) if isinstance(args[1], list | tuple) else [args[1]] * len(tensors)
    waiting: dict[Placement, tuple[Graded, torch.Tensor]] = {}
    located = [_located(one) for one in tensors]
    synchronised([found[0] for found in located if found is not None])
    for index, (tensor, other, found) in enumerate(zip(tensors, others, located, strict=True)):
        factor = None if found is None else _factor(tensor, other, call)
        if factor is None or found is None or found[2] in waiting:
            if not listed:
                return NotImplemented
            _write_down(waiting)
            waiting.clear()
            compute(call.func, ([tensors[index]], [other] if isinstance(args[1], list | tuple) else other))
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
    all_or_none([model.intent for model in models], deeds)


def _factor(tensor: Any, other: Any, call: Call | None) -> torch.Tensor | None:
    """Return the factor, 0-d, by which the next use may multiply ``tensor``, a whole gradient, with the same bits as the
    function of ``call`` (None: one that unscales) with ``other`` now; or None.

    None for what could become infinite by it: whether gradients are finite is known from when they arrived.
    """
    if tensor.dim() == 0:
        return None
    divide = call is not None and SCALING[call.name]
    if isinstance(other, torch.Tensor):
        if isinstance(other, StoredTensor) or other.dim() > 0 or not other.is_floating_point():
            return None
        factor = other.detach().to("cpu", copy=True)
    elif isinstance(other, float) or (isinstance(other, int) and abs(other) <= 1 << 24):
        rounded = call is not None and call.name.startswith("_foreach_")  # these round to the type of the gradient first
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


def _unscale(tensors: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiply gradients by ``inv_scale``; set ``found_inf`` where one is not finite before."""
    graded: list[Graded] = []
    deeds: list[Callable[[], object]] = []
    located = [_located(one) for one in tensors]
    synchronised([found[0] for found in located if found is not None])
    for tensor, found in zip(tensors, located, strict=True):
        factor = None if found is None else _factor(tensor, inv_scale.reshape(()), None)
        if factor is None or found is None:
            compute(torch._amp_foreach_non_finite_check_and_unscale_, ([tensor], found_inf, inv_scale))
            continue
        _, unit, placement = found
        if tensor.dtype in (torch.float32, torch.float64):  # the next gradient's norm is computed for this factor, too
            finite, deed = unit.gradients.unscaled(placement, factor)
        else:
            finite, deed = unit.gradients.is_finite(placement), unit.gradients.scaled(placement, factor)
        graded.append(found)
        deeds.append(deed)
        if not finite:
            found_inf.fill_(1.0)
    _decide(graded, deeds)
