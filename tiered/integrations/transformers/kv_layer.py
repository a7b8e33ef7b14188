"""One layer's keys and values in a store, in blocks of a fixed number of tokens.

A block is one tensor of the store: the keys of all its tokens, then their values. Only the last block is written to as tokens
arrive. What a layer has is ``CachedTokens``, a value that is replaced as a whole: crops, reordered beams and other batches make
another value of the same blocks and move no byte.

A block is changed in place only behind all tokens that an extent in force refers to; else it is written anew, under a new
serial number. So an exception at any line leaves an extent whose blocks hold what it says.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from tiered.errors import MisuseError
from tiered.store import TieredStore
from tiered.types import Owner, TensorSpec

__all__ = ["CachedBlock", "CachedTokens", "CopyMemory", "Geometry", "PagedLayer"]

Rows = tuple[int, ...]
SMALL = 256 << 10
"""Bytes below which a copy is left to torch's allocator."""
SPARE = 16
"""A mapping has one in this many bytes more than is asked for, because the next copy will be larger."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """One block: its serial number within the layer, and how many sequences are stored. Sequence i of the cache is the stored
    sequence ``rows[i]`` (None: i)."""

    serial: int
    stored: int
    rows: Rows | None = None


class Geometry(NamedTuple):
    """Heads and elements a head of a token's keys, the same of its values, and the type of all elements."""

    key_heads: int
    key_size: int
    value_heads: int
    value_size: int
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Elements of one token of one sequence."""
        return self.key_heads * self.key_size + self.value_heads * self.value_size

    def __str__(self) -> str:
        keys, values = f"{self.key_heads} x {self.key_size}", f"{self.value_heads} x {self.value_size}"
        return f"keys of {keys} and values of {values} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """The tokens that a layer has, in blocks of which only the last one may be partly filled."""

    length: int = 0
    blocks: tuple[CachedBlock, ...] = ()

    def cropped(self, length: int, block: int) -> CachedTokens:
        """Return the first ``length`` tokens; ``block`` is the tokens of a block."""
        return CachedTokens(length, self.blocks[: -(-length // block)])

    def selected(self, rows: Sequence[int]) -> CachedTokens:
        """Return the extent whose sequence i is this one's sequence ``rows[i]``."""
        made: dict[tuple[int, Rows | None], Rows | None] = {}

        def composed(stored: int, before: Rows | None) -> Rows | None:
            found = tuple(rows) if before is None else tuple(before[row] for row in rows)
            return None if found == tuple(range(stored)) else found

        blocks = []
        for block in self.blocks:
            shape = block.stored, block.rows
            if shape not in made:
                made[shape] = composed(*shape)
            blocks.append(replace(block, rows=made[shape]))
        return CachedTokens(self.length, tuple(blocks))


