"""Which rows of a table lie in its row buffer, and where.

Rows that were changed last lie together, apart from their blocks, and go back to these many at a time. The buffer of table
NAME is these tensors of its store:

- ``NAME/table.buffer``, the head: int64, a stamp, the hand, and for each slot the number of the row that lies there, or -1.
- ``NAME/table.buffer0``, ``NAME/table.buffer1``, …: the slots, ``segment_rows`` in each, of the rows' shape and type.

A row whose number is in the head lies in its slot, every other one in its block. The stamp is another random number after each
change of the head: what a process knows of the buffer is as good as its stamp. The hand is the block from which on the buffer
is emptied next. None of these tensors exists before it is needed.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field

import torch

from tiered.errors import MisuseError
from tiered.tables.layout import Layout, buffer_key
from tiered.types import TensorSpec

__all__ = ["FIRST", "Placed", "absent", "blank", "read_head", "stamp_at"]

FIRST = 2
"""Place in the head of the number of the row in slot 0; the stamp and the hand come before."""


def _none() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class Placed:
    """What the head said when it had ``stamp`` (None: there was no head). Never changed: a change makes another one.

    ``ids`` are the rows in the buffer, in order, ``slots`` where they lie, ``free`` the slots without a row. ``changed``: the
    slots of which the head has to be changed, and the numbers that it gets there. All are int64.
    """

    stamp: int | None
    hand: int = 0
    ids: torch.Tensor = field(default_factory=_none)
    slots: torch.Tensor = field(default_factory=_none)
    free: torch.Tensor = field(default_factory=_none)
    changed: tuple[torch.Tensor, torch.Tensor] | None = None

    def find(self, wanted: torch.Tensor) -> torch.Tensor:
        """Return the slots of the rows ``wanted``, -1 for those that lie in their blocks."""
        if not len(self.ids):
            return torch.full_like(wanted, -1)
        at = torch.searchsorted(self.ids, wanted).clamp_(max=len(self.ids) - 1)
        return torch.where(self.ids[at] == wanted, self.slots[at], -1)

    def added(self, rows: torch.Tensor) -> Placed:
        """Return what is known once the ``rows``, in order, each there once and not in the buffer, lie in free slots: the last
        of ``free``, in their order."""
        count, total = len(rows), len(self.ids) + len(rows)
        taken = self.free[len(self.free) - count :]
        there = torch.searchsorted(self.ids, rows) + torch.arange(count, dtype=torch.int64, device="cpu")
        others = torch.ones(total, dtype=torch.bool, device="cpu")
        others[there] = False
        ids, slots = (torch.empty(total, dtype=torch.int64, device="cpu") for _ in range(2))
        ids[there], slots[there] = rows, taken
        ids[others], slots[others] = self.ids, self.slots
        return Placed(_stamp(), self.hand, ids, slots, self.free[: len(self.free) - count], (taken, rows))

    def removed(self, begin: int, end: int, hand: int) -> Placed:
        """Return what is known once the rows ``ids[begin:end]`` lie in their blocks, and the hand is at ``hand``."""
        ids, slots = (torch.cat((known[:begin], known[end:])) for known in (self.ids, self.slots))
        gone = self.slots[begin:end]
        return Placed(_stamp(), hand, ids, slots, torch.cat((self.free, gone)), (gone, torch.full_like(gone, -1)))

    def run(self, layout: Layout, least: int, most: int) -> tuple[int, int]:
        """Return the range of ``ids`` to empty next: whole blocks from the hand on, of at least ``least`` rows together where
        there are as many, and of at most ``most`` blocks."""
        begin = self._from(self.hand * layout.block_rows)
        begin = 0 if begin == len(self.ids) else begin
        return begin, self._whole(layout, begin, min(len(self.ids), begin + least), most)

    def within(self, layout: Layout, first: int, last: int, most: int) -> tuple[int, int]:
        """Return the range of ``ids`` to empty next so that no row from ``first`` to before ``last`` is in the buffer."""
        begin, end = self._from(first), self._from(last)
        return (begin, begin) if begin == end else (begin, self._whole(layout, begin, end, most))

    def _from(self, row: int) -> int:
        return int(torch.searchsorted(self.ids, row))

    def _whole(self, layout: Layout, begin: int, end: int, most: int) -> int:
        """Return the end of the last block that has a row of ``ids[begin:end]``, or of the ``most``-th."""
        blocks = torch.unique_consecutive(self.ids[begin:end].div(layout.block_rows, rounding_mode="floor"))[:most]
        return self._from((int(blocks[-1]) + 1) * layout.block_rows)


absent = Placed(None)
"""What is known where there is no head."""


def blank(layout: Layout) -> torch.Tensor:
    """Return the head of an empty buffer."""
    head = torch.full((FIRST + layout.buffer_rows,), -1, dtype=torch.int64, device="cpu")
    head[0], head[1] = _stamp(), 0
    return head


def stamp_at(name: str, layout: Layout, address: int, spec: TensorSpec) -> int:
    """Return the stamp of the head at ``address``. Raises MisuseError where that is no head of table ``name``."""
    if spec.dtype != "int64" or spec.shape != (FIRST + layout.buffer_rows,):
        raise MisuseError(f"{buffer_key(name)!r} is no buffer of table {name!r} as it was opened: open the table again")
    return ctypes.c_int64.from_address(address).value


def read_head(name: str, layout: Layout, address: int) -> Placed:
    """Return what the head at ``address`` says. Raises MisuseError where it cannot be so."""
    head = torch.empty(FIRST + layout.buffer_rows, dtype=torch.int64, device="cpu")
    ctypes.memmove(head.data_ptr(), address, head.nbytes)
    rows = head[FIRST:]
    used, free = (rows >= 0).nonzero()[:, 0], (rows < 0).nonzero()[:, 0]
    ids, order = rows[used].sort()
    stamp, hand = head[:FIRST].tolist()
    outside = len(ids) and int(ids[-1]) >= layout.rows
    if outside or not 0 <= hand <= layout.blocks or bool((ids[1:] == ids[:-1]).any()):
        raise MisuseError(f"{buffer_key(name)!r} is damaged: restore a commit that has the table, or delete the table")
    return Placed(stamp, hand, ids, used[order], free)


def _stamp() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 1
