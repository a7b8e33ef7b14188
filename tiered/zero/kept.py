"""What backward will need of a forward, kept as ordinary tensors in the store: under pressure they spill by themselves."""

from __future__ import annotations

import heapq
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tiered import TieredStore

__all__ = ["SMALL", "Keeper", "Kept"]

SMALL = 4 << 10
"""Bytes: smaller tensors stay in memory. In the store they would take a page, too."""
ALIGNMENT = 64
"""Bytes: a tensor comes back at the same distance from a multiple of this, so that kernels take the same path."""


class Kept:
    """One tensor, with its strides. Its keys are deleted some time after the last reference to this object is gone.

    ``restore`` gives a copy: where the tensor was expanded (stride 0), of what it was expanded from.
    """

    def __init__(self, store: TieredStore, tensor: torch.Tensor, piece: int) -> None:
        self._store, self._piece = store, max(1, piece // tensor.itemsize)
        self._expanded = tensor.size()
        tensor = unexpanded(tensor)
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._device = tensor.device
        self._phase = tensor.data_ptr() % ALIGNMENT // tensor.itemsize
        self._dense = tensor.numel() == _span(self._size, self._stride)
        self.keys: list[str] = []
        self._small: torch.Tensor | None = None

    def fill(self, tensor: torch.Tensor, key: str) -> None:
        """Put the values under ``key``, in pieces where they are many. Raises what the store raises."""
        tensor = unexpanded(tensor.detach())
        if tensor.nbytes < SMALL:
            self._small = self._empty()
            self._small.copy_(tensor)
            return
        flat = tensor.as_strided((tensor.numel(),), (1,)) if self._dense else tensor.reshape(-1)
        pieces = torch.split(flat, self._piece)
        for number, part in enumerate(pieces):
            self.keys.append(key if len(pieces) == 1 else f"{key}.{number}")
            self._store.put(self.keys[-1], part)

    @torch.no_grad()
    def restore(self) -> torch.Tensor:
        """A tensor of the same values, size, strides and dtype; it needs no gradient. Raises what the store raises."""
        made = self._empty()
        if self._small is not None:
            return made.copy_(self._small).expand(self._expanded)
        flat = made.as_strided((made.numel(),), (1,)) if self._dense else made.new_empty(made.numel())
        for key, part in zip(self.keys, torch.split(flat, self._piece), strict=True):
            with self._store.lease(key) as stored:
                part.copy_(stored)
            del stored
        if not self._dense:
            made.copy_(flat.view(self._size))
        return made.expand(self._expanded)

    def _empty(self) -> torch.Tensor:
        memory = torch.empty(self._phase + _span(self._size, self._stride), dtype=self._dtype, device=self._device)
        return memory.as_strided(self._size, self._stride, self._phase)


class Keeper:
    """Keeps tensors under ``NAME/input/LABEL#NUMBER``, the smallest number that is free: each step uses the same keys.

    A tensor that is kept twice, unchanged, is stored once. Used by one thread; what is kept may be let go of in any.
    """

    def __init__(self, store: TieredStore, name: str, piece: int) -> None:
        self._store, self._prefix, self._piece = store, f"{name}/input", piece
        self._free: dict[str, list[int]] = {}
        self._used: dict[str, int] = {}
        self._gone: deque[tuple[str, int, list[str]]] = deque()
        self._known = WeakIdKeyDictionary()

    def keep(self, label: str, tensor: torch.Tensor, sizes: Sequence[int]) -> list[Kept] | None:
        """One for each of the parts of ``sizes`` along the first dimension; a single size is the whole. None for what can only
        be kept as it is: not strided, conjugated, or with elements that share memory in other ways than by expansion.

        Raises what the store raises.
        """
        self.sweep()
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or overlaps(unexpanded(tensor)):
            return None
        known = self._known.get(tensor)  # type: ignore[no-untyped-call]
        state = None if tensor.is_inference() else (tensor.data_ptr(), tensor._version, tuple(sizes))
        if known is not None and known[0] == state:
            found = [reference() for reference in known[1]]
            if None not in found:
                return found
        parts = [tensor] if len(sizes) == 1 else torch.split(tensor.detach(), list(sizes))
        kept = [self._keep(label if len(sizes) == 1 else f"{label}.{number}", part) for number, part in enumerate(parts)]
        if state is not None:  # else nothing would tell that it was changed
            self._known[tensor] = (state, [weakref.ref(one) for one in kept])
        return kept

    def _keep(self, label: str, tensor: torch.Tensor) -> Kept:
        kept = Kept(self._store, tensor, self._piece)
        free = self._free.setdefault(label, [])
        number = heapq.heappop(free) if free else self._used.setdefault(label, 0)
        self._used[label] = max(self._used.get(label, 0), number + 1)
        weakref.finalize(kept, self._gone.append, (label, number, kept.keys)).atexit = False
        kept.fill(tensor, f"{self._prefix}/{label}#{number}")
        return kept

    def sweep(self) -> None:
        """Delete what nobody needs any more. Not done where that is noticed, which may be inside a garbage collection."""
        while self._gone:
            label, number, keys = self._gone.popleft()
            for key in keys:
                if key in self._store:
                    self._store.delete(key)
            heapq.heappush(self._free[label], number)


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """One of each of the elements that dimensions of stride 0 repeat."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may be in the same place (they are not when every stride steps over all smaller dimensions)."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += (size - 1) * stride if size > 1 else 0
    return False


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last in memory."""
    if 0 in size:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
