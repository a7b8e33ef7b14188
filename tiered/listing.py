"""What is in a store's folder, from its manifests alone: also while a job has the store open. Nothing is written or locked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiered import generations
from tiered.errors import ManifestError
from tiered.folder import OpenFolder
from tiered.manifest import Manifest
from tiered.types import Key, TensorSpec

__all__ = ["ListedGeneration", "ListedTensor", "Listing", "listing"]


@dataclass(frozen=True)
class ListedTensor:
    """One tensor of a generation. ``written``: the generation in which its bytes were written."""

    key: Key
    spec: TensorSpec
    written: int


@dataclass(frozen=True)
class ListedGeneration:
    """One commit: its ``meta``, how many ``tensors`` it has, of ``nbytes`` together. ``problem``: why its manifest cannot be
    read; then it has none of these."""

    number: int
    meta: Mapping[str, object]
    tensors: int
    nbytes: int
    problem: str | None = None


@dataclass(frozen=True)
class Listing:
    """``generations``, oldest first; ``tensors`` of generation ``number``, by key; ``nbytes``: of the tensors of all of them,
    what several share counted once."""

    folder: str
    generations: tuple[ListedGeneration, ...]
    number: int
    tensors: tuple[ListedTensor, ...]
    nbytes: int


def listing(path: str | os.PathLike[str], generation: int | None = None) -> Listing:
    """Of the store in folder ``path``, with the tensors of ``generation`` (default: the newest one whose manifest can be read).

    Raises MisuseError (no store with a commit there, no such generation), ManifestError (that one is damaged, or all are).
    """
    folder = Path(os.path.expanduser(path))
    with contextlib.closing(generations.folder_of(folder)) as opened:
        for _ in range(generations.LISTINGS):
            found = _listed(opened, generation)
            if found is not None:
                return found
    raise ManifestError(f"{folder} changes too fast to be listed: a job commits there; try again")


def _listed(folder: OpenFolder, generation: int | None) -> Listing | None:
    """None where a job that goes on has dropped the newest one meanwhile: there is a newer one.

    The newest is read first. Older ones are dropped before it, so if it is still there, none that was newer was there when the
    folder was listed: no listing goes back behind one that came before it.
    """
    there = generations.present(folder, generation)
    listed, chosen, different, error = [], None, {}, None
    for number in reversed(there):
        try:
            manifest = generations.load(folder, number)
        except ManifestError as problem:
            if number not in generations.generations(folder):
                if number == there[-1]:
                    return None
                continue
            listed.append(ListedGeneration(number, {}, 0, 0, str(problem)))
            error = error or problem
            if number == generation:
                raise
            continue
        assert manifest is not None
        sizes = _sizes(manifest)
        listed.append(ListedGeneration(number, manifest.meta, len(manifest.tensors), sum(sizes.values())))
        different.update(sizes)
        if generation == number or (generation is None and chosen is None):
            chosen = manifest
    if chosen is None:
        if error is not None and generation is None:
            raise error
        return None
    found = [ListedTensor(record.key, record.spec, record.generation) for record in chosen.tensors]
    ordered = tuple(sorted(found, key=lambda one: one.key))
    return Listing(str(folder), tuple(reversed(listed)), chosen.generation, ordered, sum(different.values()))


def _sizes(manifest: Manifest) -> dict[tuple[int, int], int]:
    """Bytes of each tensor as it was written once."""
    return {(record.tensor_id, record.generation): record.spec.nbytes for record in manifest.tensors}
