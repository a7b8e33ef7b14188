"""Leases, and the tensors that they give.

A lease lasts as long as its token, and a view as long as its last alias, so that both end without code that an exception could
interrupt.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, NoReturn, TypeVar

import torch

from tiered.engine.engine import Engine
from tiered.engine.requests import Lease
from tiered.engine.residency import Copy
from tiered.engine.state import Token
from tiered.errors import MisuseError, TieredError, drop_frames
from tiered.interfaces import Memory
from tiered.tensors.specs import dtype_of
from tiered.tiers.dram import DramTier
from tiered.types import Access, Key, TensorSpec

__all__ = ["LeaseOfAddresses", "LeaseOfMany", "LeaseOfOne", "end_struck"]

Made = TypeVar("Made")


class _Held(Generic[Made]):
    """A lease as a context manager: the copies that it holds, and what is made of them, a list of as many."""

    viewed = True

    def __init__(self, running: Callable[[], Engine], keys: Sequence[Key], access: Access, tier: int) -> None:
        self._running = running
        self._keys, self._access, self.tier = keys, access, tier
        self.token: Token | None = None
        """Token of the lease: setting it to None ends the lease, whatever exception strikes then."""
        self._engine: Engine | None = None
        self._copies: list[Copy] | None = None
        self._request: Lease | None = None

    def _made(self, engine: Engine, request: Lease) -> list[Made]:
        """Return what the holder gets of each of the granted copies."""
        raise NotImplementedError

    def _enter(self) -> list[Made]:
        if self.token is not None:
            self._refuse_open()
        try:
            engine = self._engine = self._running()
            request = self._ask(engine)
            engine.wait(request)
            return self._granted(engine, request)
        except BaseException:
            self.token = None  # first, because another exception may strike before the first line of a call
            self._undo()
            raise

    async def _arrive(self) -> list[Made]:
        if self.token is not None:
            self._refuse_open()
        try:
            engine = self._engine = self._running()
            request = self._ask(engine)
            await engine.arrive(request)
            return self._granted(engine, request)
        except GeneratorExit:  # from the garbage collector, perhaps in a thread that holds the lock
            self._let_go()
            raise
        except BaseException:
            self.token = None
            self._undo()
            raise

    def _refuse_open(self) -> NoReturn:
        raise MisuseError(f"this lease of {', '.join(map(repr, self._keys))} is open already; make another one")

    def _ask(self, engine: Engine) -> Lease:
        self.token = Token()
        holder = engine.state.claims.watch(self.token)
        request = self._request = Lease(self._keys, self.tier, self._access, holder, viewed=self.viewed)
        return request

    def _granted(self, engine: Engine, request: Lease) -> list[Made]:
        try:
            request.stream = engine.enter(request.copies, self.tier)
            made = self._made(engine, request)
        except BaseException:
            self._undo()
            self._running()  # raises StoreClosed if another thread closed the store meanwhile
            raise
        request.views.clear()  # each belongs to its tensor now
        self._copies = request.copies
        return made

    def _let_go(self) -> None:
        self.token = self._copies = None
        if self._request is not None:
            self._request.views.clear()

    def _undo(self) -> None:
        self._let_go()
        if self._engine is not None:
            self._engine.released()

    def _exit(self, kind: type[BaseException] | None) -> None:
        copies, engine = self._copies, self._engine
        if copies is None or engine is None or self._request is None:
            self.token = None
            return
        self.token = self._copies = None
        recorder = engine.recorder
        if recorder is not None:
            recorder.released(self._request.sequence)
        if kind is not GeneratorExit:  # the collector ends generators and coroutines, perhaps in a thread that holds the lock
            engine.released()
            if engine.state.changing and kind is None:  # an exception struck another call: only a recount tells
                engine.look()
        if self._request.misused is not None and kind is None:
            raise MisuseError(
                f"tensor {self._request.misused!r} was written to under a READ lease: take store.lease(key, access='write') to "
                "change it. What was written is not kept, unless a commit was made meanwhile; where no other tier had the "
                "bytes of before, the tensor is lost"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._exit(kind)
        except BaseException:
            self.token = None
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._exit(kind)
        except BaseException:
            self.token = None
            raise


class _HeldTensors(_Held[torch.Tensor]):
    """A lease that gives tensors on the slots of ``memory``."""

    def __init__(
        self, running: Callable[[], Engine], memory: Memory, keys: Sequence[Key], access: Access, tier: int
    ) -> None:
        super().__init__(running, keys, access, tier)
        self._memory = memory

    def _made(self, engine: Engine, request: Lease) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for copy, spec, view in zip(request.copies, request.specs, request.views, strict=True):
            if request.stream is not None:
                engine.state.claims.used_on(view, request.stream)
            tensors.append(_view(engine, self._memory, copy, spec, view))
        return tensors


class LeaseOfOne(_HeldTensors):
    """A lease of one tensor: ``with store.lease(key) as tensor:``, or ``async with`` in a coroutine."""

    def __enter__(self) -> torch.Tensor:
        try:
            return self._enter()[0]
        except TieredError as error:
            drop_frames(error)
            raise error

    async def __aenter__(self) -> torch.Tensor:
        try:
            return (await self._arrive())[0]
        except TieredError as error:
            drop_frames(error)
            raise error


class LeaseOfMany(_HeldTensors):
    """A lease of several tensors: ``with store.lease([key, ...]) as (tensor, ...):``, or ``async with`` in a coroutine.

    ``asked``: the keys as the caller has them, of which one may be there more than once, and is one tensor then.
    """

    def __init__(
        self, running: Callable[[], Engine], memory: Memory, asked: Sequence[Key], access: Access, tier: int
    ) -> None:
        keys = list(dict.fromkeys(asked))
        super().__init__(running, memory, keys, access, tier)
        self._places = None if len(keys) == len(asked) else _places(keys, asked)

    def _given(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(tensors) if self._places is None else tuple(tensors[place] for place in self._places)

    def __enter__(self) -> tuple[torch.Tensor, ...]:
        try:
            return self._given(self._enter())
        except TieredError as error:
            drop_frames(error)
            raise error

    async def __aenter__(self) -> tuple[torch.Tensor, ...]:
        try:
            return self._given(await self._arrive())
        except TieredError as error:
            drop_frames(error)
            raise error


class LeaseOfAddresses(_Held[tuple[int, TensorSpec]]):
    """A lease of several tensors in host memory, each there once, by their addresses, for copies that are made within it.

    No tensor is made of them, and nothing tells who still refers to the memory after it.
    """

    viewed = False

    def __init__(
        self, running: Callable[[], Engine], memory: DramTier, keys: Sequence[Key], access: Access, tier: int
    ) -> None:
        super().__init__(running, keys, access, tier)
        self._memory = memory
        self._arena: object = None
        """Keeps the memory mapped, should another thread close the store."""

    def _made(self, engine: Engine, request: Lease) -> list[tuple[int, TensorSpec]]:
        arena = self._arena = self._memory.arena
        address = ctypes.addressof(arena)
        if self._access is Access.WRITE:
            for copy in request.copies:
                if isinstance(copy.witness, torch.Tensor):  # autograd may have saved a tensor of an earlier lease
                    torch.autograd.graph.increment_version(copy.witness)
        return [(address + copy.slot.offset, spec) for copy, spec in zip(request.copies, request.specs, strict=True)]

    def __enter__(self) -> list[tuple[int, TensorSpec]]:
        try:
            return self._enter()
        except TieredError as error:
            drop_frames(error)
            raise error


def _places(keys: Sequence[Key], asked: Sequence[Key]) -> list[int]:
    at = {key: place for place, key in enumerate(keys)}
    return [at[key] for key in asked]


def end_struck() -> bool:
    """End leases whose entry or exit was struck by an exception before its first line; return whether there were any.

    Such a lease ends with its object. But a traceback refers to the frame that was struck, and that to the object; and
    tracebacks may be kept: by an ``except`` clause while it runs, by an interactive interpreter until the next exception.
    """
    found = False
    for error in _live_exceptions():
        trace = error.__traceback__
        while trace is not None:
            lease = trace.tb_frame.f_locals.get("self") if trace.tb_frame.f_code in _ENDS else None
            if isinstance(lease, _Held) and lease.token is not None:
                lease.token, found = None, True
            trace = trace.tb_next
    return found


_METHODS = (
    *(_Held.__exit__, _Held.__aexit__, _Held._exit, _Held._enter, _Held._arrive),
    *(LeaseOfOne.__enter__, LeaseOfOne.__aenter__, LeaseOfMany.__enter__, LeaseOfMany.__aenter__),
    LeaseOfAddresses.__enter__,
)
_ENDS = {method.__code__ for method in _METHODS}


def _live_exceptions() -> list[BaseException]:
    """Return the exceptions that threads handle now, the last one that an interpreter has shown, and their causes and
    contexts."""
    handled: list[object] = list(sys._current_exceptions().values())
    handled += [getattr(sys, name, None) for name in ("last_exc", "last_value")]
    waiting = [error[1] if isinstance(error, tuple) else error for error in handled]
    found: dict[int, BaseException] = {}
    while waiting:
        error = waiting.pop()
        if isinstance(error, BaseException) and id(error) not in found:
            found[id(error)] = error
            waiting += [error.__context__, error.__cause__]
    return list(found.values())


def _view(engine: Engine, memory: Memory, copy: Copy, spec: TensorSpec, claim: Token) -> torch.Tensor:
    """Return a tensor on ``copy``'s slot. ``claim`` lives until the last alias of the tensor is gone.

    All tensors ever made of one copy share one version counter: autograd then notices when a tensor that it saved under a READ
    lease was changed under a later WRITE lease of the same slot.
    """
    if torch.is_inference_mode_enabled():  # a view made in inference mode would have no version
        with torch.inference_mode(False):
            return _view(engine, memory, copy, spec, claim)
    dtype, nbytes = dtype_of(spec), spec.nbytes
    raw, owner = memory.tensor(copy.slot, max(1, nbytes))
    owner.claim = claim  # type: ignore[attr-defined]
    if nbytes == 0:
        raw = raw[:0]
    contents = raw if dtype is torch.uint8 else raw.view(dtype)
    if contents.shape != spec.shape:
        contents = contents.view(spec.shape)
    witness = copy.witness
    if witness is None:
        with engine.lock:  # two threads with a READ lease each must not make two witnesses
            if copy.witness is None:
                fresh = contents.detach()
                fresh.data = torch.empty(0, dtype=dtype, device=contents.device)
                copy.witness, copy.sealed = fresh, fresh._version
            witness = copy.witness
    assert isinstance(witness, torch.Tensor)
    tensor = witness.detach()
    tensor.data = contents
    return tensor
