"""Transfers that wait for their link: who is next, and who passes a link that is full one way."""

from __future__ import annotations

from collections.abc import Mapping

from tiered.engine.residency import Directory
from tiered.engine.transfers import TransferQueue, TransferQueues
from tiered.types import Direction, Slot, TensorSpec, Transfer, Urgency

NOTHING: dict[Direction, Urgency] = {}
_SLOT = Slot(0, 8)


def backlog(*words: str) -> TransferQueue:
    """Of transfers "up demand", "down writeback" …, tagged 1, 2, 3 …"""
    made = TransferQueue()
    for tag, (way, urgency) in enumerate((word.split() for word in words), 1):
        made.add(Transfer(tag, f"t{tag}", Direction[way.upper()], _SLOT, _SLOT, 8, Urgency[urgency.upper()]))
    return made


def drained(made: TransferQueue, refused: Mapping[Direction, Urgency] = NOTHING) -> list[int]:
    found = []
    while (transfer := made.take(refused)) is not None:
        found.append(transfer.tag)
    return found


def test_the_urgent_first_then_what_goes_up_then_the_older() -> None:
    made = backlog("down writeback", "up prefetch", "down demand", "up demand", "down demand", "up demand")
    assert [transfer.tag for transfer in made] == [4, 6, 3, 5, 2, 1]
    assert (made.length, made.read_bytes) == (6, 24)
    assert drained(made) == [4, 6, 3, 5, 2, 1]
    assert (made.length, made.read_bytes) == (0, 0)


def test_what_goes_the_other_way_passes() -> None:
    made = backlog("down demand", "up prefetch", "down writeback")
    assert drained(made, {Direction.DOWN: Urgency.DEMAND}) == [2]
    assert drained(made) == [1, 3]


def test_what_is_more_urgent_passes_what_was_refused() -> None:
    made = backlog("up writeback", "up prefetch", "up demand")
    assert drained(made, {Direction.UP: Urgency.PREFETCH}) == [3]
    assert drained(made, {Direction.UP: Urgency.WRITEBACK}) == [2]


def test_a_link_is_asked_again_when_something_ended_there() -> None:
    traffic = TransferQueues(2)
    entry = Directory(3, lambda copy: None).put("a", TensorSpec("uint8", (8,), 1), 0, _SLOT)
    for tag in (1, 2):
        traffic.add(0, entry, Transfer(tag, "a", Direction.DOWN, _SLOT, _SLOT, 8, Urgency.DEMAND))
    assert traffic.take(0, 0.0) is not None
    refused = traffic.take(0, 0.0)
    assert refused is not None
    traffic.put_back(0, refused)
    assert traffic.take(0, 0.0) is None
    traffic.end(0, 1, 0.0, None)
    assert traffic.take(0, 0.0) is refused
    traffic.put_back(0, refused)
    traffic.idle(0)
    assert traffic.take(0, 0.0) is refused


def test_what_a_link_refused_is_the_next_again() -> None:
    made = backlog("down demand", "down demand")
    refused = made.take({})
    assert refused is not None
    made.put_back(refused)
    assert drained(made) == [1, 2]


def test_promotion() -> None:
    made = backlog("up writeback", "up demand")
    first = next(transfer for transfer in made if transfer.tag == 1)
    assert made.promote(first, Urgency.PREFETCH)
    assert first.urgency is Urgency.PREFETCH
    assert (made.length, made.read_bytes) == (2, 16)
    assert drained(made) == [2, 1]
    assert not made.promote(first, Urgency.DEMAND), "it waits here no longer"
