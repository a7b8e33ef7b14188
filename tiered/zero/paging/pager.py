"""What a running forward, or a backward pass, is known by. All of it is thrown away when an exception ends one of them.

Brings each unit in before the module that needs it computes, and lets it go afterwards; forward and backward.

Forward: a *frame* per running module holds its units from its pre-forward hook to its post-forward hook. A parameter that is
read from a module whose own forward is not running (``x @ self.embedding.weight.t()``) is held by the innermost frame.

Backward: what autograd saves of a paged parameter is packed as a reference (unit, version, place), so that it does not keep
the unit in memory; unpacking it holds the unit until another one is unpacked. Gradients are moved into the store as they
arrive. ``torch.utils.checkpoint`` works by the same hooks: only the innermost pair of saved-tensor hooks runs, so ours are
pushed only where no others are active, and its recomputation is an ordinary forward with frames.

An exception of a signal handler may strike between any two lines of this. So nothing that is written down here is trusted when
a model is used anew: ``reset`` throws it away, and takes from every unit what it may still have.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from tiered import MisuseError, Span, TieredError, TieredStore
from tiered.system import Trimmer
from tiered.types import Access
from tiered.zero.intent import Intent
from tiered.zero.leases import Leases
from tiered.zero.paging.micro_batch import Splitter
from tiered.zero.paging.reduction import gradient_exchange
from tiered.zero.paging.saved_tensors import (
    Kept,
    drop_queued,
    graph_task,
    hooks_active,
    in_backward,
    is_called_within,
    pop_hooks,
    push_hooks,
    refuse_tracing,
    restore_recording,
)
from tiered.zero.paging.sharding import Partition
from tiered.zero.paging.step_trace import Prefetch, Rehearsal
from tiered.zero.paging.storage import UpdateTier, Validity, updates_of
from tiered.zero.paging.unit import BackwardUpdates, Unit
from tiered.zero.paging.units import Placement, Plan, is_called

__all__ = ["Frame", "Home", "Listing", "Pager", "Pass", "Reference", "no_copy", "pagers_of", "placement_of", "told"]

class Reference:
    """A saved tensor that was a paged parameter, or a view of one."""

    __slots__ = ("__weakref__", "dtype", "offset", "size", "stride", "unit", "version")

    def __init__(self, unit: Unit, tensor: torch.Tensor) -> None:
        self.unit, self.version = unit, unit.version
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()
        unit.references.add(weakref.ref(self, unit.references.discard))  # of C: no exception keeps it from being called


class Frame:
    """What one running forward holds. ``below``: the saved-tensor hooks that were in force when it began."""

    __slots__ = ("below", "module", "recording", "span", "units")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.recording = torch.is_grad_enabled()
        self.below = hooks_active()
        self.units: list[Unit] = []
        self.span: Span | None = None

    def end_span(self) -> None:
        if self.span is not None:
            self.span.end()


class Pass:
    """A backward pass, from its first hook on. Autograd alone keeps it, and calls it at the end: it is gone when the pass has
    ended in any way, and a weak reference tells."""

    __slots__ = ("__weakref__", "finish")

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish = finish

    def __call__(self) -> None:
        self.finish()


class Listing(OrderedDict[str, Any]):
    """What ``state_dict`` fills, where it is to have the parameters themselves."""


class _Watched(dict[str, Any]):
    """A module's parameters; tells the pager when one is read by name."""

    def __init__(self, parameters: dict[str, Any], pager: Pager) -> None:
        super().__init__(parameters)
        self.pager = pager

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        return parameter if parameter is None else self.pager.read(parameter)


