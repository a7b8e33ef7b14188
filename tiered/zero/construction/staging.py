"""Stage the parameters of a model that is not paged yet: a few in memory, the others in the store.

A *window* of the parameters that were used last is in ordinary memory; what falls out of it is put into the store as a
tensor ``zero.init/N`` and *released*: its ``data`` becomes a placeholder. Which of the two a parameter is shows in its memory
alone, so that everything that torch does with parameters (assigning ``data``, making another Parameter of one) means what it
always means. A stored value is deleted when the last tensor on its placeholder is gone: that is when the parameter got
memory again, was paged, was given other data, or died.

A parameter stays in memory for as long as something else uses its memory (``kept = module.weight.data``, a graph that saved
it). So nothing written through such an alias is ever lost, and it costs no memory that the alias does not take anyway.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tiered.errors import CapacityError, MisuseError, expect_type
from tiered.store import TieredStore
from tiered.store.activations import users_of
from tiered.system import Trimmer, beside_pool, refuse_little_room
from tiered.types import Owner
from tiered.zero.paging.unit import Placeholder
from tiered.zero.paging.units import ALL

__all__ = ["PREFIX", "Staged", "Window", "current", "find"]

PREFIX = "zero.init/"
_OWNER = Owner("build", PREFIX.rstrip("/"))
"""Keys of parameters that wait in the store to be paged. Nobody else's: what a run left there, the next one deletes."""
WINDOW_SHARE = 8
"""The window is this fraction of the pool, as far as what a process may take beside the pool allows."""
SPARE = 64 << 20
"""Bytes of what it may take that parameters in memory leave alone: temporary tensors and freed memory are there, too."""


@dataclass(eq=False)
class Staged:
    """Value in the store, and the parameter (or parameters) that show its placeholder."""

    window: Window
    key: str
    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    context: int
    memory: weakref.ref[ctypes.Array[ctypes.c_char]]
    pattern: bytes
    value: torch.Tensor | None = None  # in memory again, for another parameter on the same placeholder
    lost: bool = False

    @property
    def written(self) -> bool:
        """Return whether somebody wrote to the placeholder, which reaches nothing."""
        memory = self.memory()
        return memory is not None and memory.raw != self.pattern


@dataclass(eq=False)
class _Resident:
    parameter: weakref.ref[nn.Parameter]
    name: str
    context: int
    nbytes: int


