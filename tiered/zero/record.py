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
from typing import Any, NamedTuple

import torch

from tiered import ManifestError, MisuseError

__all__ = ["dumps", "loads", "type_named"]

INLINE = 16 << 10
"""Bytes: larger tensors become tensors of the store."""
DEEPEST = 100
"""Levels of nesting."""
MOST = 256 << 20
"""Bytes of JSON: of some hundred thousand parameters."""

_WRONG = (
    *(ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError),
    *(RuntimeError, MemoryError),  # torch's, and RecursionError
)
"""What Python and torch raise for values that are not what is expected."""

Store = Callable[[torch.Tensor], str]
Fetch = Callable[[str], torch.Tensor]


def dumps(value: Any, what: str, store: Store) -> bytes:
    """``value`` as JSON. ``store`` keeps a large tensor and gives its key.

    Raises MisuseError for what cannot be written down, with the way to it, which begins with ``what``.
    """
    data = json.dumps(_plain(value, what, store, 0), separators=(",", ":")).encode()
    if len(data) > MOST:
        raise MisuseError(f"{what} has {len(data):,} bytes, and may have {MOST:,}: put what is large into tensors")
    return data


def loads(data: bytes, what: str, fetch: Fetch) -> Any:
    """The opposite. Raises ManifestError for what ``dumps`` cannot have written."""
    if len(data) > MOST:
        raise ManifestError(f"{what} has {len(data):,} bytes; the limit is {MOST:,}")
    try:
        return _rebuilt(json.loads(data, object_pairs_hook=_kind), fetch, 0)
    except ManifestError as error:
        raise ManifestError(f"{what} is damaged, or of another version: {error}") from error
    except _WRONG as error:
        raise ManifestError(f"{what} is damaged, or of another version: {error!r:.200}") from error


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


class _Kind(NamedTuple):
    """What is no JSON value, as it is written: a dict with one key."""

    name: str
    value: Any


def _kind(pairs: list[tuple[str, Any]]) -> _Kind:
    if len(pairs) != 1:
        raise ValueError(f"a dict with {len(pairs)} keys")
    return _Kind(*pairs[0])


def _rebuilt(value: Any, fetch: Fetch, depth: int) -> Any:
    if depth > DEEPEST + 1:  # an array is a tensor inside
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")

    def inside(found: Any) -> Any:
        return _rebuilt(found, fetch, depth + 1)

    if type(value) is list:
        return [inside(found) for found in value]
    if not isinstance(value, _Kind):
        return value
    found = value.value
    match value.name:
        case "tuple":
            return tuple(inside(one) for one in _list(found))
        case "dict":
            return _dict(found, inside)
        case "counter":
            return Counter(_dict(found, inside))
        case "dtype":
            return type_named(found)
        case "stored":
            if not isinstance(found, str):
                raise ValueError(f"{found!r:.100} is no key")
            return fetch(found)
        case "tensor":
            return _read_tensor(*_list(found))
        case "array":
            array = inside(found)
            if not isinstance(array, torch.Tensor):
                raise ValueError(f"an array is written as {found!r:.100}")
            return array.numpy()
    raise ValueError(f"{value.name!r:.100} is no kind of value")


def _list(found: Any) -> list[Any]:
    if type(found) is not list:
        raise ValueError(f"{found!r:.100} is no list")
    return found


def _dict(found: Any, inside: Callable[[Any], Any]) -> dict[Any, Any]:
    pairs = [(inside(key), inside(one)) for key, one in map(_list, _list(found))]
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a dict has one key twice")
    return dict(pairs)


def _read_tensor(name: object, shape: object, text: str) -> torch.Tensor:
    sizes = _list(shape)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"a tensor of shape {sizes!r:.100}")
    dtype, data = type_named(name), bytearray(base64.b64decode(text, validate=True))
    if len(data) > INLINE:
        raise ValueError(f"a tensor of {len(data)} bytes")
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
    return flat.view(dtype).reshape(sizes)


def type_named(name: object) -> torch.dtype:
    """Of torch's name without the prefix. Raises ManifestError for what is no type of dense tensors."""
    found = vars(torch).get(name) if isinstance(name, str) else None  # not getattr, which imports what has such a name
    if not isinstance(found, torch.dtype) or str(name).startswith("q"):
        raise ManifestError(f"this torch ({torch.__version__}) has no element type {name!r}")
    return found
