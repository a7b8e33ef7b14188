"""Digests of tensors (xxHash's xxh3): of a tensor that another process may have, and of memory that somebody may write to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
import xxhash

__all__ = ["digest_of", "digests"]

HASHED_AT_ONCE = 16 << 20
"""Bytes of a tensor that are copied to the host at a time, to be hashed."""
PIECE = 1 << 19
"""Words of eight bytes of which a device makes a digest at a time."""
_LOW, _STEP = 0xFFFFFFFF, 0x9E3779B97F4A7C15 - (1 << 64)


def digest_of(tensor: torch.Tensor, pieces: Iterable[torch.Tensor] | None = None) -> str:
    """Return a digest (xxh3-128) of type, shape and bytes of ``tensor``: 32 hex digits. Another bit gives another one.

    ``pieces`` are its values where it has none itself, from the first to the last. Of what is elsewhere, or has gaps, some MiB
    at a time are copied.
    """
    found = xxhash.xxh3_128(f"{tensor.dtype} {list(tensor.shape)}".encode())
    for piece in [tensor.detach()] if pieces is None else pieces:
        _hash(found, piece)
    return found.hexdigest()


def _hash(found: xxhash.xxh3_128, values: torch.Tensor) -> None:
    if hasattr(values, "__tensor_flatten__"):  # a tensor of tensors: a shard, a quantised one
        for name in values.__tensor_flatten__()[0]:
            _hash(found, getattr(values, name))
        return
    if values.dim() > 1 and values.nbytes > HASHED_AT_ONCE:
        for part in torch.split(values, max(1, HASHED_AT_ONCE * values.shape[0] // values.nbytes)):
            if part.shape[0] < values.shape[0]:
                _hash(found, part)
            else:
                for row in values:
                    _hash(found, row)
        return
    for part in torch.split(values.reshape(-1), HASHED_AT_ONCE):
        found.update(part.to("cpu").contiguous().view(torch.uint8).numpy().data)


def digests(memories: Sequence[torch.Tensor]) -> list[int]:
    """Return a digest of 64 bits of each of ``memories``, uint8 of one dimension.

    In host memory that is xxh3. On a device, which this waits for once, it is a sum of the words, each times a number of its
    place (Carter and Wegman, 1979, Universal classes of hash functions), so that only the digests come to the host. What has no
    bytes, on the meta device, is always the same.
    """
    if memories and memories[0].is_meta:
        return [0] * len(memories)
    if not memories or memories[0].device.type == "cpu":
        return [xxhash.xxh3_64_intdigest(memory.numpy().data) for memory in memories]
    found: list[int] = torch.stack([_sum(memory) for memory in memories]).tolist()
    return found


def _sum(memory: torch.Tensor) -> torch.Tensor:
    whole = memory.numel() // 8 * 8
    last = torch.zeros(8, dtype=torch.uint8, device=memory.device)
    last[: memory.numel() - whole].copy_(memory[whole:])
    factors = _factors(memory.device)
    total = last.view(torch.int64)[0].clone()
    for words in torch.split(memory[:whole].view(torch.int64), PIECE):
        mixed = words ^ ((words >> 32) & _LOW)  # else the highest bits of an even number of words would cancel out
        total = total * _STEP + (mixed * factors[: words.numel()]).sum()
    return total


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return odd numbers by chance, always the same."""
    chance = torch.Generator().manual_seed(0)
    made = torch.randint(-(1 << 62), 1 << 62, (PIECE,), generator=chance, dtype=torch.int64, device="cpu")
    return (made * 2 + 1).to(device)