class Window:
    """Parameters of one open store that are in memory. Used by one thread at a time."""

    def __init__(self, store: TieredStore) -> None:
        self._store = weakref.ref(store)
        self.name = str(store)
        pool = store.statistics().tier("dram").capacity
        self._pool = pool
        self._most = beside_pool(pool) - SPARE
        self.limit = self.usual = min(pool // WINDOW_SHARE, self._most)
        self.context = 0
        self.resident_bytes = self.peak_bytes = self.released = self.fetched = 0
        self._largest = 0
        self._lowest = 0  # resident bytes that the last attempt to release could not get below
        self._numbers = itertools.count()
        self._resident: OrderedDict[int, _Resident] = OrderedDict()
        self._staged: dict[int, Staged] = {}
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Those that the zero.init block in force has made so far."""
        self.guards: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()
        self.building = False  # a zero.init block is in force, in some thread
        self._gone: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
        self._trimmer = Trimmer(pool)
        store.delete_owned(_OWNER)
        _windows.add(self)

    @staticmethod
    def of(store: TieredStore) -> Window:
        """Return the window of an open store. A new one deletes what an earlier process left in the store."""
        expect_type(store, TieredStore, "the store that a model is built in is a TieredStore")
        window = store.attached.made(Window, lambda: Window(store))
        window.sweep()
        return window

    @property
    def store(self) -> TieredStore:
        store = self._store()
        if store is None:
            raise MisuseError(f"{self.name} is gone, and the values of released parameters with it")
        return store

    # -- finding -----------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Forget parameters that died, and delete stored values that nothing shows any more."""
        while not self._gone.empty():
            where, key = self._gone.get()
            if key is None:
                self._forget(where)
                continue
            found = self._staged.get(where)
            if found is not None and found.key == key:
                del self._staged[where]
            with suppress(MisuseError):  # not there any more, or the store is closed
                self.store.delete(key, owner=_OWNER)

    def staged(self, tensor: torch.Tensor) -> Staged | None:
        """Return the value behind a placeholder, if ``tensor`` is on one of this window's."""
        self.sweep()
        if not self._staged or type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return None
        return self._staged.get(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else None

    def known(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return name and context of a parameter of this window."""
        resident = self._resident.get(id(tensor))
        if resident is not None and resident.parameter() is tensor:
            return resident.name, resident.context
        found = self.staged(tensor)
        return None if found is None else (found.name, found.context)

    # -- moving ------------------------------------------------------------------------------------------------------------

    def track(self, parameter: nn.Parameter, name: str, context: int) -> None:
        """Count ``parameter`` among those in memory, the youngest, and let go of older ones where there are too many.

        What is known of it already stays as it was. Parameters that are meta, on another device, sparse, empty, paged or of a
        class of their own are left alone. Raises CapacityError for one that no model paged into this store may have.
        """
        self.bring([parameter])
        self._admit(parameter, *(self.known(parameter) or (name, context)))
        self._make_room(0, {id(parameter)})

    def _admit(self, parameter: nn.Parameter, name: str, context: int) -> None:
        self._forget(id(parameter))
        if not _is_movable(parameter):
            return
        nbytes = parameter.untyped_storage().nbytes()
        if 3 * nbytes > self._pool:
            raise CapacityError(
                f"parameter {name} has {nbytes:,} bytes: a DRAM budget of {self._pool:,} bytes is too small for this model, "
                f"{3 * nbytes:,} bytes is the least"
            )
        gone, where = self._gone, id(parameter)
        reference = weakref.ref(parameter, lambda _: gone.put((where, None)))
        if nbytes > self._most:  # more than was asked for when the block began; as a rule it has not been written to yet
            refuse_little_room(self.store, f"parameter {name} of {nbytes:,} bytes", largest=nbytes)
        self._resident[where] = _Resident(reference, name, context, nbytes)
        self._largest = max(self._largest, nbytes)
        self.resident_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def bring(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give released ones among ``tensors`` their values. They are in memory together."""
        wanted = list(tensors)
        together = {id(tensor) for tensor in wanted}
        for tensor in wanted:
            found = self.staged(tensor)
            if found is None:
                if id(tensor) in self._resident:
                    self._resident.move_to_end(id(tensor))
                continue
            self.check(found, tensor)
            value = found.value
            if value is None:
                self._make_room(found.shape.numel() * found.dtype.itemsize, together)
                value = self._fetch(found)
            with torch.inference_mode(False):
                tensor.data = value
            if found.memory() is not None:  # another tensor is on the placeholder, and must come to share this memory
                found.value = tensor.data
            del value
            if isinstance(tensor, nn.Parameter):
                self._admit(tensor, found.name, found.context)

    def check(self, found: Staged, tensor: torch.Tensor) -> None:
        """Raise MisuseError where the stored value is not what ``tensor`` should have."""
        if found.lost:
            raise MisuseError(
                f"{found.name} was built in a zero.init block that an exception left: its values are deleted, build it again"
            )
        if tensor.shape != found.shape:
            raise MisuseError(
                f"a tensor of shape {tuple(tensor.shape)} was made of the released parameter {found.name} in a way that "
                "zero.init cannot see: make it inside the block, by torch functions"
            )
        if found.written:
            raise MisuseError(
                f"{found.name} was written to after its zero.init block, when its values were in the store already: "
                "change parameters inside the block"
            )

    def _fetch(self, found: Staged) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad(), self.store.lease(found.key, tier="dram") as stored:
            value = torch.empty_strided(found.shape, found.stride, dtype=found.dtype, device="cpu")
            value.copy_(stored)
            del stored
        self.fetched += 1
        return value

    def _make_room(self, incoming: int, keep: set[int]) -> None:
        """Release the oldest parameters until ``incoming`` bytes fit, and then another parameter as large as the largest yet,
        which torch makes before it tells of it; but not more than half of the window for that, unless the process had too much
        then."""
        self.sweep()
        spared = min(self._largest, self.limit // 2)
        target = max(0, min(self.limit - spared, max(self.limit, self._most) - self._largest) - incoming)
        if self.resident_bytes <= max(target, self._lowest):
            return
        for where in list(self._resident):
            if self.resident_bytes <= target:
                break
            if where not in keep:
                self._release(where)
        kept = sum(self._resident[where].nbytes for where in keep if where in self._resident)
        self._lowest = self.resident_bytes - kept  # these will not be kept next time

    def _release(self, where: int) -> None:
        """Put a parameter into the store, unless something else uses its memory."""
        found = self._resident[where]
        parameter = found.parameter()
        if parameter is None or not _is_movable(parameter):
            self._forget(where)
            return
        if _has_aliases(parameter):
            return
        placeholder = Placeholder(parameter.shape, parameter.dtype)
        key = f"{PREFIX}{next(self._numbers)}"
        placeholder.when_unused(self._gone.put, (placeholder.address, key))
        self._staged[placeholder.address] = Staged(
            self,
            key,
            found.name,
            parameter.shape,
            parameter.stride(),
            parameter.dtype,
            found.context,
            placeholder.memory(),
            placeholder.pattern,
        )
        self.store.put(key, parameter, owner=_OWNER)
        with torch.inference_mode(False):
            parameter.data = placeholder.tensor
        self._forget(where)
        self.released += 1
        self._trimmer.passed(found.nbytes)

    def _forget(self, where: int) -> None:
        found = self._resident.pop(where, None)
        if found is not None:
            self.resident_bytes -= found.nbytes
            self._lowest = min(self._lowest, self.resident_bytes)

    # -- ends --------------------------------------------------------------------------------------------------------------

    def flush(self) -> list[str]:
        """Release all parameters. Return the names of those that stay in memory because something else uses it."""
        self.sweep()
        for where in list(self._resident):
            self._release(where)
        self._lowest = self.resident_bytes
        self._trimmer.trim()
        return [found.name for found in self._resident.values()]

    def discard(self, context: int) -> None:
        """Delete the values of all parameters that were made in one context, and forget those in memory."""
        self.sweep()
        for found in self._staged.values():
            if found.context == context and not found.lost:
                found.lost = True
                with suppress(MisuseError):
                    self.store.delete(found.key, owner=_OWNER)
        for where, resident in list(self._resident.items()):
            if resident.context == context:
                self._forget(where)

    def copy_to(self, target: torch.Tensor, found: Staged, at: int | slice = ALL) -> None:
        """Copy the value, or what it has ``at`` an index along its first dimension, into ``target``, which has its shape."""
        if found.value is not None:
            target.copy_(found.value if at is ALL else found.value[at])
            return
        with self.store.lease(found.key, tier="dram") as stored:
            target.copy_(stored if at is ALL else stored[at])
            del stored


_windows: weakref.WeakSet[Window] = weakref.WeakSet()
"""Those of all stores. Two blocks on one store share one, and what a new one finds there nobody waits for any more."""


current: ContextVar[Window | None] = ContextVar("current", default=None)
"""The window of the ``zero.init`` block that this thread is in. Torch's registration hooks run in all threads."""


def find(parameter: nn.Parameter) -> Staged | None:
    """Return the value that stands behind a placeholder, in whichever store it is, or was."""
    own = getattr(parameter.__dict__.get("__deepcopy__"), "window", None)
    for window in [*([own] if isinstance(own, Window) else []), *_windows]:
        found = window.staged(parameter)
        if found is not None:
            return found
    return None


def _is_movable(parameter: torch.Tensor) -> bool:
    """Return whether a parameter can go to the store and come back just as it was."""
    return (
        type(parameter) is nn.Parameter
        and parameter.layout is torch.strided
        and parameter.device.type == "cpu"
        and parameter.numel() > 0
        and not hasattr(parameter, "_tiered")
        and not (parameter.is_conj() or parameter.is_neg() or parameter.is_quantized or parameter.is_inference())
        and all(stride > 0 or size == 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    )


def _has_aliases(tensor: torch.Tensor) -> bool:
    return any(count > 0 for count in users_of(tensor))
