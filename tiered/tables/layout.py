"""How the rows of a table lie in tensors of a store: which block has a row, and where; and the record that says so.

A table named NAME is these tensors of its store:

- ``NAME/table``: the record, JSON as uint8, written once.
- ``NAME/appended``: how many rows were appended so far, one int64.
- ``NAME/block0``, ``NAME/block1``, …: the rows, ``block_rows`` in each, fewer in the last. A block that nobody wrote to does
  not exist, and all its rows are ``fill``.
- ``NAME/table.buffer``, and ``NAME/table.buffer0``, …: the row buffer, if the table has one (``tiered/tables/buffer.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

import msgspec
import torch

from tiered.errors import ManifestError, MisuseError, expect_type, one_of, quoted, whole_number
from tiered.types import LARGEST, SMALLEST_DRAM, Key, Owner, format_size, parse_size

__all__ = [
    *("Layout", "Pattern", "Run", "TableOptions", "appended_key", "block_prefix", "buffer_key", "record_key", "table_owner"),
]

Pattern = Literal["random", "sequential"]
BLOCK_BYTES: dict[Pattern, int] = {"random": 32 << 10, "sequential": 1 << 20}
"""Bytes of a block, by how rows are used: each row that is not in memory costs the transfer of its block."""
MOST_BLOCKS = 1 << 16
"""Blocks of a table grow instead, because each has an entry in memory and in every manifest."""
BLOCK_SHARE = 16
"""A block takes at most such a part of the pool, as long as that is more than a row."""
ROOM = 4096
"""Bytes: a tensor takes a multiple of it of the pool."""
FORMAT, BUFFERED = 1, 2
"""Formats of a record: of a table without a row buffer, and of one with it, which versions that know of none refuse."""
BUFFER_SHARE, BUFFER_BYTES = 8, 64 << 20
"""The row buffer takes such a part of the pool, and so many bytes, at most."""
SEGMENTS, SEGMENT_BYTES = 8, 1 << 20
"""It has so many segments, or more of so many bytes."""
LEAST_ROW = 64
"""Bytes: smaller rows have no buffer, because what a process keeps for each slot is 24 bytes."""
GATHERED = 2
"""Rows that a block gets at a time when the buffer is emptied, on average, at least; else there is no buffer."""


class _TableRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    format: int
    rows: int
    shape: list[int]
    dtype: str
    block_rows: int
    fill: float
    buffer_rows: int = 0
    segment_rows: int = 0


@dataclass(frozen=True)
class Run:
    """``count`` rows that follow each other in block ``block``, from its row ``place`` on."""

    block: int
    place: int
    count: int


@dataclass(frozen=True)
class Layout:
    """``rows`` rows of shape ``shape`` and type ``dtype``, ``block_rows`` in a block; ``fill``: what nobody wrote is.

    ``buffer_rows``: slots of the row buffer, 0 where the table has none, ``segment_rows`` in a tensor. A tensor of rows is
    called by its number: a block's from 0 on, that of segment s of the buffer is ``-1 - s``.
    """

    rows: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    block_rows: int
    fill: float = 0.0
    buffer_rows: int = 0
    segment_rows: int = 0

    @cached_property
    def row_nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @cached_property
    def block_nbytes(self) -> int:
        return self.block_rows * self.row_nbytes

    @property
    def block_room(self) -> int:
        """Return the bytes that a block takes of the pool, and of the disk."""
        return -(-self.block_nbytes // ROOM) * ROOM

    @property
    def segment_room(self) -> int:
        """Return the bytes that a segment of the row buffer takes of the pool."""
        return -(-self.segment_rows * self.row_nbytes // ROOM) * ROOM

    @property
    def buffer_room(self) -> int:
        """Return the bytes that the row buffer takes of the pool, with its head."""
        return self.buffer_rows // max(1, self.segment_rows) * self.segment_room + 8 * self.buffer_rows

    @cached_property
    def blocks(self) -> int:
        """Return the number of blocks that the table has when all of them exist."""
        return -(-self.rows // self.block_rows)

    def rows_in(self, block: int) -> int:
        """Return how many rows ``block`` has, or a segment of the buffer."""
        if block < 0:
            return self.segment_rows
        return min(self.block_rows, self.rows - block * self.block_rows)

    def shape_of(self, block: int) -> tuple[int, ...]:
        """Return the shape of the tensor that ``block`` is, or a segment of the buffer."""
        return (self.rows_in(block), *self.shape)

    def runs(self, begin: int, end: int) -> Iterator[Run]:
        """Divide the rows from ``begin`` to ``end`` by blocks, in order."""
        while begin < end:
            block, place = divmod(begin, self.block_rows)
            count = min(end - begin, self.block_rows - place)
            yield Run(block, place, count)
            begin += count

    def encoded(self) -> torch.Tensor:
        """Return the record of the table, uint8 of one dimension."""
        name = str(self.dtype).removeprefix("torch.")
        form = BUFFERED if self.buffer_rows else FORMAT
        sizes = (self.buffer_rows, self.segment_rows)
        record = _TableRecord(form, self.rows, list(self.shape), name, self.block_rows, self.fill, *sizes)
        return torch.frombuffer(bytearray(msgspec.json.encode(record)), dtype=torch.uint8)

    @staticmethod
    def decoded(name: str, record: torch.Tensor) -> Layout:
        """Return the layout of which ``record`` is the record. Raises ManifestError where it is damaged, or of a newer
        version."""
        try:
            if record.dtype is not torch.uint8:
                raise ValueError("it is not bytes")
            found = msgspec.json.decode(record.flatten().numpy().tobytes(), type=_TableRecord, strict=True)
            dtype = getattr(torch, found.dtype, None) if found.dtype.isidentifier() else None
            if found.format not in (FORMAT, BUFFERED):
                raise ValueError(f"it has the format {found.format}, this version knows {FORMAT} and {BUFFERED}")
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"no element type {found.dtype!r}")
            if found.rows < 1 or found.block_rows < 1 or any(size < 1 for size in found.shape):
                raise ValueError("a size is not positive")
            sizes = (found.buffer_rows, found.segment_rows)
            buffered = 1 <= found.segment_rows <= found.buffer_rows <= LARGEST and found.buffer_rows % found.segment_rows == 0
            if not (buffered if found.format == BUFFERED else sizes == (0, 0)):
                raise ValueError("the sizes of its buffer do not fit its format")
            layout = Layout(found.rows, tuple(found.shape), dtype, found.block_rows, found.fill, *sizes)
            if layout.rows * layout.row_nbytes > LARGEST:
                raise ValueError("it is larger than a store can be")
            _refuse_fill(name, layout)
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError, MisuseError) as error:
            raise ManifestError(f"{record_key(name)!r} is not the record of a table: {error}") from error
        return layout


def table_owner(name: str) -> Owner:
    """Return the owner of the blocks, the counters and the record of a table that is nobody's part."""
    return Owner("table", name)


