"""Say which values of parameters in memory the optimizer states in a store belong to.

A commit of the store has the states; the values are the user's to save and to load. So each commit has a digest of each
parameter's values besides, as ``NAME/values``: as of the commit, because values may change between steps, and are what the next
step begins with. It is there as long as the states are those of the commit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tiered.errors import ManifestError
from tiered.store import TieredStore
from tiered.tensors.digests import digest_of
from tiered.types import Owner
from tiered.zero.optimizers.resident_shard import LocalShard

__all__ = ["Belonging"]

DIGEST_BYTES = 16


class Belonging:
    """What states under ``name`` belong to. ``found``: they were in the store before their optimizer.

    ``noted``, a method of the optimizer, is called before each commit, and calls ``note``. The store refers to it from a change
    of the states to the next commit, which so has the values of an optimizer, too, that nobody refers to any more. At other
    times it does so weakly.
    """

    def __init__(self, store: TieredStore, owner: Owner, noted: Callable[[], None], *, found: str) -> None:
        self._store, self._owner, self._name = store, owner, owner.name
        self.key, self._noted = f"{owner.name}/values", weakref.WeakMethod(noted)
        self._found = found == "resume"
        self._known: bytes | None = None
        """Digests that were compared or written here, of the states as they are; None: the states have changed since."""

    def begin(self) -> None:
        """Take the name, once the optimizer is made."""
        noted = self._noted
        before = self._store.before_commits(self._name, lambda _: _call(noted))
        if self._found and before is not None and self.key not in self._store:
            before(False)  # of the optimizer in this process whose states these are, where it made a step since the last commit

    def change(self) -> None:
        """Note that the states change from here on, with the values that the parameters have."""
        if self.key in self._store:
            self._store.delete(self.key, owner=self._owner)
        self._known, self._found = None, False
        noted = self._noted()
        self._store.before_commits(self._name, None if noted is None else lambda _: noted())

    def note(self, parameters: Sequence[LocalShard]) -> None:
        """Write the digests for a commit. States that were found, or rolled back, stay with those that they belong to."""
        there = self._read()
        if self._found if there is None else there != self._known:
            return
        values = [local.part() for local in parameters]
        if any(part.is_meta for part in values):  # the model has no values any more
            if there is not None:
                self._store.delete(self.key, owner=self._owner)
            self._known = None
            return
        now = b"".join(bytes.fromhex(digest_of(part)) for part in values)
        if now != there:
            written = torch.frombuffer(bytearray(now), dtype=torch.uint8) if now else _NOTHING
            self._store.put(self.key, written, owner=self._owner)
        self._known = now
        self.begin()

    def problem(self, parameters: Sequence[LocalShard], steps: Sequence[int]) -> str:
        """Return, in words, why the states are not of the values that the parameters have; empty where they are. Compares
        where the states were found, or rolled back: what changes afterwards, changes between steps. Raises ManifestError."""
        there = self._read()
        if there is None and self._found and any(steps):
            return (
                f"nothing in {self._store} says which values the states under {self._name!r} belong to: they were written by "
                "an earlier version, or their commit had no parameters; begin anew with existing='overwrite'"
            )
        if there is None or there == self._known:
            return ""
        now = []
        for number, (local, step) in enumerate(zip(parameters, steps, strict=True)):
            mine = bytes.fromhex(digest_of(local.part()))
            kept = there[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            if step and kept != mine:
                return (
                    f"{local.name} has other values than those that the states under {self._name!r} in {self._store} belong "
                    "to: load the values that were saved with this commit of the store, or begin anew with "
                    "existing='overwrite'"
                )
            now.append(mine)
        self._known, self._found = there, False
        return ""

    def _read(self) -> bytes | None:
        if self.key not in self._store:
            return None
        spec = self._store.spec(self.key)
        if spec.dtype != "uint8" or len(spec.shape) != 1 or spec.nbytes % DIGEST_BYTES:
            raise ManifestError(f"{self.key!r} is damaged: {spec.dtype} of shape {list(spec.shape)} are no digests of values")
        return self._store.get(self.key).numpy().tobytes()


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _call(method: weakref.WeakMethod[Any]) -> None:
    found = method()
    if found is not None:
        found()
