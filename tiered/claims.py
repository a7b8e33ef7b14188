"""What callers hold of the store: leases, views of slots, and room for a put. Each lasts as long as its token lives.

A Python signal handler runs in the main thread, between two bytecodes of whatever runs there, and may raise (Ctrl-C). So the
end of what a caller holds must not depend on code that has yet to run. It is the death of a token: dropping the last reference
deallocates the token, its weak reference calls ``deque.append``, and all of that happens inside the interpreter, where no
handler can enter. Whoever has the engine's lock next applies what ended. The same holds for finalizers in the garbage
collector, which may run in a thread that has the lock: they append, and take none.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from tiered.residency import Copy
from tiered.types import Access, Slot

__all__ = ["Claims", "Ended", "LeaseHold", "RoomHold", "Token", "View"]


class Token:
    """Held by whoever has a lease, a view or room. Nothing is in it."""

    __slots__ = ("__weakref__",)


Ended = weakref.ref[Token] | Callable[[], None]
"""A token that died, or work that was left for whoever has the lock next; the work may be done twice."""


class View(NamedTuple):
    """Somebody can reach the memory of ``copy``'s slot, and last used it on ``stream``."""

    holder: weakref.ref[Token]
    copy: Copy
    stream: object


class LeaseHold(Protocol):
    """A granted lease; ``stream`` is the one that its holder computes on."""

    holder: weakref.ref[Token] | None
    copies: list[Copy]
    access: Access
    stream: object


class RoomHold(Protocol):
    """A slot of ``tier`` that a put fills; ``stream`` is the one that it is filled on."""

    holder: weakref.ref[Token] | None
    tier: int
    slot: Slot | None
    stream: object


class Claims:
    """All holds, by the identity of their weak references. What is kept elsewhere of them (readers, writers, aliases, used
    slots) can be counted anew from here.

    ``ended`` is filled by dying tokens, in any thread; everything else is called under the engine's lock.
    """

    def __init__(self) -> None:
        self.ended: deque[Ended] = deque()
        self._leases: dict[int, LeaseHold] = {}
        self._views: dict[int, View] = {}
        self._rooms: dict[int, RoomHold] = {}

    def watch(self, token: Token) -> weakref.ref[Token]:
        """A reference that tells of the death of ``token``, whatever it comes to stand for."""
        return weakref.ref(token, self.ended.append)

    def lease(self, hold: LeaseHold) -> None:
        """A lease is granted."""
        if hold.holder is not None:
            self._leases[id(hold.holder)] = hold

    def room(self, hold: RoomHold) -> None:
        """Room is granted."""
        if hold.holder is not None:
            self._rooms[id(hold.holder)] = hold

    def view(self, copy: Copy, stream: object = None) -> Token:
        """The token of a view that somebody is about to make of ``copy``'s slot."""
        token = Token()
        holder = weakref.ref(token, self.ended.append)
        self._views[id(holder)] = View(holder, copy, stream)
        copy.aliases += 1
        return token

    def used_on(self, token: Token, stream: object) -> None:
        """The view of ``token`` is used on ``stream``. May be called without the lock."""
        for holder in weakref.getweakrefs(token):
            found = self._views.get(id(holder))
            if found is not None:
                self._views[id(holder)] = found._replace(stream=stream)

    def has_room(self, hold: RoomHold) -> bool:
        """Whether its slot is still its own."""
        return hold.holder is None or id(hold.holder) in self._rooms

    def take_room(self, hold: RoomHold) -> None:
        """Its slot is a tensor's from here on."""
        self._rooms.pop(id(hold.holder), None)

    def take(self, holder: weakref.ref[Token]) -> LeaseHold | RoomHold | View | None:
        """What ``holder`` stood for, which is over; None where that was never granted, or was taken before."""
        number = id(holder)
        return self._views.pop(number, None) or self._leases.pop(number, None) or self._rooms.pop(number, None)

    def forget_dead(self) -> list[LeaseHold | RoomHold | View]:
        """Take all whose token has died, in whatever order."""
        holders = [(number, hold.holder) for held in (self._views, self._leases, self._rooms) for number, hold in held.items()]
        dead = [holder for _, holder in holders if holder is not None and holder() is None]
        return [hold for hold in map(self.take, dead) if hold is not None]

    def leases(self) -> Iterator[LeaseHold]:
        return iter(self._leases.values())

    def views(self) -> Iterator[View]:
        return iter(self._views.values())

    def rooms(self) -> Iterator[RoomHold]:
        return iter(self._rooms.values())
