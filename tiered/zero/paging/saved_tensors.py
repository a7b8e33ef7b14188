"""Keep in the store what autograd saves in forward for backward, and ask autograd what it is doing.

What is kept is in temporary tensors of the store, as what ``offload_activations`` moves there. The functions that ask or change
autograd's state (hooks, recording, the running backward pass) use private functions of torch; all of those that paging needs
are here.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
import torch.autograd.forward_ad
import torch.utils.checkpoint
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from tiered.errors import MisuseError
from tiered.store import TieredStore
from tiered.store.activations import KERNEL_ALIGNMENT, FreeNumbers, Hooks, Pieces, Trace, are_offloading

__all__ = [
    "SMALL",
    "ActivationStore",
    "OverHooks",
    "ParameterReferences",
    "SavedActivation",
    "graph_task",
    "in_backward",
    "in_forward_mode",
    "is_called_within",
    "memory_of",
    "of_checkpoint",
    "outside_inference",
    "place_of",
    "refuse_tracing",
    "refuse_transforms",
    "restore_recording",
    "without_grad",
]

_MODES = torch._C._TorchDispatchModeKey

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def graph_task() -> int:
    """Return the number of the backward pass that runs this function, -1 outside."""
    number: int = torch._C._current_graph_task_id()
    return number


def in_backward() -> bool:
    """Return whether a backward pass runs this function: a hook, or a part of forward that is computed again."""
    running: bool = torch._C._current_graph_task_id() != -1
    return running


def in_forward_mode() -> bool:
    """Return whether derivatives are computed forward (torch.autograd.forward_ad)."""
    return torch.autograd.forward_ad._current_level >= 0


def of_checkpoint(hooks: Hooks | None) -> bool:
    """Return whether ``hooks`` are of torch.utils.checkpoint."""
    return bool(hooks) and getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__  # type: ignore[index]


def memory_of(tensor: torch.Tensor) -> int:
    """Return the ``place_of`` the memory that ``tensor`` shows; -1 for a subclass, or within a transform, that has none."""
    try:
        return place_of(tensor.untyped_storage())
    except RuntimeError:
        return -1


def place_of(storage: torch.UntypedStorage) -> int:
    """Return the number that tells memory from all other: its address; where there are no bytes, as on the meta device, that of
    the object that stands for it."""
    return storage.data_ptr() or storage._cdata


class Saving(Protocol):
    """Paged model, whose parameters autograd saves."""

    def reference(self, tensor: torch.Tensor) -> object | None:
        """Return what to remember instead of a tensor that shows memory of a held unit; None for any other."""
        ...

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that a reference, or what was packed otherwise, stands for."""
        ...


class _Kept:
    """Reference that ``over`` put where other hooks had kept memory of a parameter."""

    __slots__ = ("over", "reference")

    def __init__(self, over: OverHooks, reference: object) -> None:
        self.over, self.reference = over, reference


class OverHooks:
    """Saved-tensor hooks of a paged ``model`` over those of somebody else (``below``), which still get every tensor. Memory of
    parameters in what these keep, in lists and dicts too, is remembered by reference.

    Hooks of ``offload_activations`` and of torch.utils.checkpoint get no parameters: what they keep cannot be looked through.
    """

    def __init__(self, model: Saving, below: Hooks) -> None:
        self.model, self._below = model, below
        self._alone = are_offloading(below) or of_checkpoint(below)

    def pack(self, tensor: torch.Tensor) -> Any:
        reference = self.model.reference(tensor)
        if reference is not None and self._alone:
            return _Kept(self, reference)
        shown = tensor if reference is None else tensor.detach()
        return tree_map(self._referred, self._below[0](shown))

    def unpack(self, packed: Any) -> torch.Tensor:
        if self._alone and isinstance(packed, _Kept):
            return self.model.unpack(packed.reference)
        return self._below[1](tree_map(self._restored, packed))

    def _referred(self, value: Any) -> Any:
        reference = self.model.reference(value) if isinstance(value, torch.Tensor) else None
        return value if reference is None else _Kept(self, reference)

    def _restored(self, value: Any) -> Any:
        return self.model.unpack(value.reference) if isinstance(value, _Kept) and value.over is self else value


