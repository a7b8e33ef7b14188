"""Own the gradients of one unit's parameters: what is known of each, what is stored, and when ``parameter.grad`` shows it.

``GradientState`` has all that is known of one gradient, ``UnitGradients`` the states of a unit, what arrived in the running
backward pass, and one tensor in the store, which exists while there are gradients. ``LocalGradients`` has what one of several
ranks accumulated and has not reduced yet. Other files keep sets of units only.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiered.errors import InterruptedStep, MisuseError
from tiered.types import Access, TensorSpec
from tiered.zero.leases import Opened
from tiered.zero.paging.storage import CheckpointRecord, TensorStore, host
from tiered.zero.paging.tensors.gradients import Spent, gradient, is_gradient, is_gradient_of, is_spent
from tiered.zero.paging.tensors.stored import StoredTensor
from tiered.zero.paging.units import Placement, UnitPlan
from tiered.zero.paging.update import all_finite

__all__ = ["Announced", "ArrivingGradients", "GradientState", "LocalGradients", "Norm", "UnitGradients"]


Factors = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
"""What a gradient is multiplied by, first as it is, and then in the type of the master."""


class Norm(NamedTuple):
    """A norm of ``order``; ``listed``: as ``torch._foreach_norm`` computes it, which on CUDA has other last bits than
    ``vector_norm``, and is what ``clip_grad_norm_`` takes there unless it is told otherwise."""

    order: float
    listed: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the norm of ``tensor``, 0-d, in host memory."""
        if self.listed:
            return host(torch._foreach_norm([tensor], self.order)[0])
        return host(torch.linalg.vector_norm(tensor, self.order))


