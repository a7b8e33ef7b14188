"""Remember what a forward found in its modules beside the values of parameters, so that a recomputation finds the same.

BatchNorm and spectral norm change buffers in forward, hooks set attributes before it, modules count their calls, and whoever
trains two models freezes one of them in between. A forward that is computed again would see what it, or a later one, has left
there, and change it twice. So a ``ModuleState`` is made
before the forward, ``settle`` keeps what the forward has changed, and ``restored`` puts it in place while the forward is
computed again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType
from typing import Any

import torch
from torch import nn

from tiered.errors import MisuseError
from tiered.zero.paging.saved_tensors import ParameterReferences, place_of

__all__ = ["ModuleState", "changed", "uncopied"]

COPIED = 16 << 20
"""Bytes: the memory of a larger buffer is not copied, and a forward that changes it is not computed again."""
SMALL = 256 << 10
"""Bytes: copies of smaller memory stay until backward, in case that somebody else changes it, a hook before forward for one."""
PLAIN = (bool, int, float, complex, str, bytes, NoneType, Enum, torch.dtype, torch.device, torch.Size)
"""Attributes of these types are restored, and tensors. Containers and other objects are left as they are."""
_BESIDE = frozenset(vars(nn.Module())) - {"training"}
"""What torch keeps of each module beside that."""


@dataclass(slots=True)
class _Memory:
    """Memory of one or more tensors, of which ``alias`` shows it, with a copy from before forward, and whether forward has
    changed it."""

    storage: torch.UntypedStorage
    copy: torch.Tensor | None
    alias: torch.Tensor
    version: int
    written: bool = False

    def _differs(self) -> bool:
        """Return whether it has other values than the copy. Where there are no bytes, the version of ``alias`` says so."""
        assert self.copy is not None
        return _version(self.alias) != self.version if self.alias.is_meta else not torch.equal(_bytes(self.storage), self.copy)

    def settle(self) -> None:
        """Look what forward has done. The copy of what it left as it was stays where it is small: others may change that."""
        self.written = self._differs()
        if not self.written and self.storage.nbytes() > SMALL:
            self.copy = None

    def again(self, made: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage | None:
        """Return memory with the values of before, which is put into ``made``, where forward may not use the real one."""
        if self.copy is None or not (self.written or self._differs()):
            return None
        if id(self) not in made:
            made[id(self)] = self.copy.clone().untyped_storage()
        return made[id(self)]


@dataclass(slots=True)
class _Kept:
    """A tensor as forward found it: an alias without a graph, which is no reason for a graph to live, and the object itself
    while others keep it."""

    name: str
    alias: torch.Tensor
    requires_grad: bool
    itself: weakref.ref[torch.Tensor]
    memory: _Memory | None
    version: int

    @staticmethod
    def of(name: str, tensor: torch.Tensor, memory: _Memory | None) -> _Kept:
        return _Kept(name, tensor.detach(), tensor.requires_grad, weakref.ref(tensor), memory, _version(tensor))

    def again(self, made: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """Return the tensor as it was, on memory of its own where the real one is not so or is not to change. Raises
        MisuseError where it was changed since forward and is not kept."""
        storage = None if self.memory is None else self.memory.again(made)
        if storage is not None:
            like = self.alias
            found = torch.empty(0, dtype=like.dtype, device=like.device)
            found.set_(storage, like.storage_offset(), like.size(), like.stride())
            return found.requires_grad_(self.requires_grad)
        if (self.memory is None or self.memory.copy is None) and _version(self.alias) != self.version:
            raise MisuseError(
                f"{self.name!r} was changed between forward and backward, which computes this forward again: change it after "
                "backward, or use activations='store' or 'memory'"
            )
        itself = self.itself()
        return itself if itself is not None else self.alias.detach().requires_grad_(self.requires_grad)


@dataclass(slots=True)
class _Found:
    """One module before forward: the tensors and the plain values among its buffers and attributes, and all names."""

    module: nn.Module
    buffers: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    names: frozenset[str] = frozenset()


class ModuleState:
    """Buffers and attributes of ``module``, and of those within it, and which of its parameters are frozen, as they are before
    a forward. Tensors that show memory of parameters, as ``references`` tells, are left alone.

    Costs a copy of the buffers, of at most 16 MiB each, until ``settle``; from then on, of those that are small, and of those
    that forward has changed.
    """

    def __init__(self, module: nn.Module, references: ParameterReferences) -> None:
        self._memories: dict[int, _Memory] = {}
        self._references = references
        self._uncopied = uncopied(module)
        self._found = [self._look(name, one) for name, one in module.named_modules()]
        self._put_back: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        with torch._C.DisableTorchFunctionSubclass():  # a flag needs no values
            self._trained = [(parameter, parameter.requires_grad) for parameter in module.parameters() if parameter.is_leaf]
        self._trained_now: list[tuple[nn.Parameter, bool]] = []

    def _look(self, prefix: str, module: nn.Module) -> _Found:
        own = {name: value for name, value in vars(module).items() if name not in _BESIDE}
        found = _Found(module, names=frozenset(own))
        for values, kept in ((module._buffers, found.buffers), (own, found.attributes)):
            for name, value in values.items():
                if isinstance(value, PLAIN):
                    kept[name] = value
                elif self._is_state(value, values is module._buffers):
                    kept[name] = _Kept.of(f"{prefix}.{name}".lstrip("."), value, self._memory_of(value))
        return found

    def _is_state(self, value: Any, buffer: bool) -> bool:
        """Return whether ``value`` is a tensor and shows no memory of parameters: those of classes of their own may."""
        if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
            return False
        return (buffer or type(value) is torch.Tensor) and self._references.reference(value) is None

    def _memory_of(self, tensor: torch.Tensor) -> _Memory | None:
        """Return the memory of a tensor that forward may write to: an output of other operations is none."""
        if tensor.grad_fn is not None or not _is_copied(tensor):
            return None
        storage = tensor.untyped_storage()
        place = place_of(storage)
        if place not in self._memories:
            self._memories[place] = _Memory(storage, _bytes(storage).clone(), tensor.detach(), _version(tensor))
        return self._memories[place]

    def settle(self) -> str | None:
        """Keep what forward has changed. Return the name of a buffer that it has changed and that cannot be restored, if there
        is one."""
        with torch.inference_mode(False), torch.no_grad():
            for memory in self._memories.values():
                memory.settle()
        self._memories = {}
        for kept in self._kept():
            kept.version = _version(kept.alias)
        return changed(self._uncopied)

    @property
    def changed(self) -> str | None:
        """Return the name of a buffer that forward has changed, if there is one; after ``settle``."""
        for found in self._found:
            for name, kept in found.buffers.items():
                if isinstance(kept, _Kept):
                    written = kept.memory is not None and kept.memory.written
                    if written or kept.itself() is not found.module._buffers.get(name):
                        return kept.name
        return None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have modules be as forward found them for a block of code, and afterwards as they are now."""
        made: dict[int, torch.UntypedStorage] = {}
        with torch.inference_mode(False), torch.no_grad():
            wanted = [
                {name: value.again(made) if isinstance(value, _Kept) else value for name, value in values.items()}
                for found in self._found
                for values in (found.buffers, found.attributes)
            ]
        written = [
            (kept.name, kept.alias, _version(kept.alias))
            for kept in self._kept()
            if kept.memory is not None and kept.memory.written
        ]
        self._put_back = [(one.module, dict(one.module._buffers), dict(vars(one.module))) for one in self._found]
        with torch._C.DisableTorchFunctionSubclass():
            self._trained_now = [
                (one, one.requires_grad) for one, before in self._trained if one.requires_grad != before and one.is_leaf
            ]
        try:
            for parameter, now in self._trained_now:
                parameter.requires_grad_(not now)
            for number, found in enumerate(self._found):
                _set(found.module._buffers, wanted[2 * number], found.buffers.keys())
                _set(vars(found.module), wanted[2 * number + 1], found.names)
            yield
        finally:
            self.put_back()
            again = changed(written)
            if again is not None:  # whatever ends the block: torch ends a recomputation by an exception
                raise MisuseError(
                    f"{again!r} was changed once more as forward was computed again, because forward reaches it otherwise than "
                    "as an attribute of its module: use activations='store' or 'memory'"
                )

    def _kept(self) -> Iterator[_Kept]:
        for found in self._found:
            for kept in (*found.buffers.values(), *found.attributes.values()):
                if isinstance(kept, _Kept):
                    yield kept

    def put_back(self) -> None:
        """End what ``restored`` does; once more where an exception struck."""
        for module, buffers, attributes in self._put_back:
            _set(module._buffers, buffers, buffers.keys())
            _set(vars(module), attributes, attributes.keys())
        for parameter, now in self._trained_now:
            parameter.requires_grad_(now)
        self._put_back, self._trained_now = [], []


def _set(target: dict[str, Any], values: dict[str, Any], names: Any) -> None:
    """Give ``target`` these ``values``; what it has beside ``names`` is taken away."""
    for name in [name for name in target if name not in names and name not in _BESIDE]:
        del target[name]
    for name, value in values.items():
        if name not in target or target[name] is not value:
            target[name] = value


def uncopied(module: nn.Module) -> list[tuple[str, torch.Tensor, int]]:
    """Return the buffers of ``module`` that are not copied, with their versions."""
    return [(name, buffer, _version(buffer)) for name, buffer in module.named_buffers() if not _is_copied(buffer)]


def changed(before: list[tuple[str, torch.Tensor, int]]) -> str | None:
    """Return the name of a tensor of ``before`` that was written to since, if there is one."""
    return next((name for name, one, version in before if _version(one) != version), None)


def _is_copied(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return not tensor.is_nested and tensor.untyped_storage().nbytes() <= COPIED


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))
