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
        self._changed_in: int | None = None

    @property
    def changed(self) -> bool:
        """Whether anything changed since the last commit."""
        return self._changed_in == self._store.generation

    def note(self) -> None:
        """Something that is in no tensor is about to change."""
        self._changed_in = self._store.generation

    def unchanged(self) -> None:
        """All is as in the last commit."""
        self._changed_in = None

    def end(self) -> None:
        """Something is about to change."""
        self.note()
        if self.key in self._store:
            self._store.delete(self.key)
