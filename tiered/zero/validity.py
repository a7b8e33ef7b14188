"""Whether what was committed of a model beside its tensors still fits them."""

from __future__ import annotations

from tiered import TieredStore

__all__ = ["Validity"]


class Validity:
    """The record of a model's last commit is deleted before any of its tensors changes.

    So a commit of the store that knows nothing of the model never pairs an old record with newer tensors.
    """

    def __init__(self, store: TieredStore, name: str) -> None:
        self.key = f"{name}/checkpoint"
        self._store = store

    def end(self) -> None:
        """Something is about to change."""
        if self.key in self._store:
            self._store.delete(self.key)
