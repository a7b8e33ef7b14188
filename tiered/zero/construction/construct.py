"""Build a model that is never whole in memory: torch's own operations run in their order, and parameters wait in the store.

Within the block torch tells of every parameter that a module is given, and a ``TorchFunctionMode`` sees every torch function
(methods and properties too) before it runs. A function that may look at, or write to, a released parameter gets its values back
first.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from tiered.errors import MisuseError
from tiered.store import TieredStore
from tiered.system import refuse_little_room, returned_at_once
from tiered.zero.construction.staging import Window, current, find
from tiered.zero.paging.saved_tensors import outside_inference

__all__ = ["Construction", "ConstructionStatistics", "init", "unguard"]

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "grad", "grad_fn", "is_leaf"),
    *("is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "_version"),
)
_METHODS = (
    *("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "requires_grad_"),
    *("register_hook", "__len__", "__hash__"),
)
_WITHOUT_VALUES = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "grad")),
    *(getattr(torch.Tensor, name) for name in _METHODS),
    *(getattr(torch, name) for name in ("numel", "is_floating_point", "is_complex")),
}
"""Functions that a released parameter answers as it is. Everything else is given the values, whether it wants them or not."""


@dataclass(frozen=True, slots=True)
class ConstructionStatistics:
    """Counters of one ``zero.init`` block so far. Bytes are those of parameters in ordinary memory.

    ``limit``: what the block stays below, as long as no parameter is larger than half of it, no function needs more at once
    than that, and nothing else keeps the memory of parameters. ``peak``: the most there was at a time. ``resident``: now. The
    process has more: what was touched of the pool, the temporary tensors of initialisers, and 48 MiB of freed memory at most.
    ``released`` and ``fetched`` count parameters that went to the store and came back from it.
    """

    limit: int
    peak: int
    resident: int
    released: int
    fetched: int


def init(store: TieredStore, *, window: int | None = None) -> Construction:
    """``with zero.init(store): model = Big(config)``: build a model that is never whole in memory. ``zero.page`` adopts it.

    Inside the block modules are built and initialised by ordinary code, in place, in any order and more than once; values are
    bit for bit those of the same code without the block. Parameters that were used last stay in memory, up to ``window`` bytes
    (default: an eighth of the pool, of a large one a tenth and 48 MiB; more only where a single parameter or function needs
    more). The others wait in the store, under keys that begin with ``zero.init/``. Buffers stay in memory, and so do parameters
    on the meta device, which ``page`` initialises, and those of classes of their own.

    After the block the parameters have shape but no values (they read as NaN) until ``zero.page(model, store)``: calling a
    module that has some, ``state_dict`` and ``load_state_dict`` raise MisuseError until then, also of a module that was built
    in the block and is no part of the model (a copy, a prototype): build it outside, or page it, too. An exception that leaves
    the block deletes what was built in it. What is never paged is deleted when the model dies and the store is next used by
    ``init`` or ``page``, or by the first of these after the store is reopened.

    Entering raises MisuseError inside another such block, and CapacityError where a memory cgroup leaves less than building may
    take beside the pool (docs/memory.md). Inside, CapacityError is raised for a parameter that is larger than a third of the
    pool, or than the cgroup leaves, and what ``store.put`` and ``store.lease`` raise.
    """
    return Construction(store, window)


class Construction:
    """Context manager that ``zero.init`` returns, in force in one thread and one block per store at a time."""

    def __init__(self, store: TieredStore, limit: int | None) -> None:
        self._store, self._limit = store, limit
        self._window = Window.of(store)
        self._context = 0
        self._stack = ExitStack()

    def statistics(self) -> ConstructionStatistics:
        """Return the counters so far."""
        window = self._window
        return ConstructionStatistics(
            window.limit, window.peak_bytes, window.resident_bytes, window.released, window.fetched
        )

    def __enter__(self) -> Construction:
        window = self._window
        if current.get() is not None or window.building:
            raise MisuseError("zero.init inside zero.init: one block is in force at a time, in one thread per store")
        limit = window.usual if self._limit is None else self._limit
        refuse_little_room(self._store, "building a model", more=max(0, limit - window.usual))
        window.limit = limit
        window.context += 1
        self._context = window.context
        window.released = window.fetched = 0
        window.peak_bytes = window.resident_bytes
        with ExitStack() as stack:
            stack.enter_context(returned_at_once())
            stack.enter_context(outside_inference())
            window.building = True
            stack.callback(setattr, window, "building", False)
            current.set(window)
            stack.callback(current.set, None)
            stack.callback(register_module_parameter_registration_hook(self._parameter_made).remove)
            stack.callback(register_module_module_registration_hook(self._module_made).remove)
            stack.enter_context(saved_tensors_hooks(_save, _saved))
            stack.enter_context(_Serving(self._window))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        window = self._window
        with outside_inference(), torch._C.DisableTorchFunction():
            if kind is not None:
                window.discard(self._context)
            else:
                self._track_unseen(window.modules)
            kept = window.flush()
            for module in window.modules:
                _guard(module, window)
            window.modules.clear()
        if window.resident_bytes > window.limit:
            warnings.warn(
                f"{window.resident_bytes:,} bytes of parameters stay in memory until zero.page, because something else "
                f"uses their memory: {', '.join(kept[:3])}{', ...' if len(kept) > 3 else ''}",
                stacklevel=2,
            )

    def _track_unseen(self, modules: Iterable[nn.Module]) -> None:
        """Track parameters that torch does not tell of: copied ones, and those that were given other memory by ``set_``."""
        for module in modules:
            for name, parameter in module._parameters.items():
                with torch._C.DisableTorchFunction():
                    new = parameter is not None and self._window.known(parameter) is None
                if parameter is not None and new:
                    self._track(module, name, parameter)

    # -- what torch tells --------------------------------------------------------------------------------------------------

    def _parameter_made(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if current.get() is self._window:
            self._window.modules.add(module)
            if parameter is not None:
                self._track(module, name, parameter)

    def _module_made(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """Track parameters that came into a module without being registered: copies, conversions from meta."""
        if current.get() is self._window and child is not None:
            self._window.modules.update(child.modules())
            self._track_unseen(child.modules())

    def _track(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        with torch._C.DisableTorchFunction():
            _track(self._window, parameter, f"{type(module).__name__}.{name}", self._context)


class _Serving(TorchFunctionMode):
    """Function mode that brings a function's arguments back before it runs."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self._window = window

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            return func(*args, **kwargs)
        window = self._window
        known: dict[int, tuple[torch.Tensor, tuple[str, int]]] = {}
        with torch._C.DisableTorchFunction():
            for tensor in _tensors((args, kwargs)):
                found = window.known(tensor)
                if found is not None:
                    known[id(tensor)] = tensor, found
            replaced = args[0] if func == torch.Tensor.data.__set__ else None  # type: ignore[attr-defined]
            window.bring(tensor for tensor, _ in known.values() if tensor is not replaced)
        result = func(*args, **kwargs)
        if known:
            with torch._C.DisableTorchFunction():  # it may have other memory now, of another size
                for tensor, (name, context) in known.values():
                    if isinstance(tensor, nn.Parameter):
                        window.track(tensor, name, context)
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


