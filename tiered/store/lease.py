"""Leases and the tensors that they give; and torch's tensors as the store sees them: a spec and bytes.

A lease lasts as long as its token, and a view as long as its last alias, so that both end without code that an exception could
interrupt.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch

from tiered.engine.engine import Engine
from tiered.engine.requests import Lease
from tiered.engine.residency import Copy
from tiered.engine.state import Token
from tiered.errors import ManifestError, MisuseError, TieredError, drop_frames
from tiered.interfaces import Memory
from tiered.types import LARGEST, Access, Key, TensorSpec

__all__ = [
    "TEMPORARY",
    "LeaseOfMany",
    "LeaseOfOne",
    "copied",
    "copied_in_thread",
    "copy_bytes",
    "dtype_of",
    "end_struck",
    "flat",
    "listed",
    "refuse_keys",
    "refuse_name",
    "refuse_spec",
    "refuse_unstorable",
    "spec_of",
    "specified",
]

# Not getattr(torch, name): a name from a file may be that of a module, which getattr would import. Quantized types have no
# dense contents.
_TYPES = {name: found for name, found in vars(torch).items() if isinstance(found, torch.dtype) and not name.startswith("q")}
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _TYPES.values()}  # one string object for all tensors of a type


ONE_THREAD = 8 << 20
"""Bytes up to which the caller's thread copies alone. torch would wake its OpenMP threads, and wait for all of them: where
another program computes, for as long as its turn takes."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Return the shape and element type of ``tensor``."""
    dtype = tensor.dtype
    return TensorSpec(_NAMES.get(dtype) or str(dtype).removeprefix("torch."), tuple(tensor.shape), dtype.itemsize)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return torch's element type of ``spec``. Raises ManifestError when this torch does not have it."""
    dtype = _TYPES.get(spec.dtype)
    if dtype is None or dtype.itemsize != spec.itemsize:
        raise ManifestError(f"this torch ({torch.__version__}) has no element type {spec.dtype!r} of {spec.itemsize} bytes")
    return dtype


def specified(key: Key, spec: TensorSpec | Sequence[int] | int, dtype: torch.dtype | str | None) -> TensorSpec:
    """Return the spec of a tensor that is given by a spec, or by its shape and type (None: torch's default type)."""
    if isinstance(spec, TensorSpec):
        if dtype is not None:
            raise MisuseError(f"{key!r}: a TensorSpec has an element type already: leave dtype= out")
        return spec
    shape = (spec,) if type(spec) is int else tuple(spec) if isinstance(spec, list | tuple) else None
    kind: Any = torch.get_default_dtype() if dtype is None else dtype
    if shape is None or not isinstance(kind, torch.dtype | str):
        raise MisuseError(f"{key!r}: a tensor to create is described by a TensorSpec, or a shape and dtype=, not by {spec!r}")
    return TensorSpec(str(kind).removeprefix("torch."), shape, kind.itemsize if isinstance(kind, torch.dtype) else 0)


TEMPORARY = "tiered.saved/"
"""The keys of temporary tensors begin with it, and no others."""


def refuse_name(key: object) -> None:
    """Raise MisuseError for what cannot be a new tensor's key: the manifest holds keys as UTF-8."""
    if not isinstance(key, str):
        raise MisuseError(f"a key is a str, not {type(key).__name__}: {key!r}")
    if key.startswith(TEMPORARY):
        raise MisuseError(f"keys that begin with {TEMPORARY!r} are those of saved activations: give {key!r} another name")
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise MisuseError(f"the key {key!r} is not Unicode text ({error.reason}): give the tensor another name") from None


def refuse_keys(keys: Iterable[object]) -> None:
    """Raise MisuseError for keys that are not strings."""
    for key in keys:
        if not isinstance(key, str):
            raise MisuseError(f"a key is a str, not {type(key).__name__}: {key!r}")


def listed(values: Iterable[Any]) -> list[Any]:
    """Return ``values`` as a list; a single string counts as one value. Raises MisuseError for what is not iterable."""
    try:
        return [values] if isinstance(values, str) else list(values)
    except TypeError:
        raise MisuseError(f"keys come in a list, not as {values!r}") from None


