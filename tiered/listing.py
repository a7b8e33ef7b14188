"""What is in a store's folder, from its manifests alone: also while a job has the store open. Nothing is written or locked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiered import generations
from tiered.errors import ManifestError
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
    there = generations.present(folder, generation)
    listed, chosen, different, error = [], None, {}, None
    for number in there:
        try:
            manifest = generations.load(folder, number)
        except ManifestError as problem:
            if number not in generations.generations(folder):
                continue  # a job that goes on has dropped it meanwhile
            listed.append(ListedGeneration(number, {}, 0, 0, str(problem)))
            error = problem
            if number == generation:
                raise
            continue
        assert manifest is not None
        sizes = _sizes(manifest)
        listed.append(ListedGeneration(number, manifest.meta, len(manifest.tensors), sum(sizes.values())))
        different.update(sizes)
        if generation in (None, number):
            chosen = manifest
    if chosen is None:
        raise error or ManifestError(f"{folder} changes too fast to be listed: a job commits there; try again")
    found = [ListedTensor(record.key, record.spec, record.generation) for record in chosen.tensors]
    ordered = tuple(sorted(found, key=lambda one: one.key))
    return Listing(str(folder), tuple(listed), chosen.generation, ordered, sum(different.values()))


def _sizes(manifest: Manifest) -> dict[tuple[int, int], int]:
    """Bytes of each tensor as it was written once."""
    return {(record.tensor_id, record.generation): record.spec.nbytes for record in manifest.tensors}
