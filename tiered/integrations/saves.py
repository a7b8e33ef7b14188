"""Connect files that a training library saves with commits of a store.

A library saves a checkpoint as a file or a folder, and reads it back later, perhaps after others. The tensors of a paged model
stay in its store, where a commit has them, so what the library saves has only a ``SavedCommit``: the generation of that commit,
and a mark that is also in the commit's meta. Of two training runs in one folder, or of a store that was made anew, the numbers
may be the same, but not the marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tiered import zero
from tiered.errors import MisuseError
from tiered.store import TieredStore
from tiered.store.at_rest import listing
from tiered.zero.checkpoint.checkpoint import Training, commit_with, extra_of
from tiered.zero.paging.pager import pager_of, pager_of_parameter

__all__ = ["MARK", "SavedCommit", "is_paged", "marks_of", "restore", "save", "store_of"]

MARK = "tiered.saved"
"""Where a commit's meta, and what is committed of a model, has the mark."""

Pair = tuple[nn.Module, "zero.Optimizer | None"]
"""A paged model, and its optimizer where there is one."""


@dataclass(frozen=True)
class SavedCommit:
    """The commit that a library's file refers to. ``generations``: of each rank's store."""

    mark: str
    generations: tuple[int, ...]

    @staticmethod
    def of(found: Any, where: str) -> SavedCommit:
        """Return what a file has, which may be damaged: ``where`` names it in the MisuseError."""
        mark = found.get("mark") if isinstance(found, dict) else None
        generations = found.get("generations") if isinstance(found, dict) else None
        if not isinstance(mark, str) or not isinstance(generations, list | tuple):
            raise MisuseError(f"{where} does not say which commit it refers to: it is damaged, or of another version")
        if not generations or not all(type(one) is int for one in generations):
            raise MisuseError(f"{where} has {generations!r:.100} for the generations of a commit: it is damaged")
        return SavedCommit(mark, tuple(generations))

    def written(self) -> dict[str, Any]:
        """Return what JSON can write, and ``of`` reads."""
        return {"mark": self.mark, "generations": list(self.generations)}


def is_paged(model: nn.Module) -> bool:
    """Return whether the values of ``model`` are in a store. Raises MisuseError for a model that only has one in it."""
    paged = {name: parameter for name, parameter in model.named_parameters() if hasattr(parameter, "_tiered")}
    for name, parameter in paged.items():
        if pager_of_parameter(parameter).model is model:
            break
        raise MisuseError(
            f"parameter {name!r} is paged as part of another module than this {type(model).__name__}: page the model that "
            "the library is given, as a whole"
        )
    return bool(paged)


def store_of(model: nn.Module) -> TieredStore:
    """Return the store of a paged model."""
    return pager_of(model).store


def marks_of(store: TieredStore) -> dict[int, str]:
    """Return the generations that ``store`` keeps, oldest first, each with the mark in its meta; empty where it has none."""
    kept = set(store.generations)
    there = listing(store.folder).generations if kept else ()
    return {one.number: str(one.meta.get(MARK, "")) for one in there if one.number in kept}


def save(pairs: Sequence[Pair], mark: str) -> int:
    """Commit all models of one store under ``mark``, and return the generation. Where an optimizer is None, its library keeps
    the steps and param groups in a file of its own. Raises as ``zero.commit``."""
    for model, optimizer in pairs:
        meta = {**store_of(model).meta, MARK: mark}
        generation = commit_with(model, Training(optimizer), {MARK: mark}, meta, keeps_all=False)
    return generation


def restore(pairs: Sequence[Pair], saved: SavedCommit, where: str, *, rank: int = 0) -> None:
    """Go back to the commit that ``saved`` names. ``where`` is what errors call the file that has it.

    That is a commit of the store as it is, older ones included that it keeps; or the one that ``zero.page(source=)`` took over
    from another store. Raises MisuseError, with nothing changed, where it is neither, and as ``zero.rollback``.
    """
    store = store_of(pairs[0][0])
    generation = saved.generations[rank] if rank < len(saved.generations) else 0
    kept = marks_of(store) if generation else {}
    if kept.get(generation) == saved.mark:
        for model, optimizer in pairs:
            zero.rollback(model, optimizer, generation=generation)
        return
    for model, _ in pairs:
        if f"{pager_of(model).name}/checkpoint" not in store or (extra_of(store, pager_of(model).name) or {}).get(
            MARK
        ) != saved.mark:
            have = ", ".join(map(str, kept)) or "none of this number of ranks"
            raise MisuseError(
                f"{where} refers to generation {generation or saved.generations[0]} of a store, which {store} does not have "
                f"(it keeps {have}): open the store that was saved to, with keep= as large as the number of saves to go back to"
            )
    for model, optimizer in pairs:
        zero.resume(model, optimizer)
