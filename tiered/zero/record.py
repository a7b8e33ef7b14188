"""What a checkpoint says beside the tensors of a model, as JSON: numbers, names, small tensors. Nothing in it can run.

JSON has lists, dicts with string keys, strings, numbers, bools and null. What else there is, is a dict with one key, its kind:
``{"tuple": […]}``, ``{"dict": […pairs]}``, ``{"tensor": [dtype, shape, base64]}``, ``{"stored": key}``. So a dict is always
written as pairs. Floats come back bit for bit, NaN and infinity too.
"""

from __future__ import annotations

import base64
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tiered import ManifestError, MisuseError

__all__ = ["dumps", "loads", "type_named"]

INLINE = 16 << 10
"""Bytes: larger tensors become tensors of the store."""
DEEPEST = 100
"""Levels of nesting."""

Store = Callable[[torch.Tensor], str]
Fetch = Callable[[str], torch.Tensor]


def dumps(value: Any, what: str, store: Store) -> bytes:
    """``value`` as JSON. ``store`` keeps a large tensor and gives its key.

    Raises MisuseError for what cannot be written down, with the way to it, which begins with ``what``.
    """
    return json.dumps(_plain(value, what, store, 0), separators=(",", ":")).encode()


def loads(data: bytes, what: str, fetch: Fetch) -> Any:
    """The opposite. Raises ManifestError for what ``dumps`` cannot have written."""
    try:
        return _rebuilt(json.loads(data), fetch)
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, RecursionError) as error:
        raise ManifestError(f"{what} is damaged, or of another version: {error!r}") from error


def _plain(value: Any, where: str, store: Store, depth: int) -> Any:
    if depth > DEEPEST:
        raise MisuseError(f"{where} is nested deeper than {DEEPEST} levels")
    if value is None or type(value) in (bool, int, float, str):
        return value

    def inside(found: Any, name: object) -> Any:
        return _plain(found, f"{where}[{name!r}]", store, depth + 1)

    if type(value) is list:
        return [inside(found, index) for index, found in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [inside(found, index) for index, found in enumerate(value)]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[inside(key, "key"), inside(found, key)] for key, found in value.items()]}
    if isinstance(value, torch.Tensor):
        return _tensor(value.detach(), where, store)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return inside(value.item(), "item")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        return {"array": _tensor(torch.from_numpy(numpy.ascontiguousarray(value)), where, store)}
    raise MisuseError(
        f"{where} is a {type(value).__name__}, which a checkpoint does not hold: it takes None, bool, int, float, str, list, "
        "tuple, dict and tensors"
    )


def _tensor(tensor: torch.Tensor, where: str, store: Store) -> dict[str, Any]:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise MisuseError(f"{where} is a {tensor.layout} tensor, which a checkpoint does not hold: make it dense")
    if tensor.numel() * tensor.element_size() > INLINE:
        return {"stored": store(tensor)}
    dense = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return {"tensor": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), base64.b64encode(data).decode()]}


def _rebuilt(value: Any, fetch: Fetch) -> Any:
    if isinstance(value, list):
        return [_rebuilt(found, fetch) for found in value]
    if not isinstance(value, dict):
        return value
    ((kind, found),) = value.items()
    if kind == "tuple":
        return tuple(_rebuilt(one, fetch) for one in found)
    if kind == "dict":
        return {_rebuilt(key, fetch): _rebuilt(one, fetch) for key, one in found}
    if kind == "counter":
        return Counter({_rebuilt(key, fetch): _rebuilt(one, fetch) for key, one in found})
    if kind == "dtype":
        return type_named(found)
    if kind == "stored":
        return fetch(found)
    if kind == "tensor":
        name, shape, text = found
        dtype, data = type_named(name), bytearray(base64.b64decode(text, validate=True))
        if len(data) > INLINE:
            raise ValueError(f"a tensor of {len(data)} bytes")
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
        return flat.view(dtype).reshape(shape)
    if kind == "array":
        return _rebuilt(found, fetch).numpy()
    raise ValueError(f"{kind!r} is no kind of value")


def type_named(name: object) -> torch.dtype:
    """Of torch's name without the prefix. Raises ManifestError for what is no type of dense tensors."""
    found = vars(torch).get(name) if isinstance(name, str) else None  # not getattr, which imports what has such a name
    if not isinstance(found, torch.dtype) or str(name).startswith("q"):
        raise ManifestError(f"this torch ({torch.__version__}) has no element type {name!r}")
    return found
