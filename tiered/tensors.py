"""Torch's tensors as the store sees them: a spec and bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import torch

from tiered.errors import ManifestError, MisuseError
from tiered.types import LARGEST, Key, TensorSpec

__all__ = [
    "copied",
    "copied_in_thread",
    "copy_bytes",
    "dtype_of",
    "flat",
    "listed",
    "refuse_keys",
    "refuse_name",
    "refuse_spec",
    "refuse_unstorable",
    "spec_of",
]


# Not getattr(torch, name): a name that a file has may be that of a module, which that would import. Quantized types have no
# dense contents.
_TYPES = {name: found for name, found in vars(torch).items() if isinstance(found, torch.dtype) and not name.startswith("q")}
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _TYPES.values()}  # one string for all tensors of a type


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Shape and element type of ``tensor``."""
    dtype = tensor.dtype
    return TensorSpec(_NAMES.get(dtype) or str(dtype).removeprefix("torch."), tuple(tensor.shape), dtype.itemsize)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Raises ManifestError when this torch has no such element type."""
    dtype = _TYPES.get(spec.dtype)
    if dtype is None or dtype.itemsize != spec.itemsize:
        raise ManifestError(f"this torch ({torch.__version__}) has no element type {spec.dtype!r} of {spec.itemsize} bytes")
    return dtype


def refuse_name(key: object) -> None:
    """Raises MisuseError for what cannot be a new tensor's key: the manifest holds keys as UTF-8."""
    if not isinstance(key, str):
        raise MisuseError(f"a key is a str, not {type(key).__name__}: {key!r}")
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise MisuseError(f"the key {key!r} is not Unicode text ({error.reason}): name the tensor otherwise") from None


def refuse_keys(keys: Iterable[object]) -> None:
    """Raises MisuseError for what names no tensor, whatever there is."""
    for key in keys:
        if not isinstance(key, str):
            raise MisuseError(f"a key is a str, not {type(key).__name__}: {key!r}")


def listed(values: Iterable[Any]) -> list[Any]:
    """A single text is one. Raises MisuseError for what is not many."""
    try:
        return [values] if isinstance(values, str) else list(values)
    except TypeError:
        raise MisuseError(f"keys come in a list, not as {values!r}") from None


def refuse_spec(key: Key, spec: object) -> None:
    """Raises MisuseError for what describes no tensor that a store holds."""
    if not isinstance(spec, TensorSpec):
        raise MisuseError(f"{key!r}: a tensor to create is described by a TensorSpec, not by {spec!r}")
    if not isinstance(spec.shape, tuple) or not all(type(size) is int and size >= 0 for size in spec.shape):
        raise MisuseError(f"{key!r}: a shape is a tuple of sizes, not {spec.shape!r}")
    dtype = _TYPES.get(spec.dtype) if isinstance(spec.dtype, str) else None
    if dtype is None:
        raise MisuseError(f"{key!r}: {spec.dtype!r} is no element type that a store holds; name torch's, such as 'float32'")
    if dtype.itemsize != spec.itemsize:
        raise MisuseError(f"{key!r}: an element of {spec.dtype} has {dtype.itemsize} bytes, not {spec.itemsize!r}")
    _refuse_span(key, spec)


def refuse_unstorable(key: Key, tensor: torch.Tensor) -> None:
    """Raises MisuseError for what has no dense contents."""
    if not isinstance(tensor, torch.Tensor):
        raise MisuseError(f"{key!r}: a store holds tensors, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        what = "a meta tensor" if tensor.is_meta else f"a {tensor.layout} tensor" if not tensor.is_quantized else "quantized"
        raise MisuseError(f"{key!r} is {what}: a store holds dense tensors with contents; convert it first")
    if not tensor.numel():
        _refuse_span(key, spec_of(tensor))


def _refuse_span(key: Key, spec: TensorSpec) -> None:
    """Of an empty tensor; what others are too large for says how large it is."""
    if not spec.nbytes and spec.span > LARGEST:
        raise MisuseError(f"{key!r} has the shape {spec.shape}, whose strides overflow: give it another shape")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8 of shape (nbytes,)."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # strides of dimensions of one element may be anything


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, byte for byte: there are element types that torch cannot clone."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")  # whatever the default device is
    flat(copy).copy_(flat(tensor))
    return copy


async def copied_in_thread(tensor: torch.Tensor) -> torch.Tensor:
    """``copied`` while the event loop goes on; on the stream on which the caller computes, as that is where the tensor may be
    used."""
    if tensor.device.type != "cuda":
        return await asyncio.to_thread(copied, tensor)
    stream = torch.cuda.current_stream(tensor.device)

    def copied_there() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return copied(tensor)

    return await asyncio.to_thread(copied_there)


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """``source`` in row-major order into ``target``, uint8 of shape (nbytes,); the devices may differ."""
    if source.is_contiguous():
        target.copy_(flat(source))
        return
    try:
        target.view(source.dtype).view(source.shape).copy_(source)  # straight into the pool, without a second copy
    except (NotImplementedError, RuntimeError):  # element types that torch cannot gather: copy whole first
        target.copy_(flat(source.contiguous()))
