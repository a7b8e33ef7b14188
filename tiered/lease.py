"""Leases, and the tensors that they give: lifetimes as values."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from tiered.engine import Engine
from tiered.errors import ManifestError, MisuseError
from tiered.requests import Lease
from tiered.residency import Copy
from tiered.tiers.dram import DramTier
from tiered.types import Access, Key, TensorSpec

__all__ = ["LeaseOfMany", "LeaseOfOne", "dtype_of", "spec_of"]


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Shape and element type of ``tensor``."""
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.dtype.itemsize)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Raises ManifestError when this torch has no such element type."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != spec.itemsize:
        raise ManifestError(f"this torch ({torch.__version__}) has no element type {spec.dtype!r} of {spec.itemsize} bytes")
    return dtype


class _Held:
    """Copies on loan to the caller, and the tensors made of them."""

    def __init__(
        self, running: Callable[[], Engine], dram: DramTier, keys: Sequence[Key], access: Access, tier: int
    ) -> None:
        self._running, self._dram = running, dram
        self._keys, self._access, self._tier = keys, access, tier
        self._engine: Engine | None = None
        self._copies: list[Copy] | None = None
        self._versions: list[tuple[torch.Tensor, int]] = []

    def _enter(self) -> list[torch.Tensor]:
        if self._copies is not None:
            raise MisuseError(f"this lease of {', '.join(map(repr, self._keys))} is open already; make another one")
        request = Lease(self._keys, self._tier, self._access)
        self._engine = engine = self._running()
        engine.wait(request)
        self._copies = request.copies
        directory = engine.admission.directory
        tensors: list[torch.Tensor] = []
        try:
            for copy in self._copies:
                tensors.append(_view(engine, self._dram, copy, directory.entry(copy.key).spec))
        except BaseException:
            for copy in self._copies[len(tensors) :]:
                engine.alias_died(copy)  # the view that there will not be
            self._exit(failing=True)
            raise
        if self._access is Access.READ:
            witnesses = [copy.witness for copy in self._copies]
            self._versions = [(w, w._version) for w in witnesses if isinstance(w, torch.Tensor)]
        return tensors

    def _exit(self, failing: bool) -> None:
        copies, self._copies = self._copies, None
        if copies is None or self._engine is None:
            return
        written = [
            copy.key for copy, (witness, version) in zip(copies, self._versions, strict=False) if witness._version != version
        ]
        self._versions = []
        self._engine.release(copies, self._access)
        if written and not failing:
            raise MisuseError(
                f"tensor {written[0]!r} was written to under a READ lease; take store.lease(key, access='write') to change it"
            )


class LeaseOfOne(_Held):
    """``with store.lease(key) as tensor:``"""

    def __enter__(self) -> torch.Tensor:
        return self._enter()[0]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit(kind is not None)


class LeaseOfMany(_Held):
    """``with store.lease([key, ...]) as (tensor, ...):``"""

    def __enter__(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._enter())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit(kind is not None)


def _view(engine: Engine, dram: DramTier, copy: Copy, spec: TensorSpec) -> torch.Tensor:
    """A tensor on ``copy``'s slot. Its memory tells the engine when the last alias of it is gone, whoever holds that.

    All tensors ever made of one copy share one version counter: autograd then notices when something that it saved under a
    READ lease was changed under a later WRITE lease of the same slot.
    """
    dtype = dtype_of(spec)
    with torch.inference_mode(False):  # a view made there would have no version
        if spec.nbytes == 0:
            engine.alias_died(copy)
            return torch.empty(spec.shape, dtype=dtype)
        buffer = (ctypes.c_char * spec.nbytes).from_address(dram.address + copy.slot.offset)
        memory = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(spec.shape)
        with engine.lock:  # two threads with a READ lease each must not make two of them
            if copy.witness is None:
                witness = memory.detach()
                witness.data = torch.empty(0, dtype=dtype)
                copy.witness = witness
        assert isinstance(copy.witness, torch.Tensor)
        tensor = copy.witness.detach()
        tensor.data = memory
        # The arguments keep the arena mapped for as long as the buffer lives, also beyond the store.
        weakref.finalize(buffer, _alias_died, engine, copy, dram.arena).atexit = False
        return tensor


def _alias_died(engine: Engine, copy: Copy, arena: object) -> None:
    engine.alias_died(copy)
