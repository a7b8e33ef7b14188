"""What is computed over every piece of a tensor on its way to the disk, and again on its way back.

The store, the tensor, the time of writing and the place in the tensor go into it beside the bytes. So a piece that is whole
but is another tensor's, or an older one, or one that landed elsewhere, fails as a flipped bit does.
"""

from __future__ import annotations

import ctypes
import struct

import xxhash

__all__ = ["Piece", "digest"]

Piece = bytes | memoryview | ctypes.Array[ctypes.c_char]

_CONTEXT = struct.Struct("<16sQQQ")  # store UUID, tensor id, generation, offset of the piece in the tensor


def digest(uuid: bytes, tensor_id: int, generation: int, offset: int, piece: Piece) -> bytes:
    """The 16 bytes (xxh3-128) for ``piece``, ``PIECE_BYTES`` of a tensor or what is left of it at byte ``offset``.

    ``uuid`` is the store's 16 bytes, ``generation`` the one in which the tensor was written. Large pieces are hashed without
    the GIL.
    """
    state = xxhash.xxh3_128(_CONTEXT.pack(uuid, tensor_id, generation, offset))
    state.update(piece)
    return state.digest()