class CopyMemory:
    """Memory for the copies that attention takes, which is used again as soon as nothing refers to a copy.

    Each layer's keys and values are copied anew for each token, so memory from the heap would be faulted in anew as often, and,
    as copies grow, leave holes in the heap that none fits into. On devices torch's allocator does this.
    """

    def __init__(self) -> None:
        self._mappings: list[tuple[mmap.mmap, weakref.ref[_Token]]] = []

    def tensor(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised contiguous tensor of ``shape``, with the type and device of ``like``."""
        nbytes = math.prod(shape) * like.dtype.itemsize
        if like.device.type != "cpu" or nbytes < SMALL:
            return like.new_empty(shape)
        unused = [(mapping, token) for mapping, token in self._mappings if token() is None]
        used = [(mapping, token) for mapping, token in self._mappings if token() is not None]
        mapping = next((mapping for mapping, _ in unused if len(mapping) >= nbytes), None)
        if mapping is None:
            unused.clear()  # too small for this one, and soon for the others
            mapping = mmap.mmap(-1, nbytes + nbytes // SPARE)
        token = _Token()
        array = (ctypes.c_char * len(mapping)).from_buffer(mapping)
        array.token = token  # type: ignore[attr-defined]
        kept = [*used, *(one for one in unused if one[0] is not mapping), (mapping, weakref.ref(token))]
        self._mappings = kept[-2:]  # keys and values; who holds more of them has more memory
        flat = torch.frombuffer(array, dtype=like.dtype, count=math.prod(shape))
        return flat.view(*shape)


class _Token:
    """Lives as long as a copy, or a view of it."""


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer, in blocks of ``owner`` named ``PREFIX/SERIAL`` in ``store``.

    ``block``: tokens of a block. ``window``: the layer's sliding window or chunk, None where each token attends to all before
    it. With a window all tokens stay in the store, and only those within it are read. ``copies`` is shared by all layers.
    """

    is_compileable = False
    is_croppable = True

    def __init__(
        self, store: TieredStore, owner: Owner, prefix: str, block: int, window: int | None, copies: CopyMemory
    ) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.sliding_window = window
        self.extent = CachedTokens()
        self.geometry: Geometry | None = None
        self.fixed: Mapping[int, int] = {}
        """How many tokens of each block, by serial number, must stay as they are."""
        self.next_serial = 0
        self._store, self._owner, self._prefix = store, owner, prefix
        self._block, self._copies = block, copies

    def key(self, block: CachedBlock) -> str:
        """Return the name of a block's tensor."""
        return f"{self._prefix}/{block.serial}"

    def spec(self, block: CachedBlock) -> TensorSpec:
        """Return shape and type of a block's tensor."""
        geometry = self.geometry
        assert geometry is not None
        elements = block.stored * self._block * geometry.elements
        return TensorSpec(str(geometry.dtype).removeprefix("torch."), (elements,), geometry.dtype.itemsize)

    def visible(self, extent: CachedTokens) -> tuple[int, tuple[CachedBlock, ...]]:
        """Return the first token of ``extent`` that the next token attends to, and the blocks from its own on."""
        window = self.sliding_window
        start = 0 if window is None else max(extent.length - window + 1, 0)
        return start, extent.blocks[start // self._block :]

    # -- what transformers asks ------------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Learn what keys and values are like. Raises MisuseError where they are not as those that the layer has."""
        if key_states.dim() != 4 or value_states.dim() != 4 or key_states.dtype != value_states.dtype:
            raise MisuseError(
                "TieredCache keeps keys and values of one type and of shape (batch, heads, tokens, size), not "
                f"{key_states.dtype} {list(key_states.shape)} and {value_states.dtype} {list(value_states.shape)}"
            )
        heads = (key_states.shape[1], key_states.shape[3], value_states.shape[1], value_states.shape[3])
        geometry = Geometry(*heads, key_states.dtype)
        if self.geometry is not None and geometry != self.geometry:
            raise MisuseError(
                f"{self._prefix} in {self._store} has {self.geometry}, and the model now makes {geometry}: open the cache with "
                "the model, and in the type, that it was made with, or make another one with another name="
            )
        self.geometry, self.is_initialized = geometry, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values of shape (batch, heads, tokens, size); return all that these tokens attend to, as copies.

        Raises MisuseError for what cannot be taken, and the store's errors (CapacityError, TransferError): then the layer has
        what it had.
        """
        self.lazy_initialization(key_states, value_states)
        old, size = self.extent, self._block
        start, blocks = self.visible(old)
        new = key_states.shape[2]
        found = []
        for states in (key_states, value_states):
            batch, heads, _, elements = states.shape
            found.append(self._copies.tensor((batch, heads, old.length - start + new, elements), states))
            found[-1][:, :, old.length - start :].copy_(states)
        fill = old.length % size
        appended: list[CachedBlock] = []
        first = start // size
        for index, block in enumerate(blocks, first):
            begin, end = max(start, index * size), min(old.length, (index + 1) * size)
            inside, outside = slice(begin - index * size, end - index * size), slice(begin - start, end - start)
            if index == first + len(blocks) - 1 and fill and new:
                appended.append(self._extend(block, fill, (key_states, value_states), found, inside, outside))
                continue
            with self._store.lease(self.key(block)) as flat:
                for part, target in zip(self._parts(flat, block.stored), found, strict=True):
                    _copy_rows(target[:, :, outside], part[:, :, inside], block.rows)
        for begin in range(min(new, size - fill) if fill else 0, new, size):
            appended.append(self._put([part[:, :, begin : begin + size] for part in (key_states, value_states)]))
        kept = old.blocks[: old.length // size] if appended else old.blocks
        self.extent = CachedTokens(old.length + new, kept + tuple(appended))
        keys, values = found
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        start, _ = self.visible(self.extent)
        return self.extent.length - start + query_length, start

    def get_seq_length(self) -> int:
        return self.extent.length

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def prefetch(self) -> None:
        """Have the store fetch what the next token attends to."""
        self._store.prefetch([self.key(block) for block in self.visible(self.extent)[1]])

    def offload(self) -> None:
        """Do nothing: the store evicts blocks when it needs their room."""

    def reset(self) -> None:
        self._refuse_alone()

    def crop(self, tokens_to_remove: int) -> None:
        self._refuse_alone()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._refuse_alone()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse_alone()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._refuse_alone()

    def _refuse_alone(self) -> None:
        raise MisuseError("the layers of a TieredCache change together: call this of the cache, not of one layer")

    # -- blocks ----------------------------------------------------------------------------------------------------------------

    def _parts(self, flat: torch.Tensor, stored: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a block's tensor: its keys and its values, (sequences, heads, tokens, size)."""
        geometry = self.geometry
        assert geometry is not None
        all_keys = stored * self._block * geometry.key_heads * geometry.key_size
        keys, values = flat[:all_keys], flat[all_keys:]
        return (
            keys.view(stored, geometry.key_heads, self._block, geometry.key_size),
            values.view(stored, geometry.value_heads, self._block, geometry.value_size),
        )

    def _extend(
        self,
        block: CachedBlock,
        fill: int,
        states: Sequence[torch.Tensor],
        found: Sequence[torch.Tensor],
        inside: slice,
        outside: slice,
    ) -> CachedBlock:
        """Append the first tokens of ``states`` to the last block, which has ``fill`` tokens; copy its tokens ``inside`` to
        ``outside`` of ``found``. Return the block."""
        most = self._block - fill
        if block.rows is None and self.fixed.get(block.serial, 0) <= fill:
            with self._store.lease(self.key(block), access="write") as flat:
                for part, target, given in zip(self._parts(flat, block.stored), found, states, strict=True):
                    target[:, :, outside].copy_(part[:, :, inside])
                    taken = given[:, :, :most]
                    part[:, :, fill : fill + taken.shape[2]].copy_(taken)
            return block
        before = [part.new_empty((part.shape[0], part.shape[1], fill, part.shape[3])) for part in states]
        with self._store.lease(self.key(block)) as flat:
            for part, target in zip(self._parts(flat, block.stored), before, strict=True):
                _copy_rows(target, part[:, :, :fill], block.rows)
        for part, target in zip(before, found, strict=True):
            target[:, :, outside].copy_(part[:, :, inside])
        both = [torch.cat([old, given[:, :, :most]], dim=2) for old, given in zip(before, states, strict=True)]
        return self._put(both)

    def _put(self, states: Sequence[torch.Tensor]) -> CachedBlock:
        """Store a new block with the tokens of ``states``."""
        block = CachedBlock(self.next_serial, states[0].shape[0])
        self.next_serial += 1
        geometry = self.geometry
        assert geometry is not None
        elements = block.stored * self._block * geometry.elements
        flat = torch.zeros(elements, dtype=geometry.dtype, device=states[0].device)
        for part, given in zip(self._parts(flat, block.stored), states, strict=True):
            part[:, :, : given.shape[2]].copy_(given)
        self._store.put(self.key(block), flat, owner=self._owner)
        return block


def _copy_rows(target: torch.Tensor, source: torch.Tensor, rows: Rows | None) -> None:
    if rows is None:
        target.copy_(source)
        return
    for place, row in enumerate(rows):
        target[place].copy_(source[row])
