"""What callers hold: leases, views, rooms and temporary tensors, each as long as a token.

A Python signal handler runs in the main thread, between two bytecodes of whatever runs there, and may raise (Ctrl-C). So the
end of what a caller holds must not depend on code that has yet to run. It is the death of a token: dropping the last reference
deallocates the token, its weak reference calls ``deque.append``, and all of that happens inside the interpreter, where no
handler can enter. Whoever has the engine's lock next applies what ended. The same holds for finalizers in the garbage
collector, which may run in a thread that has the lock: they append, and take no lock.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator

from tiered.engine.residency import Copy
from tiered.types import Access, Key, Slot

__all__ = ["Claims", "Ended", "Hold", "Holder", "LeaseHold", "RoomHold", "TensorHold", "Token", "View"]


class Token:
    """Held by whoever has a lease, a view or room. The token is empty; its death is what counts."""

    __slots__ = ("__weakref__",)


Holder = weakref.ref[Token]
Ended = Holder | Callable[[], None]
"""A token that died, or work that was left for whoever has the lock next; the work may be done twice."""

View = tuple[Holder, Copy, object]
"""Somebody can reach the memory of the copy's slot, and last used it on the stream that comes third. (A plain tuple, because
one is made with every lease.)"""


class LeaseHold:
    """A granted lease; ``stream`` is the stream that its holder computes on, ``misused`` a key that was written to under a READ
    lease."""

    holder: Holder | None
    copies: list[Copy]
    access: Access
    stream: object = None
    misused: Key | None = None


class RoomHold:
    """A slot of ``tier`` that a put fills; ``stream`` is the stream that fills the slot."""

    holder: Holder | None
    tier: int
    slot: Slot | None = None
    stream: object = None


class TensorHold:
    """A temporary tensor, which is deleted when its holder dies. ``tensor_id`` tells it from others that have its key later."""

    __slots__ = ("holder", "key", "tensor_id")

    def __init__(self, holder: Holder, key: Key, tensor_id: int) -> None:
        self.holder, self.key, self.tensor_id = holder, key, tensor_id


Hold = LeaseHold | RoomHold | TensorHold | View


class Claims:
    """All ``holds``, by the identity of their weak references. Readers, writers, aliases and used slots can be counted anew
    from them.

    ``ended`` is filled by dying tokens, in any thread; everything else is used under the engine's lock.
    """

    def __init__(self) -> None:
        self.ended: deque[Ended] = deque()
        self.holds: dict[int, Hold] = {}

    def watch(self, token: Token) -> Holder:
        """Return a reference that reports the death of ``token``, whatever the token comes to stand for."""
        return weakref.ref(token, self.ended.append)

    def grant(self, hold: LeaseHold | RoomHold | TensorHold) -> None:
        """Record ``hold`` as its holder's."""
        if hold.holder is not None:
            self.holds[id(hold.holder)] = hold

    def view(self, copy: Copy, stream: object = None) -> Token:
        """Return the token of a view that somebody is about to make of ``copy``'s slot."""
        token = Token()
        holder = weakref.ref(token, self.ended.append)
        self.holds[id(holder)] = (holder, copy, stream)
        copy.aliases += 1
        return token

    def used_on(self, token: Token, stream: object) -> None:
        """Record that the view of ``token`` is used on ``stream``. May be called without the lock."""
        for holder in weakref.getweakrefs(token):
            found = self.holds.get(id(holder))
            if isinstance(found, tuple):
                self.holds[id(holder)] = (holder, found[1], stream)

    def has(self, hold: RoomHold) -> bool:
        """Whether the slot of ``hold`` still belongs to its holder."""
        return hold.holder is None or id(hold.holder) in self.holds

    def take(self, holder: Holder | None) -> Hold | None:
        """Remove and return the hold of ``holder``; None where it was never granted, or was taken before."""
        return self.holds.pop(id(holder), None)

    def drop_dead(self) -> None:
        """Forget all holds whose token has died."""
        for hold in self:
            holder = hold[0] if isinstance(hold, tuple) else hold.holder
            if holder is not None and holder() is None:
                self.take(holder)

    def __iter__(self) -> Iterator[Hold]:
        return iter(list(self.holds.values()))
