"""Torch's tensors as the store sees them: a spec and bytes."""

from __future__ import annotations

import torch

from tiered.errors import ManifestError, MisuseError
from tiered.types import Key, TensorSpec

__all__ = ["copy_bytes", "dtype_of", "flat", "refuse_unstorable", "spec_of"]


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Shape and element type of ``tensor``."""
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.dtype.itemsize)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Raises ManifestError when this torch has no such element type."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != spec.itemsize:
        raise ManifestError(f"this torch ({torch.__version__}) has no element type {spec.dtype!r} of {spec.itemsize} bytes")
    return dtype


def refuse_unstorable(key: Key, tensor: torch.Tensor) -> None:
    """Raises MisuseError for what has no dense contents."""
    if not isinstance(tensor, torch.Tensor):
        raise MisuseError(f"{key!r}: a store holds tensors, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        what = "a meta tensor" if tensor.is_meta else f"a {tensor.layout} tensor" if not tensor.is_quantized else "quantized"
        raise MisuseError(f"{key!r} is {what}: a store holds dense tensors with contents; convert it first")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8 of shape (nbytes,)."""
    return tensor.reshape(-1).view(torch.uint8)


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """``source`` in row-major order into ``target``, uint8 of shape (nbytes,); the devices may differ."""
    if source.is_contiguous():
        target.copy_(flat(source))
        return
    try:
        target.view(source.dtype).view(source.shape).copy_(source)  # straight into the pool, without a second copy
    except (NotImplementedError, RuntimeError):  # element types that torch cannot gather: copy whole first
        target.copy_(flat(source.contiguous()))
