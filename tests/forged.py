"""Files whose checksums are right, whatever is inside: what somebody writes who knows the format and means no good."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

__all__ = ["change_manifest", "signed"]


def signed(body: bytes, version: int = 3, length: int | None = None) -> bytes:
    """A manifest with this payload; written from the format's description, not with its code."""
    size = len(body) if length is None else length
    head = struct.pack("<8sIQ16s", b"TIEREDMF", version, size, xxhash.xxh3_128(body).digest())
    return head + struct.pack("<Q", xxhash.xxh3_64(head).intdigest()) + body


def change_manifest(folder: Path, change: Callable[[Any], None]) -> None:
    """Of the newest generation in a store's folder: ``change`` is given the payload, decoded, and alters it."""
    path = max(folder.glob("manifest.*"), key=lambda found: int(found.suffix[1:]))
    data = path.read_bytes()
    document = json.loads(data[44:])
    change(document)
    path.write_bytes(signed(json.dumps(document).encode(), int.from_bytes(data[8:12], "little")))