def record_key(name: str) -> Key:
    return f"{name}/table"


def appended_key(name: str) -> Key:
    return f"{name}/appended"


def block_prefix(name: str) -> Key:
    """Return what the keys of all blocks begin with; their numbers follow."""
    return f"{name}/block"


def buffer_key(name: str, segment: int | None = None) -> Key:
    """Return the key of the head of the row buffer, or of one of its segments."""
    return f"{record_key(name)}.buffer{'' if segment is None else segment}"


@dataclass(frozen=True)
class TableOptions:
    """The arguments of ``TieredStore.table``. Raises MisuseError for those that cannot be."""

    name: str
    rows: int | None
    columns: int | Sequence[int] | None
    dtype: torch.dtype | None
    block: int | str | None
    pattern: Pattern | None
    fill: float | None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise MisuseError(f"the name of a table is a text, not {quoted(self.name)}")
        said = f"table {self.name!r}"
        if self.rows is not None:
            whole_number(f"{said}: rows is a number of rows", self.rows)
        if not isinstance(self.shape, tuple | list) or not all(type(size) is int and size > 0 for size in self.shape):
            raise MisuseError(f"{said}: columns is a number of columns, or the shape of a row, not {quoted(self.columns)}")
        expect_type(self.dtype, torch.dtype | None, f"{said}: dtype is one of torch's, such as torch.float32")
        if self.block is not None:
            parse_size(self.block, "block")
        one_of(f"{said}: pattern", self.pattern, (*BLOCK_BYTES, None))
        if self.fill is not None and (type(self.fill) not in (int, float) or not -1e300 < self.fill < 1e300):
            raise MisuseError(f"{said}: fill is a finite number, not {quoted(self.fill)}")

    @property
    def shape(self) -> Sequence[int]:
        """The shape of a row, of what ``columns`` says."""
        return () if self.columns is None else (self.columns,) if isinstance(self.columns, int) else self.columns

    def layout(self, budget: int) -> Layout:
        """Return the layout of a new table, which has ``rows``; ``budget``: bytes of the pool."""
        name, rows, shape = self.name, self.rows, tuple(self.shape)
        assert rows is not None
        dtype = torch.get_default_dtype() if self.dtype is None else self.dtype
        one = Layout(rows, shape, dtype, 1, 0.0 if self.fill is None else float(self.fill))
        _refuse_fill(name, one)
        if rows * one.row_nbytes > LARGEST:
            raise MisuseError(f"table {name!r} would have {rows * one.row_nbytes:,} bytes, more than a store can have")
        if self.block is None:
            nbytes = min(_block_bytes(self.pattern or "random", one), budget // BLOCK_SHARE)
        else:
            nbytes = parse_size(self.block)
            if nbytes < one.row_nbytes:
                raise MisuseError(
                    f"table {name!r}: a block of {format_size(nbytes)} holds no row, which has {one.row_nbytes:,} bytes: give "
                    "more"
                )
        return _with_buffer(Layout(rows, shape, dtype, _rows_in(nbytes, one), one.fill), budget)

    def refuse_other(self, found: Layout) -> None:
        """Raise MisuseError where the table that there is, is not as these say."""
        for what, said, there in (
            ("rows", self.rows, found.rows),
            ("rows of shape", None if self.columns is None else tuple(self.shape), found.shape),
            ("the type", self.dtype, found.dtype),
            ("the fill", self.fill, found.fill),
        ):
            if said is not None and said != there:
                raise MisuseError(
                    f"table {self.name!r} exists and has {what} {there}, not {said}: open it with its name alone"
                )
        if self.block is not None:
            least = most = _rows_in(parse_size(self.block), found)
        elif self.pattern is not None:  # how many it is of these, the budget said that the table was made with
            most = _rows_in(_block_bytes(self.pattern, found), found)
            least = min(most, _rows_in(SMALLEST_DRAM // BLOCK_SHARE, found))
        else:
            return
        if not least <= found.block_rows <= most:
            wanted = f"{self.block} would have {most:,}" if self.block is not None else f"pattern={self.pattern!r} has others"
            raise MisuseError(
                f"table {self.name!r} exists and has {found.block_rows:,} rows in a block, where {wanted}: open it with its "
                "name alone"
            )


def _block_bytes(pattern: Pattern, table: Layout) -> int:
    """Return the bytes of a block, by default, in a store with enough memory."""
    return max(BLOCK_BYTES[pattern], -(-table.rows * table.row_nbytes // MOST_BLOCKS))


def _rows_in(nbytes: int, table: Layout) -> int:
    """Return how many rows a block of so many bytes has."""
    return min(table.rows, max(1, nbytes // table.row_nbytes))


def _with_buffer(layout: Layout, budget: int) -> Layout:
    """Return ``layout`` with a row buffer where that saves transfers: the table does not stay in the pool, and when the buffer
    is full, a block gets several of its rows at a time."""
    nbytes = min(budget // BUFFER_SHARE, BUFFER_BYTES)
    segment = min(SEGMENT_BYTES, nbytes // SEGMENTS) // layout.row_nbytes
    slots = nbytes // (segment * layout.row_nbytes) * segment if segment else 0
    stays = layout.blocks * layout.block_room <= budget // 2
    if stays or layout.row_nbytes < LEAST_ROW or slots < GATHERED * layout.blocks or slots > layout.rows // 2:
        return layout
    return replace(layout, buffer_rows=slots, segment_rows=segment)


def _refuse_fill(name: str, layout: Layout) -> None:
    try:
        kept = torch.full((), layout.fill, dtype=layout.dtype, device="cpu").item()
    except (RuntimeError, NotImplementedError) as error:
        raise MisuseError(f"table {name!r}: torch does not fill a tensor of {layout.dtype} with {layout.fill!r}") from error
    if not layout.dtype.is_floating_point and kept != layout.fill:
        raise MisuseError(f"table {name!r}: fill {layout.fill!r} is no number of {layout.dtype}")