class Pager:
    """A model whose parameters live in a store. Used by one thread at a time, as a module is."""

    def __init__(
        self,
        model: nn.Module,
        store: TieredStore,
        name: str,
        plan: Plan,
        pool: int,
        *,
        prefetch: Prefetch,
        micro_batch: int,
        update_tier: UpdateTier,
        partition: Partition,
    ) -> None:
        self.model, self.store, self.name = model, store, name
        self.limits = plan.limits
        self.validity, chunk = Validity(store, name), plan.limits.chunk
        self.intent, self._leases = Intent(), Leases.of(store)
        updates, self._update_tier = updates_of(store, update_tier), update_tier
        self.units = [Unit(store, updates, name, u, chunk, self.validity, partition, self.intent) for u in plan.units]
        partition.joins(store)
        self.partition, self.exchange = partition, gradient_exchange(partition, self.units, pool)
        self.placements = sorted((p for u in plan.units for p in u.placements), key=lambda p: p.index)
        self._home = {p.parameter: (u, p) for u in self.units for p in u.plan.placements}
        self._held = {module: [self.units[i] for i in indices] for module, indices in plan.held.items()}
        self._frames: list[Frame] = []
        self._bases: dict[int, Unit] = {}
        self._backward_units: tuple[Unit, ...] = ()
        self._gradient_unit: Unit | None = None
        self._running: weakref.ref[Pass] | None = None  # the backward pass, from its first hook to its end
        self._backward_task = -1
        self._passing: Span | None = None  # the whole backward pass, and what one visit computes, for a timeline
        self._visiting: Span | None = None
        self._updates = BackwardUpdates()
        self._accumulators: dict[Placement, tuple[Any, object]] = {}  # nodes, and what their hooks know themselves by
        self.rehearsal = Rehearsal.of(store)
        self.rehearsal.prefetch = self._prefetch = prefetch
        self._trimmer = Trimmer(pool, max((placement.nbytes for placement in self.placements), default=0))
        self._watch()
        self.splitter = Splitter(model, store, name, plan, pool, micro_batch, self) if micro_batch > 1 else None
        for module in self.model.modules():
            if self._is_hooked(module):
                module.forward = self._guarded(module, module.forward)  # of this one object
        _pagers.add(self)

    # -- installing --------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        for unit in self.units:
            unit.release_parameters()
            for placement in unit.plan.placements:
                placement.parameter._tiered = Home(self, unit, placement)  # type: ignore[attr-defined]
        for module in self.model.modules():
            if module._parameters:
                module._parameters = _Watched(module._parameters, self)
                after = partial(self._after_state_dict)  # torch marks the hook, which a bound method does not allow
                module.register_state_dict_post_hook(after)  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(self._before_load)  # type: ignore[no-untyped-call]
                module.register_load_state_dict_post_hook(self._after_load)  # type: ignore[no-untyped-call]
            if self._is_hooked(module):
                module.register_forward_pre_hook(self._before_forward, prepend=True)
                module.register_forward_hook(self._after_forward, always_call=True)

    def _is_hooked(self, module: nn.Module) -> bool:
        return module in self._held or (module is self.model and is_called(module))

    def _guarded(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward``, after which nothing of it is in force in this thread, whatever exception ends it."""

        @wraps(forward)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except Exception:  # torch calls ``_after_forward``
                self._restore_thread(module)
                raise
            except BaseException:  # and here it calls no hook
                self._restore_thread(module)
                self._after_forward(module, None, None)
                raise

        return guarded

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by copy and pickle."""
        raise no_copy()

    # -- forward -----------------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        refuse_tracing()
        if in_backward():  # a recomputation
            self._begin_backward()
        elif module is self.model or not self._frames:
            self.reset()
            self.intent.refuse_half_updated()
            self.exchange.pass_begins()
            if module is self.model:
                self.rehearsal.forward_begins("training" if torch.is_grad_enabled() else "inference")
        frame = Frame(module)
        self._frames.append(frame)
        if torch.is_grad_enabled() and not hooks_active():
            push_hooks(self._pack, self._unpack)
        units = self._held.get(module, ())
        for unit in units:
            self._hold(frame, unit)
        kind = "recompute" if in_backward() else "forward"
        frame.span = self.store.span(kind, _names(units) or type(module).__name__)

    def _hold(self, frame: Frame, unit: Unit) -> None:
        if not unit.held:
            self._look_ahead(unit)
        self._hook_gradients(unit)
        self.take(unit)
        self._defer_hidden(unit)
        frame.units.append(unit)
        assert unit.base is not None
        self._bases[unit.base.untyped_storage().data_ptr()] = unit

    def take(self, unit: Unit, access: Access = Access.READ) -> None:
        """``Unit.hold``, with what other processes have to do with it."""
        if unit.held:
            unit.hold(access)
            return
        self.exchange.before_hold(unit)
        unit.hold(access)
        self.exchange.after_hold(unit)

    def _defer_hidden(self, unit: Unit) -> None:
        """Where a forward that records runs something without: reentrant checkpointing, whose gradients come apart."""
        if self._frames[0].recording and not torch.is_grad_enabled():
            self._defer(unit)

    def _defer(self, unit: Unit) -> None:
        """More gradients of it may come until backward ends."""
        self._updates.defer(unit)
        self.exchange.defer(unit)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._frames and self._frames[-1].module is module:
            self._leave(self._frames.pop())

    def _leave(self, frame: Frame) -> None:
        frame.end_span()
        if not frame.below and hooks_active() == (self._pack, self._unpack):  # else an exception took them away
            pop_hooks()
        for unit in reversed(frame.units):
            self._drop(unit)

    def _restore_thread(self, module: nn.Module) -> None:
        """An exception ends the outermost forward: what was in force in it, whoever had it so, is as it was before."""
        while self._frames and self._frames[-1].module is not module and any(f.module is module for f in self._frames):
            self._leave(self._frames.pop())
        if len(self._frames) == 1 and self._frames[0].module is module:
            frame = self._frames[0]
            while hooks_active() and hooks_active() != frame.below:
                pop_hooks()
            torch._C._set_grad_enabled(frame.recording)

    def _drop(self, unit: Unit) -> None:
        assert unit.base is not None
        address = unit.base.untyped_storage().data_ptr()
        try:
            unit.drop()
        finally:
            if not unit.held:
                self._bases.pop(address, None)

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """``module.name`` was evaluated. Inside a forward, the innermost frame holds the parameter's unit from here on; so does
        the running backward, where a function that is no module is computed again.

        torch.utils.checkpoint keeps what its recomputation saves: aliases of parameters that need a gradient, which stay right
        when the unit is let go, but frozen ones as the very object, which would turn to NaN. So there these are aliases, too.
        All are in the graph of a reentrant one, where no hooks of ours are in force.
        """
        found = self._home.get(parameter)
        if found is None:
            return parameter
        unit, placement = found
        if not unit.held:
            unit.refuse_written(placement)
        recomputed = in_backward() and torch.is_grad_enabled()
        if recomputed:
            unit.gradients.refuse_spent(placement)
        if self._frames:
            if not unit.held:
                self._hold(self._frames[-1], unit)
            self._defer_hidden(unit)
        elif recomputed:
            self._hook_gradients(unit)
            self._visit_backward((unit,))
            if parameter.requires_grad and not hooks_active():
                return parameter.view_as(parameter)
        else:
            return parameter
        return parameter.detach() if recomputed and not parameter.requires_grad else parameter

    @property
    def computing(self) -> bool:
        """Whether this is called from within forward or backward.

        A frame alone does not say so: after Ctrl-C torch calls no hook, not even with ``always_call``, which is for Exceptions.
        """
        return in_backward() or bool(self._frames and is_called_within({f.module for f in self._frames}))

    def start(self) -> None:
        """Somebody uses the model otherwise: see that an interruption left nothing in the way. Raises as ``reset``."""
        if (self._frames or self._running is not None) and not self.computing:
            self.reset()
        self.intent.ready()

    def start_anew(self) -> None:
        """The same where nobody may hold a unit, but within forward and backward."""
        if any(unit.in_hand for unit in self.units) and not self.computing:
            self.reset()
        self.start()

    def reset(self) -> None:
        """Let go of everything, also what an exception or Ctrl-C left held. The next forward starts from nothing.

        Raises InterruptedStep where an exception left what cannot be gone on with, MisuseError where a parameter was written to
        while it could only be read.
        """
        self.intent.finish()
        self._let_go(Unit.let_go)
        self.intent.refuse()

    def give_up(self) -> None:
        """The same before all is rolled back: nothing of it is looked at, and nothing raises."""
        self._running = None
        if not in_backward():
            drop_queued()
        self._let_go(Unit.give_up)

    def _let_go(self, how: Callable[[Unit], None]) -> None:
        if self._running is not None and not in_backward():
            drop_queued()
        frames, self._frames = self._frames, []
        for frame in frames:
            frame.end_span()
        self._backward_units = ()
        self._end_backward()
        self._withdraw_hooks()
        self.exchange.abandon()  # not as an exception passes: another rank may have none, and this one would wait for it
        error: TieredError | None = None
        for unit in self.units:
            unit.arriving.close()
            unit.gradients.close()
            try:
                how(unit)
            except TieredError as problem:
                error = problem
        self._bases.clear()
        self._leases.end(self.name)
        if self.splitter is not None:
            self.splitter.reset()
        if error is not None:
            raise error

    def _withdraw_hooks(self) -> None:
        """Those of models whose forward an exception left where nobody could take them away, whatever models these are."""
        while True:
            owner = getattr((hooks_active() or (None,))[0], "__self__", None)
            if not isinstance(owner, Pager) or owner.computing:
                break
            pop_hooks()
        if not in_backward():
            restore_recording()

    # -- saved for backward ------------------------------------------------------------------------------------------------

    def reference(self, tensor: torch.Tensor) -> object | None:
        """What to remember instead of a tensor that shows memory of a unit that is held; None for any other."""
        if tensor.layout is torch.strided:
            unit = self._bases.get(tensor.untyped_storage().data_ptr())
            if unit is not None:
                return Reference(unit, tensor)
        return None

    def _pack(self, tensor: torch.Tensor) -> object:
        if not self._frames:  # an exception left these hooks behind, and this is another model's
            return tensor
        reference = self.reference(tensor)
        if reference is not None or self.splitter is None:
            return tensor if reference is None else reference
        return self.splitter.pack(tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if isinstance(packed, Kept):
            return packed.restore()
        assert isinstance(packed, Reference)
        unit = packed.unit
        _refuse_updated(unit, packed.version)
        if not self._frames:
            self._visit_backward((unit,))
        elif not unit.held:
            self._hold(self._frames[-1], unit)
        assert unit.base is not None
        typed = unit.base.view(packed.dtype)
        return typed.as_strided(packed.size, packed.stride, packed.offset)

    def _visit_backward(self, units: Iterable[Unit]) -> None:
        """Hold these from here on, and those that were held for backward before no longer."""
        self._begin_backward()
        wanted = tuple(units)
        if all(unit in self._backward_units for unit in wanted):
            return
        if self._backward_units:
            self._leave_backward()
            self._updates.apply_ready()
        for unit in wanted:
            self.take(unit)
            self._backward_units += (unit,)
            assert unit.base is not None
            self._bases[unit.base.untyped_storage().data_ptr()] = unit
        self._visiting = self.store.span("backward", _names(wanted))

    def _leave_backward(self) -> None:
        if self._visiting is not None:
            self._visiting.end()
        units, self._backward_units = self._backward_units, ()
        for unit in units:
            self._drop(unit)

    def versions(self, module: nn.Module) -> tuple[int, ...]:
        """Of the units that a module holds."""
        return tuple(unit.version for unit in self._held[module])

    @contextmanager
    def recomputing(self, module: nn.Module, versions: tuple[int, ...]) -> Iterator[Callable[[Any], torch.Tensor]]:
        """Within backward, a part of a split module's forward is computed again. Its units stay until others are needed: all
        parts follow one another. Gives what turns a ``reference``, or something kept, into a tensor again."""
        for unit, version in zip(self._held[module], versions, strict=True):
            _refuse_updated(unit, version)
        frame = Frame(module)
        if not self._frames:
            self._visit_backward(self._held[module])
        self._frames.append(frame)
        try:
            for unit in self._held[module]:
                if not unit.held:
                    self._hold(frame, unit)
            frame.span = self.store.span("recompute", _names(self._held[module]))
            yield self._unpack
        finally:
            while frame in self._frames:
                self._leave(self._frames.pop())

    @property
    def _in_backward(self) -> bool:
        """Whether the backward pass that began last goes on."""
        return self._running is not None and self._running() is not None

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        if self._running is not None or (self._frames and not is_called_within({f.module for f in self._frames})):
            self.reset()  # what was before was interrupted
        self.intent.ready()
        self.exchange.pass_begins(backward=True)
        self._backward_task = graph_task()
        torch.autograd.Variable._execution_engine.queue_callback(self._begun())
        self._passing = self.store.span("backward", type(self.model).__name__)

    def _begun(self) -> Pass:
        """A pass that nobody keeps but autograd."""
        begun = Pass(self._finish_backward)
        self._running = weakref.ref(begun)
        return begun

    def _finish_backward(self) -> None:
        self._leave_backward()
        try:
            self._close_gradients()
            for unit, placement in self.exchange.backward_ended():
                self._updates.arrived(unit, placement)
            self._updates.finish()
            self.intent.updated = False
        finally:
            self._end_backward()

    def _close_gradients(self) -> None:
        if self._gradient_unit is not None:
            self._gradient_unit.arriving.close()
            self._gradient_unit = None

    def _end_backward(self) -> None:
        """Also after an exception."""
        self._leave_backward()
        if self._passing is not None:
            self._passing.end()
        self._updates.abandon()
        self._close_gradients()
        if self.splitter is not None:
            self.splitter.keeper.sweep()
        self._running = None

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def _hook_gradients(self, unit: Unit) -> None:
        """Also for a parameter that was unfrozen since."""
        if not torch.is_grad_enabled():  # nothing is recorded, and in inference mode there is no node to hook
            return
        for placement in unit.plan.placements:
            if placement.parameter.requires_grad and placement not in self._accumulators:
                if placement not in unit.gradients.states:
                    raise MisuseError(
                        f"parameter {placement.name!r} is {placement.dtype}: only real floating point can be trained"
                    )
                parameter: Any = placement.parameter
                # On the node, which accumulates; a hook on the parameter would run for torch.autograd.grad, too. The parameter
                # holds its node weakly.
                node, pair = get_gradient_edge(parameter).node, object()
                node.register_prehook(told(parameter, partial(Pager._gradient_arrives, pair=pair)))
                parameter.register_post_accumulate_grad_hook(told(parameter, partial(Pager._gradient_arrived, pair=pair)))
                self._accumulators[placement] = node, pair  # from here on they count: one of them alone would do harm

    def _is_hook(self, placement: Placement, pair: object) -> bool:
        """Whether hooks of this ``pair`` are those that count, and there is something for them to do."""
        found = self._accumulators.get(placement)
        # frozen since forward: torch does not accumulate, and calls the hooks
        return found is not None and found[1] is pair and placement.parameter.requires_grad

    def _gradient_arrives(self, unit: Unit, placement: Placement, *, pair: object) -> None:
        if not self._is_hook(placement, pair):
            return
        self._open_gradients(unit)
        unit.arriving.before(placement)

    def _gradient_arrived(self, unit: Unit, placement: Placement, *, pair: object) -> None:
        if not self._is_hook(placement, pair):
            return
        assert placement.parameter.grad is not None
        unit.arriving.add(placement, placement.parameter.grad)
        self._trimmer.passed(placement.nbytes)
        self.exchange.arrived(unit, placement)
        if self.partition.shares == 1:  # else once all ranks' are there
            self._updates.arrived(unit, placement)
        if graph_task() != self._backward_task:  # a backward pass within: more may come
            self._defer(unit)

    def _open_gradients(self, unit: Unit) -> None:
        """One unit's gradients are leased at a time."""
        self._begin_backward()
        if self._gradient_unit is not unit:
            if self._updates.waiting and not any(held.references for held in self._backward_units):
                self._leave_backward()
            self._updates.apply_ready()
            self._close_gradients()
            self.exchange.moved_on()
            self._gradient_unit = unit

    def _look_ahead(self, unit: Unit) -> None:
        """While no order is known yet: ask the store for all that this unit will need."""
        if self._prefetch == "on" and not self.rehearsal.following:
            self.store.prefetch(unit.upcoming_keys(), tier=self._update_tier)

    # -- state_dict --------------------------------------------------------------------------------------------------------

    def _after_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in module._parameters.items() if not isinstance(state, Listing) else ():
            if parameter is not None and prefix + name in state and parameter in self._home:
                state[prefix + name] = self.value(parameter)

    def listed(self) -> dict[str, Any]:
        """What ``state_dict`` has, with the parameters themselves in place of their values."""
        return self.model.state_dict(destination=Listing(), keep_vars=True)

    def value(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of a parameter's value in host memory, with pending updates applied."""
        unit, placement = self._home[parameter]
        self.start()
        self.take(unit)
        try:
            return placement.parameter.detach().to("cpu", copy=True)
        finally:
            unit.drop()

    def _loading(self, module: nn.Module) -> list[Unit]:
        return list(dict.fromkeys(self._home[p][0] for p in module._parameters.values() if p in self._home))

    def _before_load(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise MisuseError("load_state_dict(assign=True) would replace paged parameters: load without assign")
        self.start()
        for unit in self._loading(module):
            self.take(unit, Access.WRITE)

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        for unit in self._loading(module):
            unit.drop()


class Home:
    """Whose a parameter is. Weakly: the collector does not see through autograd's node, which keeps the parameter, so a model
    that its parameters referred to would never be collected."""

    def __init__(self, pager: Pager, unit: Unit, placement: Placement) -> None:
        self._pager, self._unit, self._placement = weakref.ref(pager), weakref.ref(unit), weakref.ref(placement)

    def found(self) -> tuple[Pager, Unit, Placement] | None:
        """None: the model is gone."""
        pager, unit, placement = self._pager(), self._unit(), self._placement()
        return None if pager is None or unit is None or placement is None else (pager, unit, placement)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by copy and pickle."""
        raise no_copy()


def no_copy() -> MisuseError:
    return MisuseError("a paged model cannot be copied or pickled: copy or save model.state_dict() instead")


def placement_of(parameter: torch.Tensor) -> tuple[Pager, Unit, Placement]:
    """Raises MisuseError for a parameter that was not paged, or whose model is gone."""
    home = getattr(parameter, "_tiered", None)
    if home is None:
        raise MisuseError(
            "this parameter is not paged: call tiered.zero.page(model, store) before making the optimizer, or make it with "
            "store= to keep only the states there"
        )
    found: tuple[Pager, Unit, Placement] | None = home.found()
    if found is None:
        raise MisuseError("the model of this parameter is gone: keep it as long as its parameters are used")
    return found


def told(parameter: nn.Parameter, what: Callable[[Pager, Unit, Placement], None]) -> Callable[[Any], None]:
    """A hook. It must not keep the model: neither does it refer to the parameter."""
    home: Home = parameter._tiered  # type: ignore[attr-defined]

    def hook(_: Any) -> None:
        found = home.found()
        assert found is not None, "what computes a gradient still has the model"
        what(*found)

    return hook


def _names(units: Iterable[Unit]) -> str:
    return ", ".join(unit.plan.name for unit in units)


def _refuse_updated(unit: Unit, version: int) -> None:
    if unit.version != version:
        raise MisuseError(
            f"the parameters of {unit.plan.name!r} were updated after this graph was made: call backward before step()"
        )


def pagers_of(store: TieredStore) -> list[Pager]:
    """Of all models in ``store``."""
    return [pager for pager in list(_pagers) if pager.store is store]


_pagers: weakref.WeakSet[Pager] = weakref.WeakSet()