class Announced:
    """What identifies the hook on an autograd node that says when it is about to accumulate. The node alone keeps it."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False)
class GradientState:
    """All that is known of one gradient.

    ``marker``: what ``parameter.grad`` shows, or showed last; another one (None: not made yet) for each gradient, so that what
    was kept of a former one is not taken for it. ``scales``: factors that the stored gradient has yet to be multiplied by;
    then, as fp32 where its type is narrower, by ``wide_scales``, which a scaled loss leaves once it was unscaled. ``norms``:
    its known norms. ``orders``: those that were asked for before, which are computed while a gradient is at hand; they will be
    asked for when it has been multiplied by ``expected``, if it is as last time. ``finite``: whether the stored gradient, as
    it is, has neither NaN nor infinity. ``accumulate``: the next gradient is added to it. ``spent``: an update within backward
    used it up, and ``optimizer.step()`` was not called since. ``used``: a step was made with it, and it is as it was then;
    ``unscaled``: for a step, which a scaler may leave out: no commit keeps either. ``adding``: the stored gradient is not in
    ``parameter.grad`` now, or only half added to; an interruption leaves it so. ``defined``: so is what autograd accumulates
    now; else ``parameter.grad`` stays what it is. ``unreduced``: this rank's sum of it is in ``LocalGradients``, and the mean
    over the ranks is not stored yet. ``taker``: number of the parameter's hook that takes what autograd has
    accumulated. ``announced``: what identifies the hook that counts on the autograd node which accumulates it, and is gone with
    the node. ``node``: that node (None: only graphs have it, if any). ``assigned``: the tensor in memory that
    ``parameter.grad`` is, to which autograd accumulates now. ``copied``: the one that the stored gradient is a copy of, and its
    version then. ``taken_from``: the memory of the one that the mean over the ranks took the place of.
    """

    marker: StoredTensor | None = None
    scales: list[torch.Tensor] = field(default_factory=list)
    wide_scales: list[torch.Tensor] = field(default_factory=list)
    expected: torch.Tensor | None = None
    norms: dict[Norm, torch.Tensor] = field(default_factory=dict)
    orders: set[Norm] = field(default_factory=set)
    accumulate: bool = False
    finite: bool = True
    spent: bool = False
    used: bool = False
    unscaled: bool = False
    adding: bool = False
    defined: bool = False
    unreduced: bool = False
    taker: int | None = None
    announced: weakref.ref[Announced] | None = None
    node: Any = None
    assigned: weakref.ref[torch.Tensor] | None = None
    copied: tuple[weakref.ref[torch.Tensor], int] | None = None
    taken_from: StorageWeakRef | None = None


class UnitGradients:
    """Gradients of one unit's parameters.

    ``states`` has what is known of each gradient, ``parts`` what this process stores of each. ``apply_update``, a method,
    applies the unit's pending update, which needs the stored gradients, before a new gradient is written.
    """

    def __init__(
        self,
        store: TensorStore,
        key: str,
        placements: Sequence[Placement],
        parts: Mapping[Placement, Placement],
        checkpoint: CheckpointRecord,
        apply_update: Callable[[], None],
    ) -> None:
        self.store, self.key, self._checkpoint = store, key, checkpoint
        self._apply_update = weakref.WeakMethod(apply_update)
        self.states = {p: GradientState() for p in placements if p.dtype.is_floating_point}
        self.parts = {placement: part for placement, part in parts.items() if placement in self.states}
        self.opened: torch.Tensor | None = None  # while gradients arrive: leased
        self._lease = Opened()
        self._placements = tuple(placements)
        self.unhooked: dict[Placement, None] = dict.fromkeys(placements)
        """Parameters whose gradient no hook takes yet, or whose node only graphs have."""
        self.arrived: set[Placement] = set()
        """Parameters whose gradient this process accumulated in the running backward pass."""
        self.final: set[Placement] = set()
        """Parameters whose gradient is final in the running backward pass, which updates them."""
        self.due: set[Placement] = set()
        """Those of ``final`` that are not updated yet."""
        self.final_last_time: set[Placement] | None = None
        self.deferred = False
        """More gradients may come, at any time until the backward pass ends, that add up with those that have arrived."""

    def let_nodes_go(self) -> None:
        """Leave to the graphs the nodes of parameters that have hooks or attributes of their users, because the unit is held no
        longer: a node refers to its parameter in C++, where the collector does not look, and such a parameter perhaps to the
        model. The next hold hooks the nodes that there are then."""
        with torch._C.DisableTorchFunctionSubclass():
            for placement, state in self.states.items():
                if state.node is None:
                    continue
                parameter: Any = placement.parameter
                if (
                    parameter._backward_hooks
                    or len(parameter._post_accumulate_grad_hooks or ()) > 1  # ours is one
                    or sum(map(gc.is_tracked, parameter.__dict__.values())) > 1  # our handle is one
                ):
                    self.unhooked[placement] = None  # first: an exception in between must not leave a node that nobody hooks
                    state.node = None

    def hook_anew(self) -> None:
        """Have the next hold hook the gradients, because the parameters lost their hooks meanwhile."""
        self.unhooked = dict.fromkeys(self._placements)
        for state in self.states.values():
            state.node, state.taker, state.announced = None, None, None

    def end_pass(self) -> None:
        """Forget what arrived in the backward pass; the gradients stay as they are."""
        self.arrived, self.final, self.due, self.deferred = set(), set(), set(), False

    @property
    def has_all(self) -> bool:
        """Return whether each parameter that needs a gradient has got one in this backward pass, and no more are expected."""
        return not self.deferred and all(p in self.arrived for p in self.states if p.parameter.requires_grad)

    def nbytes(self, also: Collection[Placement] = ()) -> int:
        """Return the bytes of the stored tensor: the unit as far as its last parameter that needs a gradient, or was given one.
        """
        graded = (
            part
            for p, part in self.parts.items()
            if p.parameter.requires_grad or p.grad is not None or p in also
        )
        return max((part.offset + part.nbytes for part in graded), default=0)

    def has(self, placement: Placement) -> bool:
        grad = placement.grad
        return grad is not None and not is_spent(grad)

    @property
    def any(self) -> bool:
        return any(self.has(placement) for placement in self.states)

    # -- shown -------------------------------------------------------------------------------------------------------------

    def show(self, placement: Placement, of_graph: bool = False) -> None:
        """Have ``parameter.grad`` show the stored gradient, which is new or has changed. ``of_graph``: what was written to it
        needs a gradient, as after ``backward(create_graph=True)``; it is stored without its graph."""
        state = self.states[placement]
        if state.marker is None:
            state.marker = gradient(placement)
        elif not state.marker.is_inference():
            torch.autograd.graph.increment_version(state.marker)
        state.marker.of_graph = state.marker.of_graph or of_graph
        state.used = state.unscaled = False
        placement.grad = state.marker

    def shown(self, placement: Placement) -> StoredTensor | None:
        """Return what ``parameter.grad`` is, where that is the stored gradient, or a view of it that somebody assigned."""
        grad: Any = placement.grad
        return grad if is_gradient(grad) and grad.root is self.states[placement].marker else None

    def is_shown(self, placement: Placement) -> bool:
        """Return whether ``parameter.grad`` is the stored gradient, and not a view of it that somebody assigned."""
        grad = self.shown(placement)
        return grad is not None and grad.is_all()

    def assigned(self, placement: Placement) -> torch.Tensor | None:
        """Return the values of a gradient that somebody assigned to ``parameter.grad``, in ordinary memory; or None."""
        grad: Any = placement.grad
        if grad is None or is_spent(grad) or self.is_shown(placement):
            return None
        return grad.source.collected(grad) if isinstance(grad, StoredTensor) else grad

    # -- arriving ----------------------------------------------------------------------------------------------------------

    def before(self, placement: Placement) -> None:
        """Clear ``parameter.grad``, to which autograd is about to accumulate, and remember what it meant. A tensor in memory
        that somebody assigned stays: others may have it, and autograd adds to it as it does without paging."""
        grad = placement.grad
        state = self.states[placement]
        self.refuse_another(placement)
        self.refuse_interrupted(placement)
        state.assigned = None
        if grad is None:
            state.accumulate, state.marker = False, None
        elif is_in_memory(grad):
            state.assigned = weakref.ref(grad)
            return
        else:
            assigned = self.assigned(placement)
            state.adding = True
            if assigned is not None:
                self.take(placement, assigned)
            state.accumulate = True
        placement.grad = None

    def refuse_another(self, placement: Placement) -> None:
        """Raise MisuseError if the parameter's last gradient was used up and the step is not over, or another one's values or
        gradient were assigned to it, to which torch would add."""
        _refuse_shared(placement, "this backward pass would add to both")
        if self.states[placement].spent:
            raise MisuseError(
                f"another gradient of {placement.name!r} arrived after its update, without optimizer.step() in between: to "
                'accumulate, or to share parameters with a reentrant checkpoint, make the optimizer with update="on_fetch"; '
                "after an exception that came before step(), call it, or zero.rollback"
            )

    def refuse_interrupted(self, placement: Placement) -> None:
        """Raise InterruptedStep if an exception struck while the gradient was added to what there was before."""
        state = self.states.get(placement)
        if state is not None and state.adding:
            raise InterruptedStep(
                f"an exception struck while a gradient of {placement.name!r} was added to one of before, and their sum is not "
                "right: leave this step out (optimizer.zero_grad()), or call zero.rollback"
            )

    def take(self, placement: Placement, grad: torch.Tensor) -> None:
        """Overwrite the stored gradient of one parameter."""
        state = self.states[placement]
        state.accumulate = False
        if not self.is_shown(placement):
            state.marker = None
        self._add(placement, grad)

    def collect(self, placement: Placement) -> None:
        """Store a gradient that somebody assigned to ``parameter.grad``, which stays the tensor that it is if that is in
        memory."""
        self.refuse_interrupted(placement)
        grad, assigned = placement.grad, self.assigned(placement)
        if assigned is None:
            return
        if is_gradient_of(grad, placement):
            self.take(placement, assigned)
        else:
            self._copy_in(placement, assigned)

    def _copy_in(self, placement: Placement, values: torch.Tensor) -> None:
        """Overwrite the stored gradient with ``values``, those of the tensor that ``parameter.grad`` is and stays."""
        state, grad = self.states[placement], placement.grad
        state.accumulate, state.marker = False, None
        self._add(placement, values, show=False)
        state.used = state.unscaled = False
        state.copied = (weakref.ref(grad), grad._version) if is_in_memory(grad) and not grad.is_inference() else None

    def _is_as_used(self, placement: Placement) -> bool:
        """Return whether a step was made with the tensor that ``parameter.grad`` is, which nothing was written to since."""
        state, grad = self.states[placement], placement.grad
        if not state.used or state.copied is None or grad is None:
            return False
        tensor, version = state.copied
        return tensor() is grad and grad._version == version

    def overwrite(self, placement: Placement, values: torch.Tensor) -> None:
        """Overwrite the stored gradient that ``parameter.grad`` shows with ``values``, which have the parameter's shape."""
        state, shown = self.states[placement], placement.grad
        state.adding, state.accumulate = True, False
        self._add(placement, values)
        placement.grad = shown  # which may be an alias, or a view that somebody assigned
        state.accumulate = True  # what another backward pass brings is added
        state.adding = False
        self.close()

    def add(self, placement: Placement, grad: torch.Tensor) -> None:
        """Add ``grad``, which has the parameter's shape and has been accumulated."""
        state = self.states[placement]
        assigned, state.assigned = state.assigned, None
        if assigned is None:
            self._add(placement, grad)
        elif assigned() is grad:
            self._copy_in(placement, grad)
        else:  # a new sum of that and the gradient, which has a graph
            self.take(placement, grad)
        state.adding = False

    @torch.no_grad()  # also where backward records itself (create_graph)
    def _add(self, placement: Placement, grad: torch.Tensor, *, show: bool = True) -> None:
        if grad.layout is not torch.strided:
            raise MisuseError(f"the gradient of {placement.name!r} is {grad.layout}: use sparse=False")
        part, state = self.parts.get(placement), self.states[placement]
        if part is not None:
            self.write(placement, part.cut(grad))
        else:
            self.open()
            self.clear(state)
        if show:
            self.show(placement, grad.requires_grad)

    def clear(self, state: GradientState) -> None:
        """Forget the factors of a gradient of which this process stores nothing."""
        state.finite = True
        state.scales.clear()
        state.wide_scales.clear()

    def write(self, placement: Placement, grad: torch.Tensor) -> None:
        """Write ``grad``, the part that this process stores, or add it to the stored gradient."""
        state = self.states[placement]
        target = self.parts[placement].view(self.open())
        if state.accumulate:
            if state.scales or state.wide_scales:
                target.copy_(_scaled(target, state))
            target.add_(grad.to(target.device))
        else:
            target.copy_(grad)
        state.scales.clear()
        state.wide_scales.clear()
        if state.orders:
            ready = target if state.expected is None else _widened(target).mul(state.expected)
            state.norms = {norm: norm.of(ready) for norm in state.orders}
        state.finite = _has_finite_norm(state) or all_finite(target)

    def prepare(self) -> None:
        """Invalidate the checkpoint and apply the pending update, because something new will be written."""
        self._checkpoint.invalidate()
        apply_update = self._apply_update()
        assert apply_update is not None
        apply_update()

    def open(self, also: Collection[Placement] = ()) -> torch.Tensor:
        """Return the stored tensor, leased until ``close``, with room for the gradients of ``also``, too; create it where there
        is none."""
        if self.opened is None:
            self.prepare()
            needed = self.nbytes(also)
            [spec] = self.store.specs([self.key])
            if spec is None:
                self.store.create(self.key, TensorSpec("uint8", (needed,), 1))
            elif spec.nbytes < needed:  # a parameter was unfrozen between two backward passes
                old = self.store.get(self.key)
                grown = torch.zeros(needed, dtype=torch.uint8, device="cpu")
                grown[: old.numel()] = old
                self.store.put(self.key, grown)
            self.opened = self._lease.open(self.store.lease(self.key, access=Access.WRITE))
        return self.opened

    def close(self) -> None:
        self.opened = None
        self._lease.close()

    # -- asked for ---------------------------------------------------------------------------------------------------------

    def copy(self, placement: Placement) -> torch.Tensor | None:
        """Return a copy in host memory of the part of the gradient that this process stores, as torch would have it in
        ``parameter.grad``; or None."""
        grad = placement.grad
        self.refuse_interrupted(placement)
        if is_spent(grad):
            raise MisuseError(
                f"{placement.name!r} was updated during backward, and its gradient is gone: to look at gradients, make the "
                'optimizer with update="on_fetch"'
            )
        if grad is None:
            return None
        part = self.parts.get(placement)
        if part is None:
            return torch.empty(0, dtype=placement.dtype, device="cpu")
        assigned = self.assigned(placement)
        return self.stored(placement) if assigned is None else part.cut(assigned).to("cpu", copy=True)

    def stored(self, placement: Placement) -> torch.Tensor:
        """Return a copy in host memory of the part of the stored gradient that this process stores."""
        part = self.parts.get(placement)
        if part is None:
            return torch.empty(0, dtype=placement.dtype, device="cpu")
        self.close()
        with self.store.lease(self.key) as stored:
            copy, state = part.view(stored).to("cpu", copy=True), self.states[placement]
        for scale in state.scales:
            copy.mul_(scale)
        wide = _widened(copy) if state.wide_scales else copy
        for scale in state.wide_scales:
            wide.mul_(scale)
        return wide.to(placement.dtype)

    def norm(self, placement: Placement, order: float, listed: bool = False) -> torch.Tensor:
        """Return the ``Norm`` of the part of the gradient that this process stores, from when it arrived where it is known."""
        state, norm = self.states[placement], Norm(order, listed)
        state.orders.add(norm)
        self.collect(placement)
        self.close()
        if state.expected is not None and not state.wide_scales:
            state.norms.clear()  # this loss was not scaled, or it was not undone
            state.expected = None
        part = self.parts.get(placement)
        if part is None:
            return _scaled(torch.zeros((), dtype=placement.dtype, device="cpu"), state)
        if norm not in state.norms:
            with self.store.lease(self.key) as stored:
                whole = _scaled(part.view(stored), state)
                state.norms[norm] = norm.of(whole)
            del stored, whole
        return state.norms[norm]

    def scaled(self, placement: Placement, factor: torch.Tensor) -> Callable[[], object]:
        """Return what has the gradient multiplied by ``factor`` (0-d) at its next use, when it is called, once or twice. One
        in memory is multiplied then."""
        state, grad = self.states[placement], placement.grad
        _refuse_shared(placement, "this would multiply both")
        if is_in_memory(grad):
            return partial(grad.detach().copy_, grad.detach().mul(factor.to(grad.device)))
        scales, wide_scales, norms = list(state.scales), list(state.wide_scales), dict(state.norms)
        if factor != 1:
            (wide_scales or scales).append(host(factor))
            norms = {}

        def scale() -> None:
            state.scales, state.wide_scales, state.norms = list(scales), list(wide_scales), dict(norms)
            if state.used:
                state.used = state.unscaled = False

        return scale

    def unscaled(self, placement: Placement, factor: torch.Tensor) -> tuple[bool, Callable[[], object]]:
        """Return whether the gradient is finite, and a function.

        Calling the function, once or twice, records that the next use multiplies the gradient by ``factor`` (0-d), in fp32
        where the gradient's type is narrower.
        """
        self.collect(placement)
        self.close()
        factor, state = host(factor), self.states[placement]
        finite = _is_finite(state)
        known = not (state.scales or state.wide_scales or state.expected is None or not torch.equal(state.expected, factor))
        norms, wide_scales = (dict(state.norms) if known else {}), [*state.wide_scales, factor]

        def unscale() -> None:
            state.norms, state.expected, state.wide_scales = dict(norms), factor, list(wide_scales)
            state.unscaled = True

        return finite, unscale

    def for_step(self, placement: Placement) -> Factors | None:
        """Return ``factors`` of a gradient that a step is made with; None where there is none. Raises InterruptedStep where it
        is not right, MisuseError where it is not finite."""
        state = self.states.get(placement)
        grad = placement.grad
        shown = state is not None and grad is not None and grad is state.marker
        if shown and state.finite and not (state.adding or state.scales or state.wide_scales):  # type: ignore[union-attr]
            return (), ()
        self.refuse_interrupted(placement)
        if not self.has(placement):
            return None
        self.refuse_infinite(placement)
        self.close()
        return self.factors(placement)

    def is_finite(self, placement: Placement) -> bool:
        """Return whether the gradient has neither NaN nor infinity, and is not to be multiplied by such a factor."""
        self.collect(placement)
        self.close()
        return _is_finite(self.states[placement])

    def refuse_infinite(self, placement: Placement) -> None:
        """Raise MisuseError if the gradient has NaN or infinity, or is to be multiplied by such a factor."""
        self.collect(placement)
        if not _is_finite(self.states[placement]):
            self.close()
            raise MisuseError(
                f"the gradient of {placement.name!r} is not finite, and would make the parameter NaN: leave this step out "
                "(optimizer.zero_grad()), or scale the loss with tiered.zero.GradScaler, which does so by itself"
            )

    # -- used up -----------------------------------------------------------------------------------------------------------

    def spend(self, placement: Placement) -> None:
        """Mark the gradient as used up by an update within backward."""
        self.states[placement].spent = True
        placement.grad = gradient(placement, Spent)

    def is_spent(self, placement: Placement) -> bool:
        """Return whether the parameter was updated within a backward pass of this step."""
        return placement in self.states and self.states[placement].spent

    def refuse_spent(self, placement: Placement) -> None:
        """Raise MisuseError if the parameter was updated within this backward pass."""
        state = self.states.get(placement)
        if state is not None and state.spent:
            raise MisuseError(
                f"a checkpointed segment reads {placement.name!r} again after its update during this backward pass, because it "
                'uses it without a gradient there: make the optimizer with update="on_fetch"'
            )

    def use(self, placements: Iterable[Placement]) -> None:
        """Note that a step is made with the gradients."""
        for placement in placements:
            if placement in self.states:
                self.states[placement].used = True

    def is_kept(self, placement: Placement) -> bool:
        """Return whether a commit keeps the gradient, for more of the step to be added to it: not one that a step has used, to
        which a loop that starts with the commit would add, where it calls ``zero_grad`` after it."""
        if not self.has(placement):
            return self.was_added_to(placement)
        state = self.states[placement]
        return state.adding or not (state.used or state.unscaled)

    def close_step(self, placement: Placement) -> None:
        """Forget a gradient that an update within backward used up, because the step is over."""
        state = self.states.get(placement)
        if state is not None and state.spent:
            if is_spent(placement.grad):
                placement.grad = None
            state.spent = False

    def was_added_to(self, placement: Placement) -> bool:
        """Return whether an exception struck while the gradient was added to, which ``parameter.grad`` does not show."""
        return placement in self.states and self.states[placement].adding

    def zero(self, placement: Placement, zeros: torch.Tensor) -> None:
        """Overwrite the gradient, whatever it was, with ``zeros``, which have the parameter's shape."""
        state, grad = self.states[placement], placement.grad
        if is_in_memory(grad):
            if grad.grad_fn is None:
                grad.requires_grad_(False)
            else:
                grad.detach_()
            grad.zero_()
            return
        self.take(placement, zeros)
        state.adding = False
        if state.marker is not None:
            state.marker.of_graph = False

    def forget(self, placement: Placement) -> None:
        """Forget the gradient: the parameter has none any more."""
        placement.grad = None
        _forget_whole(placement)
        state = self.states.get(placement)
        if state is not None:
            state.adding, state.marker = False, None

    def factors(self, placement: Placement) -> Factors:
        """Return what an update multiplies the stored gradient by: first, and then in the type of the master."""
        state = self.states[placement]
        return tuple(state.scales), tuple(state.wide_scales)

    def agree(self, placement: Placement, *, present: bool, finite: bool, more: bool) -> bool:
        """Take over what all ranks together have of a gradient; return whether it is complete and not used up.

        ``more``: some rank has a sum that is not reduced yet.
        """
        state = self.states[placement]
        state.finite = finite
        if more:
            return False
        state.accumulate = present
        if not present:
            return False
        if placement.grad is None:
            state.marker = None
            self.show(placement)
        return not is_spent(placement.grad)

    # -- in a checkpoint ---------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint says of each gradient, by the parameter's name; assigned gradients are stored first."""
        record = {}
        for placement, state in self.states.items():
            self.refuse_interrupted(placement)
            if self.has(placement) and not self._is_as_used(placement):
                self.collect(placement)
            there = self.is_kept(placement)
            record[placement.name] = {
                "there": there,
                "scales": list(state.scales) if there else [],
                "wide_scales": list(state.wide_scales) if there else [],
                "expected": state.expected,
                "norms": {norm.order: value for norm, value in state.norms.items() if not norm.listed},
                "orders": sorted(norm.order for norm in state.orders if not norm.listed),
                "finite": state.finite,
            }
        self.close()
        return record

    def recall(self, record: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what ``record`` returned; the stored gradients are those of that commit."""
        for placement, state in self.states.items():
            kept = record[placement.name]
            state.scales, state.wide_scales = list(kept["scales"]), list(kept["wide_scales"])
            state.expected = kept["expected"]
            state.norms = {Norm(order): value for order, value in kept["norms"].items()}
            state.orders = set(map(Norm, kept["orders"]))
            state.finite, state.spent, state.accumulate = kept["finite"], False, kept["there"]
            state.adding = state.unreduced = False
            state.marker = placement.grad = None
            _forget_whole(placement)
            if kept["there"]:
                self.show(placement)

    def delete(self, *, kept: bool = True) -> None:
        """Delete the stored gradients, because nothing refers to them any more. ``kept``: the last commit may do so."""
        self.close()
        if self.key in self.store:
            with nullcontext() if kept else self._checkpoint.applying():
                self._checkpoint.invalidate()
                self.store.delete(self.key)
        for state in self.states.values():
            state.marker = None
            state.scales.clear()
            state.wide_scales.clear()


def is_in_memory(grad: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether ``parameter.grad`` is a tensor of somebody else's, in ordinary memory."""
    return grad is not None and not isinstance(grad, StoredTensor)


def _refuse_shared(placement: Placement, consequence: str) -> None:
    """Raise MisuseError where the values or the gradient of another parameter were assigned to ``parameter.grad``."""
    grad: Any = placement.grad
    if isinstance(grad, StoredTensor) and not is_gradient_of(grad, placement):
        raise MisuseError(
            f"{grad.source.shown} was assigned to the gradient of {placement.name!r}, and {consequence}: assign a copy "
            "(.clone())"
        )


def _forget_whole(placement: Placement) -> None:
    """Have what was kept of ``parameter.grad`` of a sliced parameter say that it is gone, once its slices have others."""
    if placement.sliced is not None:
        placement.sliced.parameter.__dict__.pop("_gradient", None)


def _has_finite_norm(state: GradientState) -> bool:
    """Return whether a finite norm is known, which tells of all elements: from order 1 on, one NaN or infinity makes it NaN or
    infinite."""
    return any(norm.order >= 1 and math.isfinite(value) for norm, value in state.norms.items())


def _is_finite(state: GradientState) -> bool:
    return state.finite and all(bool(torch.isfinite(scale)) for scale in (*state.scales, *state.wide_scales))


def _widened(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient


def _scaled(gradient: torch.Tensor, state: GradientState) -> torch.Tensor:
    """Return ``gradient`` times all its factors; the same tensor where there are none."""
    for scale in state.scales:
        gradient = gradient.mul(scale)
    if state.wide_scales:
        gradient = _widened(gradient)
        for scale in state.wide_scales:
            gradient = gradient.mul(scale)
    return gradient


class ArrivingGradients(Protocol):
    """Where backward's gradients of one unit go."""

    def before(self, placement: Placement) -> None:
        """Clear ``parameter.grad``, to which autograd is about to accumulate, and remember what it meant. ``UnitGradients``
        leaves a tensor in memory that somebody assigned."""
        ...

    def add(self, placement: Placement, grad: torch.Tensor) -> None:
        """Take a gradient that was accumulated; ``parameter.grad`` shows from now on that there is one."""
        ...

    def close(self) -> None:
        """End the lease, because no gradient of this unit comes next."""
        ...

    def delete(self, *, kept: bool = True) -> None:
        """Delete the unit's stored gradients, because nothing refers to them any more. ``kept``: the last commit may do so."""
        ...


class LocalGradients:
    """Sums over one rank's backward passes, in a tensor of the unit's layout that exists until they are reduced. The mean over
    all ranks is then added to ``gradients``, which has this rank's shard."""

    def __init__(self, store: TensorStore, key: str, plan: UnitPlan, gradients: UnitGradients) -> None:
        self.key, self._store, self._plan, self._gradients = key, store, plan, gradients
        self._states = gradients.states
        self._opened: torch.Tensor | None = None
        self._lease = Opened()

    def before(self, placement: Placement) -> None:
        grad = placement.grad
        self._gradients.refuse_another(placement)
        state = self._states[placement]
        if grad is None:
            state.unreduced = False
            state.accumulate, state.marker, state.taken_from = False, None, None
        else:
            del grad
            self._collect(placement)
        if state.taken_from is not None and not state.taken_from.expired():  # type: ignore[no-untyped-call]
            raise MisuseError(
                f"a tensor was assigned to the gradient of {placement.name!r} and is kept, and this backward pass would not "
                "add to it, because the mean over the ranks is in the store: assign grad.clone(), or delete the tensor before "
                "backward"
            )
        placement.grad = None

    def collect(self) -> None:
        """Store gradients that somebody assigned to ``parameter.grad``."""
        for placement, state in self._states.items():
            if placement.grad is not None:
                self._collect(placement)
            else:
                state.unreduced = False

    def _collect(self, placement: Placement) -> None:
        assigned = self._gradients.assigned(placement)
        if assigned is not None:  # it is taken for the mean, the same everywhere
            in_memory = assigned is placement.grad
            self._states[placement].taken_from = None
            if in_memory:
                memory = StorageWeakRef(assigned.untyped_storage())  # type: ignore[no-untyped-call]
                self._states[placement].taken_from = memory
            self._states[placement].unreduced = False
            self._gradients.take(placement, assigned)
            self._gradients.close()
            self._states[placement].accumulate = True

    @torch.no_grad()  # also where backward records itself (create_graph)
    def add(self, placement: Placement, grad: torch.Tensor) -> None:
        if grad.layout is not torch.strided:
            raise MisuseError(f"the gradient of {placement.name!r} is {grad.layout}: use sparse=False")
        target = placement.view(self._open())
        state = self._states[placement]
        if state.unreduced:
            target.add_(grad.to(target.device))
        else:
            target.copy_(grad)
            state.unreduced = True
        self._gradients.show(placement, grad.requires_grad)

    def _open(self) -> torch.Tensor:
        if self._opened is None:
            self._gradients.prepare()
            if self.key not in self._store:
                self._store.create(self.key, TensorSpec("uint8", (self._plan.nbytes,), 1))
            self._opened = self._lease.open(self._store.lease(self.key, access=Access.WRITE))
        return self._opened

    def close(self) -> None:
        self._opened = None
        self._lease.close()

    def delete(self, *, kept: bool = True) -> None:
        self.discard()
        self._gradients.delete(kept=kept)

    # -- reduced -----------------------------------------------------------------------------------------------------------

    def complete(self) -> torch.Tensor:
        """Return this rank's sums of all parameters of the unit, zeros where it has none; leased until ``discard``."""
        whole = self._open()
        for placement, state in self._states.items():
            if placement.grad is None:  # somebody took it away since
                state.unreduced = state.accumulate = False
            if not state.unreduced:
                placement.view(whole).zero_()
        return whole

    def discard(self, reduced: Collection[Placement] | None = None) -> None:
        """Delete the sums of ``reduced`` (None: of all parameters); the others stay until they are reduced, too."""
        self.close()
        for placement in self._states if reduced is None else reduced:
            self._states[placement].unreduced = False
        if not any(state.unreduced for state in self._states.values()) and self.key in self._store:
            self._store.delete(self.key)
