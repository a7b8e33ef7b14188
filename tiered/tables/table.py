"""``Table``: rows by number, gathered from and scattered to blocks that are leased together.

A table has no state of its own: what it is, how many rows were appended and the rows themselves are tensors of its store. So
a commit, ``rollback``, ``refresh`` and another process see the table as they see any tensor. A ``Table`` has a lock, because
leases that conflict raise: calls of several threads take turns.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from tiered.errors import CapacityError, KeyNotFound, MisuseError, from_here
from tiered.tables.buffer import FIRST, Placed, absent, blank, read_head, stamp_at
from tiered.tables.kernel import copy, copy_equal
from tiered.tables.layout import Layout, Pattern, Run, appended_key, block_prefix, buffer_key, described, record_key
from tiered.tensors.specs import spec_of
from tiered.types import Access, Key, TensorSpec

__all__ = ["Table", "change", "open_table"]

SHARE = 4
"""Blocks of such a part of the pool, at most, are leased together."""
TOGETHER = 4096
"""Of these blocks, at most."""
AHEAD = 64
"""Blocks that are looked for at a time, where all are read in order."""

Answer = TypeVar("Answer")
There = tuple[int, TensorSpec]
"""The address of a tensor, and what it is."""


class _Store(Protocol):
    """What a table needs of a store."""

    def put(self, key: Key, tensor: torch.Tensor) -> None: ...
    def get(self, key: Key) -> torch.Tensor: ...
    def delete(self, key: Key) -> None: ...
    def in_order(self, keys: Iterable[Key]) -> Iterator[torch.Tensor]: ...
    def _lease_addresses(
        self, keys: Sequence[Key], access: Access
    ) -> AbstractContextManager[list[There]]: ...
    def _fetch_ahead(self, keys: Sequence[Key], device: torch.device) -> None: ...

    _went_back: int
    def __contains__(self, key: object) -> bool: ...
    def __iter__(self) -> Iterator[Key]: ...


@dataclass(frozen=True)
class _Part:
    """Rows that are moved under one lease: ``ids[i]`` is row ``place[i]`` of ``blocks[which[i]]``, a block or a segment of the
    buffer, and row ``row[i]`` of the batch (None: i). All are int64."""

    ids: torch.Tensor
    blocks: list[int]
    which: torch.Tensor
    place: torch.Tensor
    row: torch.Tensor | None = None


class _Wanted(NamedTuple):
    """Blocks of ``table`` and segments of its buffer, by number, to be leased; ``placed`` is what they were chosen by (None:
    that is compared elsewhere)."""

    table: Table
    blocks: Sequence[int]
    placed: Placed | None


class _Lent(NamedTuple):
    """Addresses of what was wanted of a table, in its order, and of the head of its buffer (0: there is none)."""

    bases: list[int]
    head: int


class _MovedError(Exception):
    """Rows lie elsewhere than was thought: the call begins again with what is known now."""


def _again(attempt: Callable[[], Answer]) -> Answer:
    """Call ``attempt`` until it does not raise ``_MovedError``; return what it returns."""
    while True:
        try:
            return attempt()
        except _MovedError:
            continue


class Table:
    """Rows of one shape and type, by number, in a store: ``TieredStore.table`` makes and opens them.

    ``ids`` are whole numbers from 0 to ``rows - 1``, as a tensor of any shape, a list or an int, and may be there more than
    once. A call leases the blocks that it needs together, in host memory, and copies rows between them and ordinary memory.
    Where the blocks of a call fit into a quarter of the pool, the call is atomic: an exception of a signal handler leaves all
    of its rows as they were, or all changed. A larger call is made in parts of which this holds (without a C compiler at
    installation, it holds of single rows). Assignment to a slice is atomic for each block. Calls of several threads take
    turns.
    """

    def __init__(self, store: _Store, name: str, layout: Layout, budget: int) -> None:
        self._store, self._layout = store, layout
        self.name = name
        """The name; keys of the table's tensors begin with it."""
        self._budget, self._together = budget, max(1, budget // SHARE)
        self._prefix, self._dtype_name = block_prefix(name), str(layout.dtype).removeprefix("torch.")
        self._expected = 0
        """What ``appended`` is, unless the store went back or ahead: only a guess, which each call compares."""
        self._blank: torch.Tensor | None = None
        self._placed = absent
        """What the head of the buffer said when it was seen last."""
        self._tight = 8 * layout.buffer_room > 3 * budget
        """Whether the pool is smaller than that for which the buffer was made, so that not all of it can be leased together."""
        self._lock = threading.RLock()

    # -- what it is --------------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """How the rows lie in blocks."""
        return self._layout

    @property
    def rows(self) -> int:
        """Number of rows that the table has, written or not."""
        return self._layout.rows

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self._layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self._layout.dtype

    @property
    def block_rows(self) -> int:
        """Rows that lie together in one tensor of the store, and move together."""
        return self._layout.block_rows

    @property
    def appended(self) -> int:
        """How many rows were appended so far, those included that newer ones have replaced."""
        counter = self._store.get(appended_key(self.name))
        return self._counted((counter.data_ptr(), spec_of(counter)))

    @property
    def filled(self) -> int:
        """The number of rows that hold an appended row now: rows 0 to ``filled - 1``."""
        return min(self.appended, self.rows)

    def __len__(self) -> int:
        """Return ``rows``."""
        return self.rows

    def __repr__(self) -> str:
        shape = "x".join(map(str, (self.rows, *self.row_shape)))
        return f"<Table {self.name!r}: {shape} of {self.dtype}, {self.block_rows} rows in a block, in {self._store}>"

    def key_of(self, row: int) -> Key:
        """Return the key of the store's tensor that has ``row`` now, to lease it for reading, or to prefetch it. It may not
        exist yet; an update may move the row to another one."""
        with self._turn():
            return self._key(self._part(self._ids([row]), None, self._current()).blocks[0])

    # -- rows by number ----------------------------------------------------------------------------------------------------

    @from_here
    def look_up(self, ids: torch.Tensor | Sequence[int] | int) -> torch.Tensor:
        """Return a copy of the rows ``ids``, of shape ``(*ids.shape, *row_shape)``, on the device of ``ids``.

        Raises MisuseError for ids that are no row's, and what ``TieredStore.lease`` raises.
        """
        wanted, shape, device = self._numbers(ids)
        found = torch.empty((len(wanted), *self.row_shape), dtype=self.dtype, device="cpu")
        with self._turn():
            for part in self._parts(wanted):
                self._move(part, found, Access.READ)
        return found.view((*shape, *self.row_shape)).to(device)

    @from_here
    def update(self, ids: torch.Tensor | Sequence[int] | int, values: torch.Tensor) -> None:
        """Set the rows ``ids`` to ``values``, of shape ``(*ids.shape, *row_shape)``, or one row for all. Of an id that is there
        twice, the last value stays. Raises as ``look_up``, and MisuseError for values of another shape or type."""
        wanted, shape, _ = self._numbers(ids)
        given = self._values(values, shape)
        with self._turn():
            if self._tight:
                self._empty_rows(0, self.rows)
            for part in self._parts(wanted):
                _again(lambda part=part: self._set(part, given))  # type: ignore[misc]

    @from_here
    def accumulate(self, ids: torch.Tensor | Sequence[int] | int, values: torch.Tensor, *, alpha: float = 1) -> None:
        """Add ``alpha * values`` to the rows ``ids``, as ``torch.Tensor.index_add_`` does, in the order of ``ids``. Shapes and
        errors as ``update``."""
        wanted, shape, _ = self._numbers(ids)
        given = self._values(values, shape)
        unique, inverse = torch.unique(wanted, return_inverse=True)

        def add(begin: int, end: int, rows: Sequence[torch.Tensor]) -> None:
            if end - begin == len(unique):
                rows[0].index_add_(0, inverse, given, alpha=alpha)
                return
            mine = ((inverse >= begin) & (inverse < end)).nonzero()[:, 0]
            rows[0].index_add_(0, inverse[mine] - begin, given[mine], alpha=alpha)

        change([self], unique, add)

    def _move(self, part: _Part, rows: torch.Tensor, access: Access) -> None:
        """Copy the rows of ``part`` from where they lie into ``rows``, or with WRITE there."""

        def attempt() -> None:
            placed = self._current()
            now = self._part(part.ids, part.row, placed)

            def work(lent: Sequence[_Lent], others: Sequence[There]) -> None:
                there, here = self._addresses(now, lent[0].bases), self._addresses_in(rows, now.row)
                to, of = (here, there) if access is Access.READ else (there, here)
                copy_equal(to, of, self._layout.row_nbytes)

            _leased([_Wanted(self, now.blocks, placed)], access, work)

        _again(attempt)

    def _set(self, part: _Part, values: torch.Tensor) -> None:
        """Set the rows of ``part``: in the buffer, where they go there, else where they lie."""
        placed = self._current()
        after = self._with_room(placed, part.ids)
        if after is placed:
            self._move(part, values, Access.WRITE)
            return
        later = self._part(part.ids, part.row, after)

        def work(lent: Sequence[_Lent], others: Sequence[There]) -> None:
            writes = _Writes()
            self._place(writes, lent[0].head, after)
            writes.add(self._addresses(later, lent[0].bases), self._addresses_in(values, later.row), self._layout.row_nbytes)
            writes.make()

        _leased([_Wanted(self, later.blocks, placed)], Access.WRITE, work)
        self._placed = after

    # -- rows in order -----------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a copy of one row (negative numbers count from the end), of a slice, or of ids as ``look_up`` does."""
        self._refuse_tuple(index)
        if isinstance(index, slice):
            chosen = range(self.rows)[index]
            return self._read(chosen.start, chosen.stop) if chosen.step == 1 else self.look_up(_int64(chosen))
        return self.look_up(self._one(index) if type(index) is int else index)

    def __setitem__(self, index: Any, values: torch.Tensor) -> None:
        """Set one row, a slice, or ids as ``update`` does. Whole blocks of a slice are written without a read."""
        self._refuse_tuple(index)
        if isinstance(index, slice):
            chosen = range(self.rows)[index]
            if chosen.step == 1:
                self._write(chosen.start, self._values(values, (len(chosen),)))
            else:
                self.update(_int64(chosen), values)
            return
        self.update(self._one(index) if type(index) is int else index, values)

    def _refuse_tuple(self, index: object) -> None:
        if isinstance(index, tuple):
            raise MisuseError(f"table {self.name!r} has one index, the row: write table[rows][..., columns], or a list of ids")

    def _one(self, index: int) -> int:
        if not -self.rows <= index < self.rows:
            raise IndexError(f"there is no row {index} in table {self.name!r}, which has {self.rows:,} rows")
        return index % self.rows

    @from_here
    def _read(self, begin: int, end: int) -> torch.Tensor:
        read = torch.empty((max(0, end - begin), *self.row_shape), dtype=self.dtype, device="cpu")
        for first, rows in self.blocks(begin, end):
            read[first - begin : first - begin + len(rows)] = rows
        return read

    @from_here
    def _write(self, begin: int, values: torch.Tensor) -> None:
        at = 0
        with self._turn():
            for run in self._layout.runs(begin, begin + len(values)):
                rows = values[at : at + run.count]
                if run.count == self._layout.rows_in(run.block):
                    self._put_block(run, rows)
                else:
                    if self._tight:
                        self._empty_rows(begin + at, begin + at + run.count)
                    self._move(self._part(_numbers(begin + at, run.count)), rows, Access.WRITE)
                at += run.count

    def _put_block(self, run: Run, rows: torch.Tensor) -> None:
        """Set all rows of a block; again, if the store went back meanwhile to a time when some of them were in the buffer."""
        while True:
            before, first = self._store._went_back, run.block * self._layout.block_rows
            self._empty_rows(first, first + run.count)
            self._store.put(self._key(run.block), rows)
            if self._store._went_back == before:
                return

    def blocks(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Iterate over the rows from ``begin`` to ``end`` (None: the last) in order, one block after the other: pairs of the
        number of a first row, and a copy of the rows. The next blocks are read meanwhile; no lease is open between two of
        them. Raises as ``look_up``."""
        runs = self._layout.runs(*slice(begin, end).indices(self.rows)[:2])
        if self._layout.buffer_rows:
            yield from self._looked_up(runs)
            return
        while some := list(islice(runs, AHEAD)):
            there = {run.block: self._key(run.block) for run in some if self._key(run.block) in self._store}
            copies = self._store.in_order(list(there.values()))
            for run in some:
                if run.block in there:
                    with self._turn():
                        rows = next(copies)
                    self._refuse_other(spec_of(rows), run.block)
                    rows = rows[run.place : run.place + run.count]
                else:
                    rows = self._unwritten()[: run.count].clone()
                yield run.block * self._layout.block_rows + run.place, rows
                del rows

    def _looked_up(self, runs: Iterator[Run]) -> Iterator[tuple[int, torch.Tensor]]:
        """Iterate as ``blocks`` does over ``runs``, some of whose rows may be in the buffer: those of several blocks are copied
        under one lease, wherever they lie."""
        most, following = max(1, min(AHEAD, self._most // 2)), list[Run]()
        while some := following or list(islice(runs, most)):
            following = list(islice(runs, most))
            keys = [self._key(run.block) for run in following]
            self._store._fetch_ahead([key for key in keys if key in self._store], torch.device("cpu"))
            first = some[0].block * self._layout.block_rows + some[0].place
            rows = self.look_up(_numbers(first, sum(run.count for run in some)))
            at = 0
            for run in some:
                yield first + at, rows[at : at + run.count].clone()
                at += run.count

    # -- a ring ------------------------------------------------------------------------------------------------------------

    @from_here
    def append(self, values: torch.Tensor) -> torch.Tensor:
        """Write ``values``, of shape ``(n, *row_shape)`` or one row, after the rows that were appended before, and from row 0
        on again when the table is full. Return their ids, int64 of shape (n,).

        Rows and their count change together. Raises as ``update``.
        """
        if isinstance(values, torch.Tensor) and values.shape == self.row_shape:
            values = values[None]
        given, done, first = self._values(values, None), 0, 0
        with self._turn():
            while done < len(given):
                begin, count = self._append(given[done:])
                first, done = begin - done, done + count
        ids = _numbers(first % self._layout.rows, len(given))
        return ids if first % self._layout.rows + len(given) <= self._layout.rows else ids % self._layout.rows

    def _append(self, given: torch.Tensor) -> tuple[int, int]:
        """Append rows, of which at least one, as many as are written at once; return how many were appended before, and how
        many were now."""
        layout, nbytes = self._layout, self._layout.row_nbytes
        while True:
            begin = self._expected
            runs, blocks = self._ring(begin, min(len(given), layout.rows))
            count = sum(run.count for run in runs)
            after = ctypes.c_int64(begin + count)
            ranges = [(first := run.block * layout.block_rows + run.place, first + run.count) for run in runs]
            for first, last in ranges:
                self._empty_rows(first, last)
            placed = self._placed
            if any(len(set(placed.within(layout, first, last, 1))) > 1 for first, last in ranges):
                continue  # the store went back meanwhile

            def work(
                lent: Sequence[_Lent],
                others: Sequence[There],
                begin: int = begin,
                after: ctypes.c_int64 = after,
                runs: Sequence[Run] = runs,
                blocks: Sequence[int] = blocks,
            ) -> int:
                (counter,) = others
                now = self._counted(counter)
                if now == begin:
                    at, targets, sources = given.data_ptr(), [], []
                    bases_of = dict(zip(blocks, lent[0].bases, strict=True))
                    for run in runs:
                        targets.append(bases_of[run.block] + run.place * nbytes)
                        sources.append(at)
                        at += run.count * nbytes
                    sizes = [run.count * nbytes for run in runs]
                    copy([*targets, counter[0]], [*sources, ctypes.addressof(after)], [*sizes, 8])
                return now

            try:
                now = _leased([_Wanted(self, blocks, placed)], Access.WRITE, work, [appended_key(self.name)])
            except _MovedError:
                continue
            if now == begin:
                self._expected = begin + count
                return begin, count
            self._expected = now

    def _ring(self, begin: int, count: int) -> tuple[list[Run], list[int]]:
        """Return where ``count`` rows go after ``begin`` others, as far as the blocks are leased together; and these blocks."""
        layout, start = self._layout, begin % self._layout.rows
        most = self._most
        until, after = min(layout.rows, start + count), max(0, start + count - layout.rows)
        runs, blocks = [], dict[int, None]()
        for run in (*layout.runs(start, until), *layout.runs(0, after)):
            if len(blocks) == most and run.block not in blocks:
                break
            blocks[run.block] = None
            runs.append(run)
        return runs, list(blocks)

    # -- the end -----------------------------------------------------------------------------------------------------------

    @from_here
    def delete(self) -> None:
        """Delete the table's tensors from the store. A call that was cut off is completed by another one. Raises as
        ``TieredStore.delete``."""
        with self._turn():
            prefixes = self._prefix, buffer_key(self.name)
            blocks = [key for key in self._store if any(_is_block(key, prefix) for prefix in prefixes)]
            for key in (*blocks, buffer_key(self.name), appended_key(self.name), record_key(self.name)):
                if key in self._store:
                    self._store.delete(key)
            self._placed = absent

    def _turn(self) -> threading.RLock:
        """Return the lock, for a ``with``. Raises MisuseError where this thread has it: a signal handler interrupted a call."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise MisuseError(
                f"a signal handler interrupted a call of table {self.name!r} and calls it, too: have the handler set a flag or "
                "raise, and use the table after that"
            )
        return self._lock

    # -- the buffer --------------------------------------------------------------------------------------------------------

    def _current(self) -> Placed:
        """Return what is known of the buffer. It may be old: whoever leases by it compares the stamps."""
        key = buffer_key(self.name)
        if self._placed.stamp is None and self._layout.buffer_rows and key in self._store:
            head = self._store.get(key)
            stamp_at(self.name, self._layout, head.data_ptr(), spec_of(head))
            self._placed = read_head(self.name, self._layout, head.data_ptr())
        return self._placed

    def _head(self, placed: Placed, leased: Iterator[There]) -> int:
        """Return the address of the head of the buffer, the next one of ``leased``; 0 where there is none. Raises _MovedError
        where ``placed`` is not what the head says."""
        if placed.stamp is None:
            if buffer_key(self.name) in self._store:
                if not self._layout.buffer_rows:
                    raise MisuseError(f"table {self.name!r} was deleted and made anew: open it again")
                raise _MovedError
            return 0
        address, spec = next(leased)
        if stamp_at(self.name, self._layout, address, spec) != placed.stamp:
            self._placed = read_head(self.name, self._layout, address)
            raise _MovedError
        return address

    def _with_room(self, placed: Placed, ids: torch.Tensor) -> Placed:
        """Return what will be known once the rows ``ids`` are written: ``placed`` itself where none comes to the buffer.

        Rows go there unless their blocks get as many of them at once as they would get when the buffer is emptied. Raises
        _MovedError after it made the buffer, or room in it.
        """
        layout = self._layout
        if not layout.buffer_rows or self._tight:
            return placed
        rows = torch.unique(ids[placed.find(ids) < 0])
        blocks = len(torch.unique_consecutive(rows.div(layout.block_rows, rounding_mode="floor")))
        if not len(rows) or len(rows) * layout.blocks >= layout.buffer_rows * blocks:
            return placed
        if placed.stamp is None:
            if Layout.decoded(self.name, self._store.get(record_key(self.name))) != layout:
                raise MisuseError(f"table {self.name!r} was deleted and made anew: open it again")
            head = blank(layout)
            self._store.put(buffer_key(self.name), head)
            self._placed = read_head(self.name, layout, head.data_ptr())
            raise _MovedError
        if len(rows) > len(placed.free):
            self._empty(placed, *placed.run(layout, max(len(rows), layout.buffer_rows // 32), self._most))
            raise _MovedError
        after = placed.added(rows)
        used = set(_segments(placed.slots, layout))
        for segment in set(_segments(placed.free[len(after.free) :], layout)) - used:
            key = self._key(-1 - segment)
            if key not in self._store:
                self._store.put(key, torch.zeros((layout.segment_rows, *layout.shape), dtype=layout.dtype, device="cpu"))
        return after

    def _place(self, writes: _Writes, head: int, after: Placed) -> None:
        """Have ``writes`` change the head at address ``head`` to ``after``, the stamp first: to be cut off after that is no
        harm."""
        assert after.stamp is not None and after.changed is not None
        slots, ids = after.changed
        first = _int64([after.stamp, after.hand])
        writes.add(_int64([head]), _int64([first.data_ptr()]), first.nbytes, first)
        writes.finally_add(head + 8 * (FIRST + slots), _numbers(0, len(ids)) * 8 + ids.data_ptr(), 8, ids)

    def _empty_rows(self, first: int, last: int) -> None:
        """Bring rows ``first`` to ``last - 1`` back to their blocks, as far as they are in the buffer."""
        while self._layout.buffer_rows:
            placed = self._current()
            if placed.stamp is None:
                return
            begin, end = placed.within(self._layout, first, last, self._most)
            try:
                if begin == end:
                    _leased([_Wanted(self, (), placed)], Access.READ, lambda lent, others: None)  # compares the stamps
                    return
                self._empty(placed, begin, end)
            except _MovedError:
                continue

    def _empty(self, placed: Placed, begin: int, end: int) -> None:
        """Bring the rows ``placed.ids[begin:end]`` back to their blocks. Raises _MovedError."""
        layout = self._layout
        if self._tight:
            end = min(end, begin + max(1, self._together // (layout.segment_room + layout.block_room)))
        ids = placed.ids[begin:end]
        now, later = self._part(ids, None, placed), self._part(ids)
        after = placed.removed(begin, end, later.blocks[-1] + (not self._tight))

        def work(lent: Sequence[_Lent], others: Sequence[There]) -> None:
            bases, writes = lent[0].bases, _Writes()
            of, to = self._addresses(now, bases[: len(now.blocks)]), self._addresses(later, bases[len(now.blocks) :])
            self._place(writes, lent[0].head, after)
            writes.add(to, of, layout.row_nbytes)
            writes.make()

        _leased([_Wanted(self, [*now.blocks, *later.blocks], placed)], Access.WRITE, work)
        self._placed = after

    # -- within ------------------------------------------------------------------------------------------------------------

    @property
    def _most(self) -> int:
        """How many blocks are leased together, at most."""
        return min(TOGETHER, max(1, self._together // self._layout.block_room))

    def _key(self, block: int) -> Key:
        return f"{self._prefix}{block}" if block >= 0 else buffer_key(self.name, -1 - block)

    def _ids(self, ids: Any) -> torch.Tensor:
        """Return ``ids`` in host memory as int64, contiguous, of any shape. Raises MisuseError for what is no row's number."""
        try:
            given = ids if isinstance(ids, torch.Tensor) else torch.as_tensor(ids, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise MisuseError(f"table {self.name!r}: ids are whole numbers, not {ids!r:.100}") from error
        if not isinstance(ids, torch.Tensor) and not given.numel():
            given = given.to(torch.int64)  # of an empty list torch makes floats
        if given.dtype not in _WHOLE or given.layout is not torch.strided:
            raise MisuseError(f"table {self.name!r}: ids are whole numbers, not a tensor of {given.dtype}")
        given = given.detach().to("cpu", torch.int64).contiguous()
        if given.numel():
            least, most = (int(bound) for bound in given.aminmax())
            if least < 0 or most >= self.rows:
                wrong = least if least < 0 else most
                raise MisuseError(f"there is no row {wrong} in table {self.name!r}, whose rows are 0 to {self.rows - 1}")
        return given

    def _numbers(self, ids: Any) -> tuple[torch.Tensor, tuple[int, ...], torch.device]:
        """Return ``ids`` as ``_ids`` does, of one dimension; their shape, and their device."""
        given = self._ids(ids)
        device = ids.device if isinstance(ids, torch.Tensor) else given.device
        return given.view(-1), tuple(given.shape), device

    def _values(self, values: Any, shape: tuple[int, ...] | None) -> torch.Tensor:
        """Return ``values`` in host memory, contiguous, of shape (n, *row_shape). ``shape``: that of the ids, None: (n,).
        Raises MisuseError for another type or shape."""
        if not isinstance(values, torch.Tensor) or values.dtype is not self.dtype or values.layout is not torch.strided:
            what = f"{values.dtype}" if isinstance(values, torch.Tensor) else type(values).__name__
            raise MisuseError(f"table {self.name!r} has rows of {self.dtype}, not {what}: give a tensor of that type")
        row, found = self.row_shape, tuple(values.shape)
        if shape is None:
            shape = found[:1]
        if found != (*shape, *row) and (found != row or not shape):
            raise MisuseError(f"table {self.name!r}: values have the shape {(*shape, *row)}, or {row} for all, not {found}")
        plain = values.device.type == "cpu" and not (values.is_conj() or values.is_neg())
        if plain and found == (*shape, *row) and values.is_contiguous():  # the same, in a fifth of the calls of torch
            return values.detach().view((math.prod(shape), *row))
        given = values.detach().resolve_conj().resolve_neg().to("cpu")
        return given.expand((*shape, *row)).reshape((math.prod(shape), *row)).contiguous()

    def _part(self, wanted: torch.Tensor, row: torch.Tensor | None = None, placed: Placed = absent) -> _Part:
        """Return the rows ``wanted`` as one part, with its segments and its blocks in order: where they lie as ``placed`` has
        it, by default all in their blocks."""
        block = wanted.div(self._layout.block_rows, rounding_mode="floor")
        place = wanted - block * self._layout.block_rows
        if len(placed.ids):
            slots, rows = placed.find(wanted), self._layout.segment_rows
            segment = slots.div(rows, rounding_mode="floor")
            block = torch.where(slots < 0, block, -1 - segment)
            place = torch.where(slots < 0, place, slots - segment * rows)
        unique, which = torch.unique(block, return_inverse=True)
        return _Part(wanted, unique.tolist(), which, place, row)

    def _parts(self, wanted: torch.Tensor) -> Iterator[_Part]:
        """Divide the rows ``wanted`` into parts whose blocks are leased together. The order of each row's values stays."""
        if not len(wanted):
            return
        most = self._most
        whole = self._part(wanted, None, self._current() if self._tight else absent)
        if len(whole.blocks) <= most and not (self._tight and whole.blocks[0] < 0):
            yield whole
            return
        if self._tight:  # segments are cut, too
            most = max(1, self._together // max(self._layout.block_room, self._layout.segment_room))
        order = torch.argsort(whole.which, stable=True)
        which = whole.which[order]
        for begin in range(0, len(whole.blocks), most):
            blocks = whole.blocks[begin : begin + most]
            low, high = torch.searchsorted(which, _int64([begin, begin + len(blocks)])).tolist()
            mine = order[low:high]
            yield _Part(wanted[mine], blocks, which[low:high] - begin, whole.place[mine], mine)

    def _addresses(self, part: _Part, bases: Sequence[int]) -> torch.Tensor:
        """Return the addresses of the rows of ``part`` in their blocks, which begin at ``bases``."""
        return _int64(bases)[part.which].add_(part.place, alpha=self._layout.row_nbytes)

    def _addresses_in(self, rows: torch.Tensor, row: torch.Tensor | None) -> torch.Tensor:
        """Return the addresses of ``rows``, contiguous, or of those among them that ``row`` names."""
        which = torch.arange(len(rows), device="cpu") if row is None else row
        return which * self._layout.row_nbytes + rows.data_ptr()

    def _unwritten(self) -> torch.Tensor:
        """Return a block as it is before anybody writes to it."""
        if self._layout.block_nbytes > self._budget:  # also where a damaged record says so: before memory is taken
            raise CapacityError(
                f"a block of table {self.name!r} has {self._layout.block_nbytes:,} bytes, which can never be in the pool of "
                f"{self._budget:,} bytes: open the store with more room there"
            )
        if self._blank is None:
            shape = (self._layout.block_rows, *self.row_shape)
            self._blank = torch.full(shape, self._layout.fill, dtype=self.dtype, device="cpu")
        return self._blank

    def _refuse_other(self, spec: TensorSpec, block: int) -> None:
        """Raise MisuseError where a tensor of ``spec`` is not a block of this layout."""
        if spec.dtype != self._dtype_name or spec.shape != self._layout.shape_of(block):
            raise MisuseError(f"{self._key(block)!r} is no block of table {self.name!r} as it was opened: open the table again")

    def _counted(self, counter: There) -> int:
        address, spec = counter
        count = ctypes.c_int64.from_address(address).value if spec == _COUNT else -1
        if count < 0:
            raise MisuseError(f"{appended_key(self.name)!r} is no count of the rows of a table: open the table again")
        return count


_COUNT = TensorSpec("int64", (1,))

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)
"""Types of ids. Not uint8, which torch takes for a mask."""


def change(
    tables: Sequence[Table],
    ids: torch.Tensor,
    work: Callable[[int, int, Sequence[torch.Tensor]], None],
    then: tuple[Key, torch.Tensor] | None = None,
) -> None:
    """Change the rows ``ids`` of all ``tables``, of one store: int64, sorted, each there once.

    ``work(begin, end, rows)`` gets the rows ``ids[begin:end]`` of each table, copies of shape (end - begin, *row_shape), and
    changes them. It is called once where the blocks of all fit into a quarter of the pool, and the rows of all tables change
    together after each of its calls. ``then``: the key of a tensor of the store, and what it becomes with the last of them.
    """
    if not len(ids):
        return

    def all_parts() -> None:
        cuts = _cuts(tables, ids)
        room = sum(table._layout.buffer_room for table in tables)
        for table in tables if 2 * room > min(table._budget for table in tables) else ():
            table._empty_rows(0, table.rows)
        for begin, end in cuts:
            last = then if end == len(ids) else None
            _again(partial(_change, tables, ids[begin:end], begin, end, work, last))

    _locked(sorted(set(tables), key=lambda table: table.name), all_parts)


def _change(
    tables: Sequence[Table],
    ids: torch.Tensor,
    begin: int,
    end: int,
    work: Callable[[int, int, Sequence[torch.Tensor]], None],
    then: tuple[Key, torch.Tensor] | None,
) -> None:
    store, direct = tables[0]._store, 2 * sum(table._layout.buffer_room for table in tables) > tables[0]._budget
    went_back, placed = store._went_back, [table._current() for table in tables]
    after = placed if direct else [table._with_room(known, ids) for table, known in zip(tables, placed, strict=True)]
    now = [table._part(ids, None, known) for table, known in zip(tables, placed, strict=True)]
    later = [table._part(ids, None, known) for table, known in zip(tables, after, strict=True)]
    rows = [torch.empty((end - begin, *table.row_shape), dtype=table.dtype, device="cpu") for table in tables]

    def wanted(parts: Sequence[_Part]) -> list[_Wanted]:
        return [_Wanted(table, part.blocks, known) for table, part, known in zip(tables, parts, placed, strict=True)]

    def read(lent: Sequence[_Lent]) -> None:
        for table, part, one, here in zip(tables, now, lent, rows, strict=True):
            copy_equal(table._addresses_in(here, None), table._addresses(part, one.bases), table._layout.row_nbytes)
        work(begin, end, rows)

    def write(lent: Sequence[_Lent], others: Sequence[There]) -> None:
        if store._went_back != went_back:  # before the lease, beside which it cannot
            raise _MovedError
        if not moves:
            read(lent)
        writes = _Writes()
        for table, part, one, here, old, new in zip(tables, later, lent, rows, placed, after, strict=True):
            if new is not old:
                table._place(writes, one.head, new)
            writes.add(table._addresses(part, one.bases), table._addresses_in(here, None), table._layout.row_nbytes)
        for address, spec in others:
            assert then is not None
            if spec != spec_of(then[1]):
                raise MisuseError(f"{then[0]!r} is no count of steps any more: {spec.shape} of {spec.dtype}")
            writes.add(_int64([address]), _int64([then[1].data_ptr()]), spec.nbytes)
        writes.make()

    moves = any(new is not old for old, new in zip(placed, after, strict=True))
    if moves:  # one lease after the other: a call that waits for room while it has some could wait for another such call
        _leased(wanted(now), Access.READ, lambda lent, others: read(lent))
    _leased(wanted(later), Access.WRITE, write, [] if then is None else [then[0]])
    for table, known in zip(tables, after, strict=True):
        table._placed = known


def _cuts(tables: Sequence[Table], ids: torch.Tensor) -> list[tuple[int, int]]:
    """Divide ``ids`` so that the blocks of each part, of all tables, are leased together."""
    costs, together = torch.zeros(len(ids), dtype=torch.int64, device="cpu"), min(table._together for table in tables)
    whole = sum(table._layout.block_room for table in tables)
    for table in tables:
        block = ids.div(table._layout.block_rows, rounding_mode="floor")
        first = torch.ones(len(ids), dtype=torch.bool, device="cpu")
        first[1:] = block[1:] != block[:-1]
        costs += first * max(table._layout.block_room, together // TOGETHER)
    ends, cuts, begin = costs.cumsum(0), [], 0
    while begin < len(ids):
        before = int(ends[begin - 1]) if begin else 0
        end = int(torch.searchsorted(ends, before + max(0, together - whole), right=True))
        cuts.append((begin, max(begin + 1, end)))
        begin = cuts[-1][1]
    return cuts


def _locked(tables: Sequence[Table], work: Callable[[], None]) -> None:
    """Call ``work`` with the locks of ``tables``, each taken by a ``with`` of its own: no signal handler comes in between."""
    if not tables:
        work()
        return
    with tables[0]._turn():
        _locked(tables[1:], work)


def _leased(
    wanted: Sequence[_Wanted],
    access: Access,
    work: Callable[[Sequence[_Lent], Sequence[There]], Answer],
    also: Sequence[Key] = (),
) -> Answer:
    """Call ``work(lent, others)`` under one lease of what is wanted of tables, with the heads of their buffers, and of the
    tensors ``also``.

    Addresses are in host memory: only rows go to a device. To be written to, blocks that do not exist are made; to be read,
    they are seen as blank. Raises _MovedError where a table's rows do not lie as was thought.
    """
    store = wanted[0].table._store
    missing: set[Key] = set()
    while True:
        heads = [buffer_key(some.table.name) for some in wanted if some.placed is not None and some.placed.stamp is not None]
        keys = [some.table._key(block) for some in wanted for block in some.blocks]
        there = [key for key in (*heads, *keys, *also) if key not in missing]
        try:
            with store._lease_addresses(there, access) as leased:
                rest = iter(leased)
                tops = [0 if some.placed is None else some.table._head(some.placed, rest) for some in wanted]
                bases = [[_base(some.table, block, missing, rest) for block in some.blocks] for some in wanted]
                return work(list(map(_Lent, bases, tops)), list(rest))
        except KeyNotFound as error:
            if any(key not in store for key in also):
                raise
            for some in wanted:
                if some.placed is not None and some.placed.stamp is not None and buffer_key(some.table.name) not in store:
                    some.table._placed = absent  # the store went back to a time before there was one
                    raise _MovedError from None
            lacking = [(some.table, block) for some in wanted for block in some.blocks if some.table._key(block) not in store]
            if any(block < 0 for _, block in lacking):  # a segment is never blank
                heads_only = [some._replace(blocks=()) for some in wanted if some.placed is not None]
                _leased(heads_only, Access.READ, lambda lent, others: None)  # raises _MovedError where the store went back
                raise MisuseError(f"a table is damaged, restore a commit that has it: {error}") from None
        if access is Access.READ:
            missing = {table._key(block) for table, block in lacking}
            continue
        for table, block in lacking:
            store.put(table._key(block), table._unwritten()[: table._layout.rows_in(block)])


def _base(table: Table, block: int, missing: set[Key], leased: Iterator[There]) -> int:
    if missing and table._key(block) in missing:
        return table._unwritten().data_ptr()
    address, spec = next(leased)
    table._refuse_other(spec, block)
    return address


class _Writes:
    """Copies that are made together, by one call of C. ``finally_add`` adds those that come last."""

    def __init__(self) -> None:
        self._lists: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._last: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._kept: list[torch.Tensor] = []

    def add(self, targets: torch.Tensor, sources: torch.Tensor, nbytes: int, kept: torch.Tensor | None = None) -> None:
        """Have ``nbytes`` bytes copied from each of the addresses ``sources`` to that of ``targets``; ``kept`` lives on."""
        self._add(self._lists, targets, sources, nbytes, kept)

    def finally_add(self, targets: torch.Tensor, sources: torch.Tensor, nbytes: int, kept: torch.Tensor) -> None:
        self._add(self._last, targets, sources, nbytes, kept)

    def _add(
        self,
        lists: tuple[list[int], list[int], list[int]],
        targets: torch.Tensor,
        sources: torch.Tensor,
        nbytes: int,
        kept: torch.Tensor | None,
    ) -> None:
        lists[0].extend(targets.tolist())
        lists[1].extend(sources.tolist())
        lists[2].extend([nbytes] * len(targets))
        if kept is not None:
            self._kept.append(kept)

    def make(self) -> None:
        copy(*(one + last for one, last in zip(self._lists, self._last, strict=True)))


def _segments(slots: torch.Tensor, layout: Layout) -> list[int]:
    segments: list[int] = torch.unique(slots.div(layout.segment_rows, rounding_mode="floor")).tolist()
    return segments


def _numbers(begin: int, count: int) -> torch.Tensor:
    return torch.arange(begin, begin + count, device="cpu")


def _int64(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")


def _is_block(key: Key, prefix: str) -> bool:
    return key.startswith(prefix) and key[len(prefix) :].isdecimal()


def open_table(
    store: _Store,
    name: str,
    rows: int | None,
    columns: int | Sequence[int] | None,
    *,
    dtype: torch.dtype | None,
    block: int | str | None,
    pattern: Pattern,
    fill: float,
    budget: int,
) -> Table:
    """Open table ``name`` of ``store``, or make it where there is none; ``budget``: bytes of the pool in host memory. The rest
    is as ``TieredStore.table`` has it."""
    if not isinstance(name, str) or not name:
        raise MisuseError(f"the name of a table is a text, not {name!r}")
    if record_key(name) in store:
        layout = Layout.decoded(name, store.get(record_key(name)))
        _refuse_difference(name, layout, rows, columns, dtype)
        return Table(store, name, layout, budget)
    if rows is None:
        raise KeyNotFound(f"there is no table {name!r} in {store}: store.table(name, rows, columns) makes one")
    layout = described(name, rows, columns, dtype, block, pattern, fill, budget)
    for prefix in (block_prefix(name), buffer_key(name)):
        if buffer_key(name) in store or any(_is_block(key, prefix) for key in store):
            raise MisuseError(f"{store} has tensors that begin with {prefix!r} and are of no table: delete them first")
    store.put(appended_key(name), _int64([0]))
    store.put(record_key(name), layout.encoded())
    return Table(store, name, layout, budget)


def _refuse_difference(
    name: str, layout: Layout, rows: int | None, columns: int | Sequence[int] | None, dtype: torch.dtype | None
) -> None:
    """Raise MisuseError where a table is not as a caller says."""
    shape = None if columns is None else (columns,) if type(columns) is int else tuple(columns)  # type: ignore[arg-type]
    for what, said, found in (
        ("rows", rows, layout.rows),
        ("rows of shape", shape, layout.shape),
        ("the type", dtype, layout.dtype),
    ):
        if said is not None and said != found:
            raise MisuseError(f"table {name!r} exists and has {what} {found}, not {said}: open it with its name alone")