def refuse_spec(key: Key, spec: object) -> None:
    """Raise MisuseError for a spec of which the store holds no tensors."""
    if not isinstance(spec, TensorSpec):
        raise MisuseError(f"{key!r}: a tensor to create is described by a TensorSpec, not by {spec!r}")
    if not isinstance(spec.shape, tuple) or not all(type(size) is int and size >= 0 for size in spec.shape):
        raise MisuseError(f"{key!r}: a shape is a tuple of sizes, not {spec.shape!r}")
    dtype = _TYPES.get(spec.dtype) if isinstance(spec.dtype, str) else None
    if dtype is None:
        raise MisuseError(f"{key!r}: {spec.dtype!r} is not an element type that a store holds; name torch's, such as 'float32'")
    if dtype.itemsize != spec.itemsize:
        raise MisuseError(f"{key!r}: an element of {spec.dtype} has {dtype.itemsize} bytes, not {spec.itemsize!r}")
    _refuse_span(key, spec)


def refuse_unstorable(key: Key, tensor: torch.Tensor) -> None:
    """Raise MisuseError for a tensor without dense contents."""
    if not isinstance(tensor, torch.Tensor):
        raise MisuseError(f"{key!r}: a store holds tensors, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        what = "a meta tensor" if tensor.is_meta else f"a {tensor.layout} tensor" if not tensor.is_quantized else "quantized"
        raise MisuseError(f"{key!r} is {what}: a store holds dense tensors with contents; convert it first")
    if not tensor.numel():
        _refuse_span(key, spec_of(tensor))


def _refuse_span(key: Key, spec: TensorSpec) -> None:
    """Raise MisuseError for an empty tensor whose strides overflow; others are refused by their size."""
    if not spec.nbytes and spec.span > LARGEST:
        raise MisuseError(f"{key!r} has the shape {spec.shape}, whose strides overflow: give it another shape")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8 of shape (nbytes,)."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # dimensions of one element may have any stride


def copied(tensor: torch.Tensor, *, queued: bool) -> torch.Tensor:
    """Return a copy on the CPU, byte for byte: torch cannot clone every element type. ``queued`` as in ``copy_bytes``."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")  # the default device may be another
    copy_bytes(flat(copy), tensor, queued=queued)
    return copy


async def copied_in_thread(tensor: torch.Tensor, *, queued: bool) -> torch.Tensor:
    """Copy as ``copied`` while the event loop goes on, on the caller's compute stream, because the tensor may be in use
    there."""
    if tensor.device.type != "cuda":
        return await asyncio.to_thread(copied, tensor, queued=queued)
    stream = torch.cuda.current_stream(tensor.device)

    def copied_there() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return copied(tensor, queued=queued)

    return await asyncio.to_thread(copied_there)


def copy_bytes(target: torch.Tensor, source: torch.Tensor, *, queued: bool) -> None:
    """Copy ``source`` in row-major order into ``target``, uint8 of shape (nbytes,); the devices may differ. ``queued``: one of
    them is memory for which torch may have work queued, which a copy has to follow."""
    if source.is_contiguous():
        if not queued and 0 < target.nbytes <= ONE_THREAD and target.is_cpu and source.is_cpu and type(source) in _PLAIN:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        else:
            target.copy_(flat(source))
        return
    try:
        target.view(source.dtype).view(source.shape).copy_(source)  # directly into the pool, without a second copy
    except (NotImplementedError, RuntimeError):  # element types that torch cannot gather are made contiguous first
        target.copy_(flat(source.contiguous()))


class _Held:
    """A lease as a context manager: the copies that it holds, and the tensors made of them."""

    def __init__(
        self, running: Callable[[], Engine], memory: Memory, keys: Sequence[Key], access: Access, tier: int
    ) -> None:
        self._running, self._memory = running, memory
        self._keys, self._access, self.tier = keys, access, tier
        self.token: Token | None = None
        """Token of the lease: setting it to None ends the lease, whatever exception strikes then."""
        self._engine: Engine | None = None
        self._copies: list[Copy] | None = None
        self._request: Lease | None = None

    def _enter(self) -> list[torch.Tensor]:
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

    async def _arrive(self) -> list[torch.Tensor]:
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
        request = self._request = Lease(self._keys, self.tier, self._access, holder)
        return request

    def _granted(self, engine: Engine, request: Lease) -> list[torch.Tensor]:
        copies, views = request.copies, request.views
        tensors: list[torch.Tensor] = []
        try:
            stream = request.stream = engine.enter(copies, self.tier)
            for copy, spec, view in zip(copies, request.specs, views, strict=True):
                if stream is not None:
                    engine.state.claims.used_on(view, stream)
                tensors.append(_view(engine, self._memory, copy, spec, view))
        except BaseException:
            self._undo()
            self._running()  # raises StoreClosed if another thread closed the store meanwhile
            raise
        views.clear()  # each belongs to its tensor now
        self._copies = copies
        return tensors

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


class LeaseOfOne(_Held):
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


class LeaseOfMany(_Held):
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
