"""Torch's tensors as a store sees them: a key, a shape and an element type, and bytes."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tiered.errors import ManifestError, MisuseError, quoted
from tiered.tensors.copies import Copies
from tiered.types import LARGEST, Key, TensorSpec

__all__ = [
    "FLOATS",
    "PLAIN",
    "TEMPORARY",
    "copied",
    "copied_in_thread",
    "copy_bytes",
    "copy_into",
    "dtype_of",
    "expect_dtype",
    "flat",
    "listed",
    "refuse_keys",
    "refuse_name",
    "refuse_out",
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
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors whose memory is where they say."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types that a model has."""


def expect_dtype(name: str, dtype: object, allowed: Iterable[torch.dtype | str | None]) -> None:
    """Raise MisuseError where an argument is none of the element types (or texts, or None) that it may be. The message names
    the argument, what it may be, and what is given; of a type that is given by its name also how it is written."""
    known = tuple(allowed)
    if isinstance(dtype, torch.dtype | str | None) and dtype in known:
        return
    *others, last = map(repr, known)
    meant = _TYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else None
    given = repr(dtype) if isinstance(dtype, torch.dtype) else quoted(dtype)
    write = f": write {meant}" if meant in known and meant is not None else ""
    right = f"{', '.join(others)} or {last}" if others else last
    raise MisuseError(f"{name} is {right}, not {given}{write}")


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
        raise MisuseError(f"{key!r}: a shape is a tuple of sizes from 0 on, not {spec.shape!r}")
    dtype = _TYPES.get(spec.dtype) if isinstance(spec.dtype, str) else None
    if dtype is None:
        raise MisuseError(f"{key!r}: {spec.dtype!r} is not an element type that a store holds; name torch's, such as 'float32'")
    if dtype.itemsize != spec.itemsize:
        raise MisuseError(f"{key!r}: an element of {spec.dtype} has {dtype.itemsize} bytes, not {spec.itemsize!r}")
    _refuse_span(key, spec)


def refuse_unstorable(key: Key, tensor: torch.Tensor) -> None:
    """Raise MisuseError for a tensor without dense contents."""
    if not isinstance(tensor, torch.Tensor):
        how = "give a tensor (torch.as_tensor makes one), or an array by store[key] = array"
        raise MisuseError(f"{key!r}: a store holds tensors, not {type(tensor).__name__}: {how}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        kinds = {"nested": tensor.is_nested, "meta": tensor.is_meta, "quantized": tensor.is_quantized}
        what = f"a {next((kind for kind, is_one in kinds.items() if is_one), tensor.layout)} tensor"
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


def copied(tensor: torch.Tensor, *, queued: bool, memory: Copies | None = None) -> torch.Tensor:
    """Return a copy on the CPU, byte for byte: torch cannot clone every element type. ``queued`` as in ``copy_bytes``;
    ``memory`` is what the copy lies in (None: the heap)."""
    shape, dtype = tensor.shape, tensor.dtype  # and not the default device, which may be another
    copy = torch.empty(shape, dtype=dtype, device="cpu") if memory is None else memory.empty(shape, dtype)
    if not queued and 0 < copy.nbytes <= ONE_THREAD and type(tensor) in PLAIN and tensor.is_cpu and tensor.is_contiguous():
        ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), copy.nbytes)
    else:
        copy_bytes(flat(copy), tensor, queued=queued)
    return copy


async def copied_in_thread(tensor: torch.Tensor, *, queued: bool, memory: Copies) -> torch.Tensor:
    """Copy as ``copied`` while the event loop goes on, on the caller's compute stream, because the tensor may be in use
    there."""
    if tensor.device.type != "cuda":
        return await asyncio.to_thread(copied, tensor, queued=queued, memory=memory)
    stream = torch.cuda.current_stream(tensor.device)

    def copied_there() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return copied(tensor, queued=queued, memory=memory)

    return await asyncio.to_thread(copied_there)


def copy_into(out: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into a caller's tensor of its shape and type, on any device. autograd learns of it, and records nothing.
    """
    with torch.inference_mode(out.is_inference()), torch.no_grad():
        try:
            out.copy_(source)
        except NotImplementedError:  # element types that torch cannot copy
            out.view(torch.uint8).copy_(source.view(torch.uint8))


def refuse_out(key: Key, spec: TensorSpec, out: object) -> None:
    """Raise MisuseError where ``out`` cannot take a copy of ``key`` as it is."""
    if not isinstance(out, torch.Tensor):
        raise MisuseError(f"out for {key!r} is a tensor that takes the copy, not {type(out).__name__}")
    refuse_unstorable(key, out)
    if spec_of(out) != spec:
        raise MisuseError(
            f"{key!r} is {spec.dtype} of shape {spec.shape}, and out is {spec_of(out).dtype} of shape {tuple(out.shape)}: "
            "give a tensor of the same"
        )
    if 0 in out.stride() and out.numel() > 1:
        raise MisuseError(f"out for {key!r} was expanded: several of its elements are one, and cannot take a copy")


def copy_bytes(target: torch.Tensor, source: torch.Tensor, *, queued: bool) -> None:
    """Copy ``source`` in row-major order into ``target``, uint8 of shape (nbytes,); the devices may differ. ``queued``: one of
    them is memory for which torch may have work queued, which a copy has to follow."""
    if source.is_contiguous():
        if not queued and 0 < target.nbytes <= ONE_THREAD and target.is_cpu and source.is_cpu and type(source) in PLAIN:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        else:
            target.copy_(flat(source))
        return
    try:
        target.view(source.dtype).view(source.shape).copy_(source)  # directly into the pool, without a second copy
    except (NotImplementedError, RuntimeError):  # element types that torch cannot gather are made contiguous first
        target.copy_(flat(source.contiguous()))
