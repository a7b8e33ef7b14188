"""Transfers that wait for their link: who is next, and who passes a link that is full one way."""

from __future__ import annotations

from tiered.traffic import Backlog
from tiered.types import Direction, Slot, Transfer, Urgency

BOTH = set(Direction)
_SLOT = Slot(0, 8)


def backlog(*words: str) -> Backlog:
    """Of transfers "up demand", "down writeback" …, tagged 1, 2, 3 …"""
    made = Backlog()
    for tag, (way, urgency) in enumerate((word.split() for word in words), 1):
        made.add(Transfer(tag, f"t{tag}", Direction[way.upper()], _SLOT, _SLOT, 8, Urgency[urgency.upper()]))
    return made


def drained(made: Backlog, ways: set[Direction] = BOTH) -> list[int]:
    found = []
    while (transfer := made.take(ways)) is not None:
        found.append(transfer.tag)
    return found


def test_the_urgent_first_then_what_goes_up_then_the_older() -> None:
    made = backlog("down writeback", "up prefetch", "down demand", "up demand", "down demand", "up demand")
    assert [transfer.tag for transfer in made] == [4, 6, 3, 5, 2, 1]
    assert (made.length, made.reads) == (6, 3)
    assert drained(made) == [4, 6, 3, 5, 2, 1]
    assert (made.length, made.reads) == (0, 0)


def test_what_goes_the_other_way_passes() -> None:
    made = backlog("down demand", "up prefetch", "down writeback")
    assert drained(made, {Direction.UP}) == [2]
    assert drained(made, {Direction.DOWN}) == [1, 3]


def test_what_a_link_refused_is_the_next_again() -> None:
    made = backlog("down demand", "down demand")
    refused = made.take(BOTH)
    assert refused is not None
    made.put_back(refused)
    assert drained(made) == [1, 2]


def test_promotion() -> None:
    made = backlog("up writeback", "up demand")
    first = next(transfer for transfer in made if transfer.tag == 1)
    assert made.promote(first, Urgency.PREFETCH)
    assert first.urgency is Urgency.PREFETCH
    assert (made.length, made.reads) == (2, 2)
    assert drained(made) == [2, 1]
    assert not made.promote(first, Urgency.DEMAND), "it waits here no longer"
