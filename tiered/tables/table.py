"""``Table``: the calls on rows by number.

A table has no state of its own: what it is, how many rows were appended and the rows themselves are tensors of its store. So
a commit, ``rollback``, ``refresh`` and another process see the table as they see any tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from tiered.errors import KeyNotFound, ManifestError, MisuseError, expect_type, from_here
from tiered.tables.buffer import absent
from tiered.tables.cache import RowCache
from tiered.tables.change import change
from tiered.tables.kernel import copy
from tiered.tables.layout import (
    Layout,
    Run,
    TableOptions,
    appended_key,
    block_prefix,
    buffer_key,
    record_key,
    table_owner,
)
from tiered.tables.places import Lent, MovedError, Places, RowStore, There, Wanted, again, int64, leased, numbers
from tiered.tensors.specs import spec_of
from tiered.types import Access, Key, Owner, TensorSpec

__all__ = ["Table", "open_table"]

BLOCKS_AHEAD = 64
"""Blocks that are looked for at a time, where all are read in order."""


class Table:
    """Rows of one shape and type, by number, in a store: ``TieredStore.table`` makes and opens them.

    ``ids`` are whole numbers from 0 to ``rows - 1``, as a tensor of any shape, a list or an int, and may be there more than
    once. A call leases the blocks that it needs together, in host memory, and copies rows between them and ordinary memory.
    Where the blocks of a call fit into a quarter of the pool, the call is atomic: an exception of a signal handler leaves all
    of its rows as they were, or all changed. A larger call is made in parts of which this holds (without a C compiler at
    installation, it holds of single rows). Assignment to a slice is atomic for each block. Calls of several threads take
    turns; a signal handler that calls a table within a call of it gets a MisuseError.
    """

    def __init__(self, store: RowStore, name: str, owner: Owner, layout: Layout, budget: int, cache: RowCache) -> None:
        expect_type(layout, Layout, "store.table makes a table; its constructor is given a layout")
        self._store, self._layout = store, layout
        self.name = name
        """The name; keys of the table's tensors begin with it."""
        self.owner = owner
        """Who owns the table's tensors: the table itself, or that whose part it is."""
        self._places = Places(store, name, owner, layout, budget, cache)
        self._expected = 0
        """What ``appended`` is, unless the store went back or ahead: only a guess, which each call compares."""

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
        self._places.refuse_another()
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
        with self._places.turn():
            return self._places.key(self._places.part(self._ids([row]), None, self._places.now()).blocks[0])

    # -- rows by number ----------------------------------------------------------------------------------------------------

    @from_here
    def look_up(self, ids: torch.Tensor | Sequence[int] | int) -> torch.Tensor:
        """Return a copy of the rows ``ids``, of shape ``(*ids.shape, *row_shape)``, on the device of ``ids``.

        Raises MisuseError for ids that are no row's, and what ``TieredStore.lease`` raises.
        """
        wanted, shape, device = self._numbers(ids)
        found = torch.empty((len(wanted), *self.row_shape), dtype=self.dtype, device="cpu")
        with self._places.turn():
            self._places.read(wanted, found)
        return found.view((*shape, *self.row_shape)).to(device)

    @from_here
    def update(self, ids: torch.Tensor | Sequence[int] | int, values: torch.Tensor) -> None:
        """Set the rows ``ids`` to ``values``, of shape ``(*ids.shape, *row_shape)``, or one row for all. Of an id that is there
        twice, the last value stays. Raises as ``look_up``, and MisuseError for values of another shape or type."""
        wanted, shape, _ = self._numbers(ids)
        given = self._values(values, shape)
        with self._places.turn():
            if self._places.tight:
                self._places.empty_rows(0, self.rows)
            for part in self._places.parts(wanted):
                again(lambda part=part: self._places.set(part, given))  # type: ignore[misc]

    @from_here
    def accumulate(self, ids: torch.Tensor | Sequence[int] | int, values: torch.Tensor, *, alpha: float = 1) -> None:
        """Add ``alpha * values`` to the rows ``ids``, as ``torch.Tensor.index_add_`` does, in the order of ``ids``. Shapes and
        errors as ``update``."""
        wanted, shape, _ = self._numbers(ids)
        given = self._values(values, shape)
        expect_type(alpha, int | float, f"table {self.name!r}: alpha is a number")
        unique, inverse = torch.unique(wanted, return_inverse=True)

        def add(begin: int, end: int, rows: Sequence[torch.Tensor]) -> None:
            if end - begin == len(unique):
                rows[0].index_add_(0, inverse, given, alpha=alpha)
                return
            mine = ((inverse >= begin) & (inverse < end)).nonzero()[:, 0]
            rows[0].index_add_(0, inverse[mine] - begin, given[mine], alpha=alpha)

        change([self._places], unique, add)

    # -- rows in order -----------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a copy of one row (negative numbers count from the end), of a slice, or of ids as ``look_up`` does."""
        self._refuse_tuple(index)
        if isinstance(index, slice):
            chosen = range(self.rows)[index]
            return self._read(chosen.start, chosen.stop) if chosen.step == 1 else self.look_up(int64(chosen))
        return self.look_up(self._one(index) if type(index) is int else index)

    def __setitem__(self, index: Any, values: torch.Tensor) -> None:
        """Set one row, a slice, or ids as ``update`` does. Whole blocks of a slice are written without a read."""
        self._refuse_tuple(index)
        if isinstance(index, slice):
            chosen = range(self.rows)[index]
            if chosen.step == 1:
                self._write(chosen.start, self._values(values, (len(chosen),)))
            else:
                self.update(int64(chosen), values)
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
        with self._places.turn():
            for run in self._layout.runs(begin, begin + len(values)):
                rows = values[at : at + run.count]
                if run.count == self._layout.rows_in(run.block):
                    self._places.put_block(run, rows)
                else:
                    if self._places.tight:
                        self._places.empty_rows(begin + at, begin + at + run.count)
                    self._places.move(self._places.part(numbers(begin + at, run.count)), rows, Access.WRITE)
                at += run.count

    def blocks(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Iterate over the rows from ``begin`` to ``end`` (None: the last) in order, one block after the other: pairs of the
        number of a first row, and a copy of the rows. The next blocks are read meanwhile; no lease is open between two of
        them. Raises as ``look_up``."""
        runs = self._layout.runs(*slice(begin, end).indices(self.rows)[:2])
        if self._layout.buffer_rows:
            yield from self._looked_up(runs)
            return
        while some := list(islice(runs, BLOCKS_AHEAD)):
            there = {run.block: self._places.key(run.block) for run in some if self._places.key(run.block) in self._store}
            copies = self._store.in_order(list(there.values()))
            for run in some:
                if run.block in there:
                    with self._places.turn():
                        rows = next(copies)
                    self._places.refuse_other(spec_of(rows), run.block)
                    rows = rows[run.place : run.place + run.count]
                else:
                    rows = self._places.unwritten()[: run.count].clone()
                yield run.block * self._layout.block_rows + run.place, rows
                del rows

    def _looked_up(self, runs: Iterator[Run]) -> Iterator[tuple[int, torch.Tensor]]:
        """Iterate as ``blocks`` does over ``runs``, some of whose rows may be in the buffer: those of several blocks are copied
        under one lease, wherever they lie."""
        most, following = max(1, min(BLOCKS_AHEAD, self._places.most // 2)), list[Run]()
        while some := following or list(islice(runs, most)):
            following = list(islice(runs, most))
            keys = [self._places.key(run.block) for run in following]
            self._store.fetch_ahead([key for key in keys if key in self._store], torch.device("cpu"))
            first = some[0].block * self._layout.block_rows + some[0].place
            rows = self._scanned(numbers(first, sum(run.count for run in some)))
            at = 0
            for run in some:
                yield first + at, rows[at : at + run.count].clone()
                at += run.count

    def _scanned(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a copy of rows that will not be asked for again soon."""
        rows = torch.empty((len(ids), *self.row_shape), dtype=self.dtype, device="cpu")
        with self._places.turn():
            for part in self._places.parts(ids):
                self._places.move(part, rows, Access.READ)
        return rows

    # -- a ring ------------------------------------------------------------------------------------------------------------

    @from_here
    def append(self, values: torch.Tensor) -> torch.Tensor:
        """Write ``values``, of shape ``(n, *row_shape)`` or one row, after the rows that were appended before, and from row 0
        on again when the table is full. Return their ids, int64 of shape (n,).

        Rows and their count change together. Raises as ``update``.
        """
        if isinstance(values, torch.Tensor) and values.shape == self.row_shape:
            values = values.unsqueeze(0)
        given, done, first = self._values(values, None), 0, 0
        total, rows = given.size(0), self._layout.rows
        with self._places.turn():
            while done < total:
                begin, count = self._append(given[done:] if done else given)
                first, done = begin - done, done + count
        ids = numbers(first % rows, total)
        return ids if first % rows + total <= rows else ids % rows

    def _append(self, given: torch.Tensor) -> tuple[int, int]:
        """Append rows, of which at least one, as many as are written at once; return how many were appended before, and how
        many were now."""
        layout, nbytes = self._layout, self._layout.row_nbytes
        while True:
            begin = self._expected
            runs, blocks = self._ring(begin, min(given.size(0), layout.rows))
            count = sum(run.count for run in runs)
            after = ctypes.c_int64(begin + count)
            ranges = [(first := run.block * layout.block_rows + run.place, first + run.count) for run in runs]
            for first, last in ranges:
                self._places.empty_rows(first, last)
                self._places.forget_range(first, last)
            placed = self._places.placed
            if placed.stamp is not None and any(len(set(placed.within(layout, *range, 1))) > 1 for range in ranges):
                continue  # the store went back meanwhile

            def work(
                lent: Sequence[Lent],
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
                now = leased([Wanted(self._places, blocks, placed)], Access.WRITE, work, [appended_key(self.name)])
            except MovedError:
                continue
            if now == begin:
                self._expected = begin + count
                return begin, count
            self._expected = now

    def _ring(self, begin: int, count: int) -> tuple[list[Run], list[int]]:
        """Return where ``count`` rows go after ``begin`` others, as far as the blocks are leased together; and these blocks."""
        layout, start = self._layout, begin % self._layout.rows
        block, place = divmod(start, layout.block_rows)
        if place + count <= layout.rows_in(block):
            return [Run(block, place, count)], [block]
        most = self._places.most
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
        """Delete the table's tensors from the store, and the states of its optimizers with their counts. A call that was cut
        off is completed by another one. Raises as ``TieredStore.delete``."""
        if record_key(self.name) not in self._store:
            return  # the record goes last
        if self._places.owner == table_owner(self.name):
            self._delete_states()
        with self._places.turn():
            prefixes = block_prefix(self.name), buffer_key(self.name)
            mine = self._places.owner
            blocks = [key for key in self._store.owned(mine) if any(_is_block(key, prefix) for prefix in prefixes)]
            for key in (*blocks, buffer_key(self.name), appended_key(self.name), record_key(self.name)):
                if key in self._store:
                    self._store.delete(key, owner=mine)
            self._places.placed = absent
            self._places.forget_all()

    def _delete_states(self) -> None:
        """Delete what else this table's owner has: tables that are a part of it, and what is no table."""
        store, mine, blocks = self._store, self._places.owner, (block_prefix(self.name), buffer_key(self.name))
        for key in store.owned(mine):
            part = key.removesuffix(record_key(""))
            if part != key and part != self.name:
                with contextlib.suppress(ManifestError):  # of a damaged record: its tensors go below, as all others
                    store.table(part).delete()
        own = {buffer_key(self.name), appended_key(self.name), record_key(self.name)}
        for key in store.owned(mine):
            if key not in own and not any(_is_block(key, prefix) for prefix in blocks):
                store.delete(key, owner=mine)

    # -- within ------------------------------------------------------------------------------------------------------------

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
        given = given.detach().to("cpu", torch.int64, copy=True).contiguous()  # which nobody changes while it is used
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
            return values.detach() if len(shape) == 1 else values.detach().view((math.prod(shape), *row))
        given = values.detach().resolve_conj().resolve_neg().to("cpu")
        return given.expand((*shape, *row)).reshape((math.prod(shape), *row)).contiguous()

    def _counted(self, counter: There) -> int:
        address, spec = counter
        count = ctypes.c_int64.from_address(address).value if spec == _COUNT else -1
        if count < 0:
            raise MisuseError(f"{appended_key(self.name)!r} is no count of the rows of a table: open the table again")
        return count


_COUNT = TensorSpec("int64", (1,))

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)
"""Types of ids. Not uint8, which torch takes for a mask."""


def _is_block(key: Key, prefix: str) -> bool:
    return key.startswith(prefix) and key[len(prefix) :].isdecimal()


def open_table(
    store: RowStore, options: TableOptions, budget: int, cache: RowCache, owner: Owner | None = None
) -> Table:
    """Open a table of ``store``, or make it where there is none; ``budget``: bytes of the pool in host memory; ``cache``: for
    copies of rows."""
    name = options.name
    if record_key(name) in store:
        found = store.owner_of(record_key(name))
        if found is None or found.kind != table_owner(name).kind:
            raise MisuseError(
                f"tensor {record_key(name)!r} belongs to {found or 'the user'}, and is no record of a table: give another name"
            )
        layout = Layout.decoded(name, store.get(record_key(name)))
        options.refuse_other(layout)
        if owner not in (None, found):
            raise MisuseError(f"table {name!r} exists and belongs to {found}, not to {owner}: leave owner= out")
        return Table(store, name, found, layout, budget, cache)
    if options.rows is None:
        raise KeyNotFound(f"there is no table {name!r} in {store}: store.table(name, rows, columns) makes one")
    layout = options.layout(budget)
    for prefix in (block_prefix(name), buffer_key(name)):
        if buffer_key(name) in store or any(_is_block(key, prefix) for key in store):
            raise MisuseError(f"{store} has tensors that begin with {prefix!r} and are of no table: delete them first")
    mine = table_owner(name) if owner is None else owner
    store.put(appended_key(name), int64([0]), owner=mine)
    store.put(record_key(name), layout.encoded(), owner=mine)
    return Table(store, name, mine, layout, budget, cache)
