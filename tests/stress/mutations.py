"""Documents and bytes with something changed that nobody wrote there: for parsers, behind checksums that fit."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

__all__ = ["changed_bytes", "changed_document"]

_DEEP: Any = 0
for _ in range(150):
    _DEEP = [_DEEP]

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 16, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)),
    *(0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "nn", "torch.nn", "torch.quint8", "float32", "\0", "\x1b[2J\x1b]0;x\x07", "\u202e", "\ud800", "x" * 3000),
    *("../../etc/passwd", "model/checkpoint/1", "model/param/0", "[0-9", "é\u00a0\u2028"),
    *([], [[]], [None], [0], [-1], [2**40, 2**40, 0], [1] * 70, {}, {"a": {}}, _DEEP),
    *({"tuple": []}, {"tuple": [1, 2]}, {"dict": []}, {"dict": [["a", 1], ["a", 2]]}, {"counter": [["a", None]]}),
    *({"stored": "model/param/0"}, {"stored": "no"}, {"stored": 3}, {"dtype": "nn"}, {"array": 3}, {"object": 1}),
    *({"tensor": ["float32", [], "AACAPw=="]}, {"tensor": ["float32", [2**40, 2**40, 0], ""]}, {"tensor": ["nn", [], ""]}),
    *({"tensor": ["bool", [3], "AgME"]}, {"tensor": ["uint8", [-1], "AAAA"]}),
    {"tensor": ["float64", [2], "AAAAAAAA+H8AAAAAAADwfw=="]},
]
"""Wrong types, huge, negative, no number, empty, nested, with control characters, half of a surrogate pair; and what the JSON
of a checkpoint has for tensors."""
TOKENS = [*(b"{", b"[", b'"', b"}", b"]", b",", b"null", b"1e999", b"-", b"\xff", b"\\ud800", b"\0", b"NaN"), b"9" * 5000]
TWICE = "@@twice@@"


def _place(source: random.Random, value: Any) -> tuple[Any, Any] | None:
    """A container and a key, or an index, of something in it: found from above, so that a long list is no likelier than what
    stands beside it."""
    while isinstance(value, dict | list) and value:
        at = source.choice(list(value)) if isinstance(value, dict) else source.randrange(len(value))
        if not isinstance(value[at], dict | list) or not value[at] or source.random() < 0.12:
            return value, at
        value = value[at]
    return None


def changed_document(source: random.Random, document: Any) -> tuple[str, bytes]:
    """One of its places (in one of ten cases several): what was done there, and the JSON."""
    made = copy.deepcopy(document)
    told = []
    for _ in range(source.choice([1] * 9 + [3])):
        place = _place(source, made)
        if place is not None:
            told.append(_change(source, made, *place))
    written = json.dumps(made, separators=(",", ":")).replace(f'"{TWICE}', '"')
    return "; ".join(told), written.encode()


def _change(source: random.Random, document: Any, holder: Any, at: Any) -> str:
    kind = source.choice(["value"] * 6 + ["near", "near", "missing", "twice", "nested", "swapped", "renamed", "unknown"])
    value = holder[at]
    told = f"{kind} at {at!r:.60}, which was {value!r:.60}"
    if kind == "missing":
        del holder[at]
    elif kind == "twice":
        if isinstance(holder, list):
            holder.insert(at, copy.deepcopy(value))
        else:
            holder[f"{TWICE}{at}"] = source.choice([value, source.choice(VALUES)])
    elif kind == "nested":
        holder[at] = source.choice([[value], {"tuple": [value]}, {"a": value}])
    elif kind == "swapped":
        other, where = _place(source, document) or (holder, at)
        holder[at] = copy.deepcopy(other[where])
    elif kind == "renamed" and isinstance(holder, dict):
        holder[source.choice(["", "x", "\x1b[31m", at + " ", at.upper()])] = holder.pop(at)
    elif kind == "unknown" and isinstance(holder, dict):
        holder[source.choice(["x", "version", "__class__", "\0"])] = source.choice(VALUES)
    elif kind == "near" and type(value) in (int, float):
        holder[at] = source.choice([value + 1, value - 1, -value, value * 2, float(value), str(value), value + 16])
    elif kind == "near" and isinstance(value, str):
        holder[at] = source.choice([value + "x", value[:-1], value.upper(), value + "\n", value[::-1]])
    else:
        holder[at] = copy.deepcopy(source.choice(VALUES))
        told += f", became {holder[at]!r:.60}"
    return told


def changed_bytes(source: random.Random, data: bytes) -> tuple[str, bytes]:
    """Some flipped, cut out, repeated or put in."""
    made = bytearray(data)
    for _ in range(source.randint(1, 3)):
        at = source.randrange(max(1, len(made)))
        kind = source.randrange(5)
        if kind == 0:
            made[at : at + 1] = bytes([source.randrange(256)])
        elif kind == 1:
            del made[at : at + source.randint(1, 40)]
        elif kind == 2:
            made[at:at] = made[at : at + source.randint(1, 200)]
        elif kind == 3:
            made[at:at] = source.choice(TOKENS)
        else:
            made[at:] = made[at:][: source.randrange(len(made) + 1)]
    return "bytes", bytes(made)