def _save(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias: in place of a parameter, so that a graph counts among those who use the memory; and in place of the
    result of the function that saves it, which would keep its graph, and be kept by it, for ever."""
    return tensor.detach()


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# -- copies ------------------------------------------------------------------------------------------------------------------


def _track(window: Window, parameter: nn.Parameter, name: str, context: int) -> None:
    window.track(parameter, name, context)
    if window.known(parameter) is not None:
        parameter.__dict__.setdefault("__deepcopy__", _Copying(parameter, window))


class _Copying:
    """What stands as ``parameter.__deepcopy__``: nn.Transformer copies its layers, and copies are not registered anywhere.

    It also leads from a parameter to its window, whose store may be gone.
    """

    def __init__(self, parameter: nn.Parameter, window: Window) -> None:
        self._parameter, self.window = weakref.ref(parameter), window

    def __call__(self, memo: dict[int, Any]) -> nn.Parameter:
        parameter, window = self._original(), self.window
        copied: nn.Parameter = type(parameter).__deepcopy__(parameter, memo)  # type: ignore[no-untyped-call]
        if current.get() is window:
            module = next((one for one in reversed(memo.values()) if isinstance(one, nn.Module)), None)
            if module is not None:  # the one that is being made: its parameters are copied before modules within it
                window.modules.add(module)
            with torch._C.DisableTorchFunction():
                found = window.known(parameter)
                if found is not None:
                    _track(window, copied, found[0], window.context)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._original()
        return type(None), ()

    def _original(self) -> nn.Parameter:
        parameter = self._parameter()
        assert parameter is not None
        if current.get() is not self.window:
            _refuse(parameter)
        return parameter


# -- between the block and page ----------------------------------------------------------------------------------------------


def _refuse(parameter: nn.Parameter) -> None:
    found = find(parameter)
    if found is not None:
        raise MisuseError(
            f"the values of {found.name} are in the store since the end of its zero.init block: call zero.page(model, store) "
            "first, or do this inside the block"
        )


def _guard(module: nn.Module, window: Window) -> None:
    if module not in window.guards and any(p is not None and window.staged(p) for p in module._parameters.values()):
        window.guards[module] = [
            module.register_state_dict_pre_hook(_refuse_module),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_refuse_module),  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(_refuse_module),
        ]


def _refuse_module(module: nn.Module, *rest: Any) -> None:
    if current.get() is None:
        for parameter in module._parameters.values():
            if parameter is not None:
                _refuse(parameter)


def unguard(model: nn.Module, window: Window) -> None:
    """Forget that ``model``, which is paged, was built in a ``zero.init`` block."""
    for module in model.modules():
        for handle in window.guards.pop(module, ()):
            handle.remove()
    for parameter in model.parameters():
        parameter.__dict__.pop("__deepcopy__", None)
