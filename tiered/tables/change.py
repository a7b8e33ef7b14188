"""A change of the same rows of several tables at once: weights, and the states of their optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tiered.errors import MisuseError
from tiered.tables.kernel import copy_equal
from tiered.tables.places import LEASED_BLOCKS, Lent, MovedError, MovedRows, Places, There, Wanted, Writes, again, int64, leased
from tiered.tensors.specs import spec_of
from tiered.types import Access, Key

__all__ = ["change"]


def change(
    tables: Sequence[Places],
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
        for begin, end in _cuts(tables, ids):
            last = then if end == len(ids) else None
            again(partial(_change, tables, ids[begin:end], begin, end, work, last))

    _locked(sorted(set(tables), key=lambda table: table.name), all_parts)


def _change(
    tables: Sequence[Places],
    ids: torch.Tensor,
    begin: int,
    end: int,
    work: Callable[[int, int, Sequence[torch.Tensor]], None],
    then: tuple[Key, torch.Tensor] | None,
) -> None:
    store, direct = tables[0].store, 2 * sum(table.layout.buffer_room for table in tables) > tables[0].budget
    for table in tables if direct else ():  # the pool is too small for these buffers together
        table.empty_rows(0, table.layout.rows)
    went_back, placed = store.rollbacks, [table.current() for table in tables]
    after = placed if direct else [table.with_room(known, ids) for table, known in zip(tables, placed, strict=True)]
    now = [table.part(ids, None, known) for table, known in zip(tables, placed, strict=True)]
    later = [table.part(ids, None, known) for table, known in zip(tables, after, strict=True)]
    rows = [torch.empty((end - begin, *table.layout.shape), dtype=table.layout.dtype, device="cpu") for table in tables]

    def wanted(parts: Sequence[MovedRows]) -> list[Wanted]:
        return [Wanted(table, part.blocks, known) for table, part, known in zip(tables, parts, placed, strict=True)]

    def read(lent: Sequence[Lent]) -> None:
        for table, part, one, here in zip(tables, now, lent, rows, strict=True):
            copy_equal(table.addresses_in(here, None), table.addresses(part, one.bases), table.layout.row_nbytes)
        work(begin, end, rows)

    def write(lent: Sequence[Lent], others: Sequence[There]) -> None:
        if store.rollbacks != went_back:  # before the lease, beside which it cannot
            raise MovedError
        if not moves:
            read(lent)
        writes = Writes()
        for table, part, one, here, old, new in zip(tables, later, lent, rows, placed, after, strict=True):
            if new is not old:
                table.place(writes, one.head, new)
            writes.add(table.addresses(part, one.bases), table.addresses_in(here, None), table.layout.row_nbytes)
        for address, spec in others:
            assert then is not None
            if spec != spec_of(then[1]):
                raise MisuseError(f"{then[0]!r} is no count of steps any more: {spec.shape} of {spec.dtype}")
            writes.add(int64([address]), int64([then[1].data_ptr()]), spec.nbytes)
        writes.make()

    moves = any(new is not old for old, new in zip(placed, after, strict=True))
    if moves:  # one lease after the other: a call that waits for room while it has some could wait for another such call
        leased(wanted(now), Access.READ, lambda lent, others: read(lent))
    for table in tables:
        table.forget(ids)
    leased(wanted(later), Access.WRITE, write, [] if then is None else [then[0]])
    for table, known in zip(tables, after, strict=True):
        table.placed = known


def _cuts(tables: Sequence[Places], ids: torch.Tensor) -> list[tuple[int, int]]:
    """Divide ``ids`` so that the blocks of each part, of all tables, are leased together."""
    costs, together = torch.zeros(len(ids), dtype=torch.int64, device="cpu"), min(table.together for table in tables)
    whole = sum(table.layout.block_room for table in tables)
    for table in tables:
        block = ids.div(table.layout.block_rows, rounding_mode="floor")
        first = torch.ones(len(ids), dtype=torch.bool, device="cpu")
        first[1:] = block[1:] != block[:-1]
        costs += first * max(table.layout.block_room, together // LEASED_BLOCKS)
    ends, cuts, begin = costs.cumsum(0), [], 0
    while begin < len(ids):
        before = int(ends[begin - 1]) if begin else 0
        end = int(torch.searchsorted(ends, before + max(0, together - whole), right=True))
        cuts.append((begin, max(begin + 1, end)))
        begin = cuts[-1][1]
    return cuts


def _locked(tables: Sequence[Places], work: Callable[[], None]) -> None:
    """Call ``work`` with the locks of ``tables``, each taken by a ``with`` of its own: no signal handler comes in between."""
    if not tables:
        work()
        return
    with tables[0].turn():
        _locked(tables[1:], work)