_unrecorded: set[without_grad] = set()
"""Those that are in force, or that an exception has kept from ending."""


class without_grad:  # as torch.no_grad, which it is but for ``restore_recording``
    """Context manager within which autograd records nothing."""

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        if self._before:
            _unrecorded.add(self)
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)
        _unrecorded.discard(self)


@contextmanager
def outside_inference() -> Iterator[None]:
    """Leave inference mode for a block of code, in which autograd records nothing either: parameters that are made in it could
    not be given memory afterwards, nor be trained."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def restore_recording() -> None:
    """Have torch record again where an exception struck as a ``without_grad`` ended. Called where no paged model is running."""
    if _unrecorded:
        torch._C._set_grad_enabled(True)
        _unrecorded.clear()


def _is_exporting() -> bool:
    """Return whether torch.export runs this."""
    if hasattr(torch.compiler, "is_exporting"):
        return torch.compiler.is_exporting()
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()  # torch 2.6


def refuse_tracing() -> None:
    """Raise MisuseError where torch records a computation instead of running it: with tensors that have no values, or with the
    addresses of parameters that will be elsewhere."""
    what = ""
    if _is_exporting():
        what = "torch.export"
    elif torch._C._get_tracing_state() is not None:
        what = "torch.jit.trace"
    elif torch._C._len_torch_dispatch_stack():
        if torch._C._get_dispatch_mode(_MODES.FAKE) is not None:
            what = "torch.export, or a FakeTensorMode,"
        elif any(torch._C._get_dispatch_mode(mode) is not None for mode in (_MODES.PROXY, _MODES.FUNCTIONAL)):
            what = "torch.fx (make_fx)"
    if what:
        raise MisuseError(
            f"{what} cannot look into a paged model, whose parameters are in memory only while they are used: give it a model "
            "that is not paged (one made anew, with load_state_dict(model.state_dict()))"
        )


def refuse_transforms() -> None:
    """Raise MisuseError within a transform of torch.func, where parameters cannot be given their memory."""
    if torch._C._are_functorch_transforms_active():
        raise MisuseError(
            "a paged model cannot compute within torch.func.grad, vmap, jvp and the like, which need all parameters at a time: "
            "use torch.autograd, or a model in memory (copy.deepcopy(model))"
        )


def is_called_within(modules: set[nn.Module], thread: int | None = None) -> bool:
    """Return whether one of ``modules`` is being called further up in this thread, or in the one of that number. Return True
    where that cannot be told of another thread, which goes on meanwhile."""
    for _ in range(100):
        frame: FrameType | None = sys._getframe() if thread is None else sys._current_frames().get(thread)
        last = None
        while frame is not None:
            if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") in modules:
                return True
            last, frame = frame, frame.f_back
        if thread is None or last is None or not last.f_code.co_flags & _SUSPENDABLE:
            return False
        # The thread has left a generator since, which leads to nobody while it waits: look again.
    return True


class ParameterReferences(Protocol):
    """What a recomputation needs of a paged model, so that its inputs do not keep parameters in memory."""

    def reference(self, tensor: torch.Tensor) -> object | None:
        """Return what to remember instead of a tensor that shows memory of a held unit; None for any other."""
        ...

    def versions(self, module: nn.Module) -> tuple[int, ...]:
        """Return the versions of the units that ``module`` holds."""
        ...

    def recomputing(
        self, module: nn.Module, versions: tuple[int, ...]
    ) -> AbstractContextManager[Callable[[Any], torch.Tensor]]:
        """Hold the units of ``module`` for a recomputation; give what turns a reference or a kept tensor into a tensor.

        Raises MisuseError where a unit was updated since it had ``versions``.
        """
        ...


SMALL = 4 << 10
"""Bytes: smaller tensors stay in memory. In the store they would take a page, too."""


class SavedActivation:
    """One tensor in the store, with its strides, until the last reference to this object is gone.

    ``restore`` gives a copy: where the tensor was expanded (stride 0), of what it was expanded from.
    """

    def __init__(self, store: TieredStore, tensor: torch.Tensor, piece: int) -> None:
        self._store, self._piece = store, piece
        self._expanded = tensor.size()
        tensor = unexpanded(tensor)
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._device = tensor.device
        self._phase = tensor.data_ptr() % KERNEL_ALIGNMENT // tensor.itemsize
        self._dense = tensor.numel() == _span(self._size, self._stride)
        self._small: torch.Tensor | None = None
        self._pieces: Pieces | None = None

    def fill(self, tensor: torch.Tensor, key: str) -> None:
        """Put the values under ``key``, in pieces where they are many. Raises what the store raises."""
        tensor = unexpanded(tensor.detach())
        if tensor.nbytes < SMALL:
            self._small = self._empty()
            self._small.copy_(tensor)
            return
        flat = tensor.as_strided((tensor.numel(),), (1,)) if self._dense else tensor.reshape(-1).contiguous()
        self._pieces = Pieces(self._store, key, flat.view(torch.uint8), self._piece)

    @torch.no_grad()
    def restore(self) -> torch.Tensor:
        """Return a tensor of the same values, size, strides and dtype, which needs no gradient. Raises what the store raises,
        and MisuseError where the store went back to a commit since."""
        made = self._empty()
        if self._pieces is None:
            assert self._small is not None, "it was filled"
            return made.copy_(self._small).expand(self._expanded)
        flat = made.as_strided((made.numel(),), (1,)) if self._dense else made.new_empty(made.numel())
        self._pieces.copy_into(flat.view(torch.uint8))
        if not self._dense:
            made.copy_(flat.view(self._size))
        return made.expand(self._expanded)

    def _empty(self) -> torch.Tensor:
        memory = torch.empty(self._phase + _span(self._size, self._stride), dtype=self._dtype, device=self._device)
        return memory.as_strided(self._size, self._stride, self._phase)


class ActivationStore:
    """Store of activations that are kept as they are now, whatever becomes of their tensors: temporary tensors of the store,
    under ``tiered.saved/NAME/LABEL#NUMBER``.

    A tensor that is kept twice, unchanged, is stored once. Used by one thread; what is kept may be let go of in any.
    """

    def __init__(self, store: TieredStore, name: str, piece: int) -> None:
        self._store, self._name, self._piece = store, name, piece
        self._numbers, self._known = FreeNumbers(), WeakIdKeyDictionary()

    def keep(self, label: str, tensor: torch.Tensor, sizes: Sequence[int]) -> list[SavedActivation] | None:
        """Keep ``tensor`` in parts of ``sizes`` along the first dimension; a single size is the whole tensor. Return one saved
        activation for each part, or None for a tensor that cannot be restored from its values: not strided, conjugated, or with
        elements that share memory in other ways than by expansion.

        Raises what the store raises.
        """
        self.sweep()
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or overlaps(unexpanded(tensor)):
            return None
        known = self._known.get(tensor)  # type: ignore[no-untyped-call]
        there = None if tensor.is_inference() else (tensor.data_ptr(), tensor._version, tuple(sizes), self._store.rollbacks)
        if known is not None and known[0] == there:
            found = [reference() for reference in known[1]]
            if None not in found:
                return found
        parts = [tensor] if len(sizes) == 1 else torch.split(tensor.detach(), list(sizes))
        kept = [self._keep(label if len(sizes) == 1 else f"{label}.{number}", part) for number, part in enumerate(parts)]
        if there is not None:  # else nothing would tell that it was changed
            self._known[tensor] = (there, [weakref.ref(one) for one in kept])
        return kept

    def _keep(self, label: str, tensor: torch.Tensor) -> SavedActivation:
        kept = SavedActivation(self._store, tensor, self._piece)
        trace = Trace(kept, self._numbers.gone.append)
        self._numbers.watch(trace)
        kept.fill(tensor, f"{self._name}/{label}#{self._numbers.take(trace, label)}")
        return kept

    def sweep(self) -> None:
        """Have the numbers of what is gone be free."""
        self._numbers.sweep()


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without the repetitions of its dimensions of stride 0."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether two elements may be in the same place (they are not when every stride steps over all smaller dimensions).
    """
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += (size - 1) * stride if size > 1 else 0
    return False


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last in memory."""
    if 0 in size:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
