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
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch

from tiered.errors import CapacityError, KeyNotFound, MisuseError, from_here
from tiered.tables.kernel import copy, copy_equal
from tiered.tables.layout import Layout, Pattern, Run, appended_key, block_prefix, described, record_key
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


class _Store(Protocol):
    """What a table needs of a store."""

    def put(self, key: Key, tensor: torch.Tensor) -> None: ...
    def get(self, key: Key) -> torch.Tensor: ...
    def delete(self, key: Key) -> None: ...
    def in_order(self, keys: Iterable[Key]) -> Iterator[torch.Tensor]: ...
    def _lease_addresses(
        self, keys: Sequence[Key], access: Access
    ) -> AbstractContextManager[list[tuple[int, TensorSpec]]]: ...
    def __contains__(self, key: object) -> bool: ...
    def __iter__(self) -> Iterator[Key]: ...


@dataclass(frozen=True)
class _Part:
    """Rows that are moved under one lease: row number i is row ``place[i]`` of ``blocks[which[i]]``, and row ``row[i]`` of the
    batch (None: i). All are int64."""

    blocks: list[int]
    which: torch.Tensor
    place: torch.Tensor
    row: torch.Tensor | None = None


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
        """Return the key of the store's tensor that has ``row``, to lease or prefetch it. It may not exist yet."""
        return self._key(int(self._ids([row])[0]) // self._layout.block_rows)

    # -- rows by number ----------------------------------------------------------------------------------------------------

    @from_here
    def look_up(self, ids: torch.Tensor | Sequence[int] | int) -> torch.Tensor:
        """Return a copy of the rows ``ids``, of shape ``(*ids.shape, *row_shape)``, on the device of ``ids``.

        Raises MisuseError for ids that are no row's, and what ``TieredStore.lease`` raises.
        """
        wanted, shape, device = self._numbers(ids)
        found = torch.empty((len(wanted), *self.row_shape), dtype=self.dtype, device="cpu")
        with self._lock:
            for part in self._parts(wanted):
                self._move(part, found, Access.READ)
        return found.view((*shape, *self.row_shape)).to(device)

    @from_here
    def update(self, ids: torch.Tensor | Sequence[int] | int, values: torch.Tensor) -> None:
        """Set the rows ``ids`` to ``values``, of shape ``(*ids.shape, *row_shape)``, or one row for all. Of an id that is there
        twice, the last value stays. Raises as ``look_up``, and MisuseError for values of another shape or type."""
        wanted, shape, _ = self._numbers(ids)
        given = self._values(values, shape)
        with self._lock:
            for part in self._parts(wanted):
                self._move(part, given, Access.WRITE)

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
        """Copy the rows of ``part`` out of their blocks into ``rows``, or with WRITE into them."""

        def work(bases: Sequence[Sequence[int]], others: Sequence[_There]) -> None:
            there, here = self._addresses(part, bases[0]), self._addresses_in(rows, part.row)
            to, of = (here, there) if access is Access.READ else (there, here)
            copy_equal(to, of, self._layout.row_nbytes)

        _leased([(self, part.blocks)], access, work)

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
        found = torch.empty((max(0, end - begin), *self.row_shape), dtype=self.dtype, device="cpu")
        for first, rows in self.blocks(begin, end):
            found[first - begin : first - begin + len(rows)] = rows
        return found

    @from_here
    def _write(self, begin: int, values: torch.Tensor) -> None:
        at = 0
        with self._lock:
            for run in self._layout.runs(begin, begin + len(values)):
                rows = values[at : at + run.count]
                if run.count == self._layout.rows_in(run.block):
                    self._store.put(self._key(run.block), rows)
                else:
                    where = torch.arange(run.place, run.place + run.count, device="cpu")
                    self._move(_Part([run.block], torch.zeros_like(where), where), rows, Access.WRITE)
                at += run.count

    def blocks(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Iterate over the rows from ``begin`` to ``end`` (None: the last) in order, one block after the other: pairs of the
        number of a first row, and a copy of the rows. The next blocks are read meanwhile; no lease is open between two of
        them. Raises as ``look_up``."""
        runs = self._layout.runs(*slice(begin, end).indices(self.rows)[:2])
        while some := list(islice(runs, AHEAD)):
            there = {run.block: self._key(run.block) for run in some if self._key(run.block) in self._store}
            copies = self._store.in_order(list(there.values()))
            for run in some:
                if run.block in there:
                    with self._lock:
                        rows = next(copies)
                    self._refuse_other(spec_of(rows), run.block)
                    rows = rows[run.place : run.place + run.count]
                else:
                    rows = self._unwritten()[: run.count].clone()
                yield run.block * self._layout.block_rows + run.place, rows
                del rows

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
        with self._lock:
            while done < len(given):
                begin, count = self._append(given[done:])
                first, done = begin - done, done + count
        return torch.arange(first, first + len(given), device="cpu") % self._layout.rows

    def _append(self, given: torch.Tensor) -> tuple[int, int]:
        """Append rows, of which at least one, as many as are written at once; return how many were appended before, and how
        many were now."""
        layout, nbytes = self._layout, self._layout.row_nbytes
        while True:
            begin = self._expected
            runs, blocks = self._ring(begin, min(len(given), layout.rows))
            count = sum(run.count for run in runs)
            after = _int64([begin + count])

            def work(
                bases: Sequence[Sequence[int]],
                others: Sequence[_There],
                begin: int = begin,
                after: torch.Tensor = after,
                runs: Sequence[Run] = runs,
                blocks: Sequence[int] = blocks,
            ) -> int:
                (counter,) = others
                now = self._counted(counter)
                if now == begin:
                    at, targets, sources = given.data_ptr(), [], []
                    bases_of = dict(zip(blocks, bases[0], strict=True))
                    for run in runs:
                        targets.append(bases_of[run.block] + run.place * nbytes)
                        sources.append(at)
                        at += run.count * nbytes
                    sizes = [run.count * nbytes for run in runs]
                    copy([*targets, counter[0]], [*sources, after.data_ptr()], [*sizes, 8])
                return now

            now = _leased([(self, blocks)], Access.WRITE, work, [appended_key(self.name)])
            if now == begin:
                self._expected = begin + count
                return begin, count
            self._expected = now

    def _ring(self, begin: int, count: int) -> tuple[list[Run], list[int]]:
        """Return where ``count`` rows go after ``begin`` others, as far as the blocks are leased together; and these blocks."""
        layout, start = self._layout, begin % self._layout.rows
        most = min(TOGETHER, max(1, self._together // layout.block_room))
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
        with self._lock:
            blocks = [key for key in self._store if _is_block(key, self._prefix)]
            for key in (*blocks, appended_key(self.name), record_key(self.name)):
                if key in self._store:
                    self._store.delete(key)

    # -- within ------------------------------------------------------------------------------------------------------------

    def _key(self, block: int) -> Key:
        return f"{self._prefix}{block}"

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
        given = values.detach().resolve_conj().resolve_neg().to("cpu")
        return given.expand((*shape, *row)).reshape((math.prod(shape), *row)).contiguous()

    def _part(self, wanted: torch.Tensor) -> _Part:
        """Return the rows ``wanted`` as one part, with its blocks in order."""
        rows = self._layout.block_rows
        block = wanted.div(rows, rounding_mode="floor")
        unique, which = torch.unique(block, return_inverse=True)
        return _Part(unique.tolist(), which, wanted - block * rows)

    def _parts(self, wanted: torch.Tensor) -> Iterator[_Part]:
        """Divide the rows ``wanted`` into parts whose blocks are leased together. The order of each row's values stays."""
        if not len(wanted):
            return
        whole = self._part(wanted)
        most = min(TOGETHER, max(1, self._together // self._layout.block_room))
        if len(whole.blocks) <= most:
            yield whole
            return
        order = torch.argsort(whole.which, stable=True)
        which = whole.which[order]
        for begin in range(0, len(whole.blocks), most):
            blocks = whole.blocks[begin : begin + most]
            low, high = torch.searchsorted(which, _int64([begin, begin + len(blocks)])).tolist()
            mine = order[low:high]
            yield _Part(blocks, which[low:high] - begin, whole.place[mine], mine)

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

    def _counted(self, counter: _There) -> int:
        address, spec = counter
        count = ctypes.c_int64.from_address(address).value if spec == _COUNT else -1
        if count < 0:
            raise MisuseError(f"{appended_key(self.name)!r} is no count of the rows of a table: open the table again")
        return count


_COUNT = TensorSpec("int64", (1,))
_There = tuple[int, TensorSpec]
"""The address of a tensor, and what it is."""

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
        for begin, end in cuts:
            last = then if end == len(ids) else None
            _change([(table, table._part(ids[begin:end])) for table in tables], begin, end, work, last)

    _locked(sorted(set(tables), key=lambda table: table.name), all_parts)


def _change(
    parts: Sequence[tuple[Table, _Part]],
    begin: int,
    end: int,
    work: Callable[[int, int, Sequence[torch.Tensor]], None],
    then: tuple[Key, torch.Tensor] | None,
) -> None:
    rows = [torch.empty((end - begin, *table.row_shape), dtype=table.dtype, device="cpu") for table, _ in parts]

    def change_leased(bases: Sequence[Sequence[int]], others: Sequence[_There]) -> None:
        there = [table._addresses(part, base) for (table, part), base in zip(parts, bases, strict=True)]
        here = [table._addresses_in(some, None) for (table, _), some in zip(parts, rows, strict=True)]
        sizes = [table._layout.row_nbytes for table, _ in parts]
        for inside, outside, nbytes in zip(there, here, sizes, strict=True):
            copy_equal(outside, inside, nbytes)
        work(begin, end, rows)
        targets: list[int] = torch.cat(there).tolist()
        sources: list[int] = torch.cat(here).tolist()
        widths = [nbytes for nbytes in sizes for _ in range(begin, end)]
        for address, spec in others:
            assert then is not None
            if spec != spec_of(then[1]):
                raise MisuseError(f"{then[0]!r} is no count of steps any more: {spec.shape} of {spec.dtype}")
            targets.append(address)
            sources.append(then[1].data_ptr())
            widths.append(spec.nbytes)
        copy(targets, sources, widths)

    _leased([(table, part.blocks) for table, part in parts], Access.WRITE, change_leased, [] if then is None else [then[0]])


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
    with tables[0]._lock:
        _locked(tables[1:], work)


def _leased(
    wanted: Sequence[tuple[Table, Sequence[int]]],
    access: Access,
    work: Callable[[Sequence[Sequence[int]], Sequence[_There]], Answer],
    also: Sequence[Key] = (),
) -> Answer:
    """Call ``work(bases, others)`` under one lease of blocks of tables and of the tensors ``also``.

    ``bases`` are the addresses of the blocks, in host memory: only rows go to a device. To be written to, blocks that do not
    exist are made; to be read, they are seen as blank.
    """
    store = wanted[0][0]._store
    missing: set[Key] = set()
    while True:
        keys = [table._key(block) for table, blocks in wanted for block in blocks]
        there = [key for key in (*keys, *also) if key not in missing]
        try:
            with store._lease_addresses(there, access) as leased:
                found = iter(leased)
                bases = [[_base(table, block, missing, found) for block in blocks] for table, blocks in wanted]
                return work(bases, list(found))
        except KeyNotFound:
            if any(key not in store for key in also):
                raise
        blank = [(table, block) for table, blocks in wanted for block in blocks if table._key(block) not in store]
        if access is Access.READ:
            missing = {table._key(block) for table, block in blank}
            continue
        for table, block in blank:
            store.put(table._key(block), table._unwritten()[: table._layout.rows_in(block)])


def _base(table: Table, block: int, missing: set[Key], found: Iterator[_There]) -> int:
    if missing and table._key(block) in missing:
        return table._unwritten().data_ptr()
    address, spec = next(found)
    table._refuse_other(spec, block)
    return address


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
    if any(_is_block(key, block_prefix(name)) for key in store):
        raise MisuseError(f"{store} has tensors that begin with {block_prefix(name)!r} and are of no table: delete them first")
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
