"""Checkpoints by their tags: a folder for each, whose one file names the commit that is meant.

``save_dir/tag/tiered.json`` has the generation of each rank's store, and a mark that is also in the commit's meta. The tensors
stay in the store. ``save_dir/latest`` has the tag of the last one. A commit is kept as long as the folder of its tag is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from tiered.errors import MisuseError
from tiered.format.foreign.documents import json_of, text_of
from tiered.store import TieredStore
from tiered.store.at_rest import listing
from tiered.types import Owner

__all__ = [
    "BUDGET",
    "FILE",
    "LATEST",
    "META",
    "MOST_TEXT",
    "Tagged",
    "budget_of",
    "commit_of",
    "found",
    "keep",
    "latest",
    "marks_of",
    "refuse_tag",
    "write",
]

FILE, LATEST = "tiered.json", "latest"
MOST_TEXT = 1 << 20
"""Bytes of each of these files: many times what the generations of thousands of ranks take."""
MOST_NAME = 255
"""Bytes of a folder's name on Linux."""
META = "tiered.tag"
"""Where the meta of a commit says its tag, its folder, and its mark."""
BUDGET = "tiered.budget"
"""Where the meta of a commit says by which budgets the model was divided."""


class Tagged(msgspec.Struct, frozen=True):
    """The commit that a tag names, as its file says it: ``generations`` of each rank's store."""

    mark: str
    generations: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    store: str


def refuse_tag(tag: str) -> None:
    """Raise MisuseError for a tag that is not the name of a folder, or that ``latest`` would not return as it is."""
    try:
        nbytes = len(tag.encode())
    except UnicodeEncodeError:
        raise MisuseError(f"the tag {tag!r:.100} is no text that a file can have: leave surrogates out") from None
    if not tag or tag in (".", "..", LATEST, f"{LATEST}.tmp") or "/" in tag or "\0" in tag:
        raise MisuseError(f"the tag {tag!r:.100} is not a name for a folder: leave slashes out")
    if tag != tag.strip():
        raise MisuseError(f"the tag {tag!r:.100} begins or ends with a space or a line break: leave those out")
    if nbytes > MOST_NAME:
        raise MisuseError(f"the tag {tag!r:.40}... has {nbytes} bytes, and the name of a folder at most {MOST_NAME}")


def write(folder: Path, tag: str, tagged: Tagged, *, as_latest: bool) -> None:
    """Write the file of a tag, and that of the last one; each is there as a whole or not at all, also after a power loss."""
    (folder / tag).mkdir(parents=True, exist_ok=True)
    _replace(folder / tag / FILE, json.dumps(msgspec.to_builtins(tagged)))
    if as_latest:
        _replace(folder / LATEST, tag)


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.tmp")
    with part.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    opened = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def latest(folder: Path) -> str | None:
    """Return the tag of the last checkpoint in a folder; None where there is none."""
    try:
        return text_of(folder / LATEST, MOST_TEXT).strip()
    except FileNotFoundError:
        return None


def found(folder: Path, tag: str) -> Tagged | None:
    """Return the commit that a tag names; None where there is no such folder. Raises MisuseError for one that is damaged, or
    another folder."""
    if not (folder / tag).is_dir():
        return None
    path = folder / tag / FILE
    if not path.exists():
        raise MisuseError(f"{folder / tag} has no {FILE}: save_checkpoint did not come to its end, or it is another folder")
    try:
        return msgspec.convert(json_of(path, MOST_TEXT), Tagged)
    except msgspec.ValidationError:
        raise MisuseError(f"{path} is damaged: it does not say which commit it names") from None


def marks_of(store: TieredStore) -> list[str]:
    """Return the marks of the store's commits whose tags still name them. A tag whose folder cannot be seen counts as one."""
    return sorted({mark for _, said in _tagged_commits(store) if _is_there(said) and isinstance(mark := said["mark"], str)})


def keep(store: TieredStore, marks: Collection[str]) -> None:
    """Have the store keep the commits with these marks, however old they are, beside what it keeps for others."""
    store.retain(owner=Owner("engine", META), also=[number for number, said in _tagged_commits(store) if said["mark"] in marks])


def _tagged_commits(store: TieredStore) -> list[tuple[int, Mapping[str, object]]]:
    """Return the commits that were made for a tag: their generations, and what their meta says of it."""
    kept = set(store.generations)
    there = [(one.number, one.meta.get(META)) for one in (listing(store.folder).generations if kept else ())]
    return [
        (number, said)
        for number, said in there
        if number in kept
        and isinstance(said, Mapping)
        and all(isinstance(said.get(name), str) for name in ("folder", "tag", "mark"))
    ]


def budget_of(store: TieredStore) -> dict[str, int]:
    """Return the bytes of each tier in memory."""
    return {tier.name: tier.capacity for tier in store.statistics().tiers if tier.name != "nvme"}


def commit_of(store: TieredStore, generation: int) -> Mapping[str, object]:
    """Return the meta of a generation; an empty one where the store does not keep it."""
    if generation not in store.generations:
        return {}
    return next((one.meta for one in listing(store.folder).generations if one.number == generation), {})


def _is_there(said: Mapping[str, object]) -> bool:
    """Return whether the tag that a commit's meta names still names it."""
    folder = Path(str(said["folder"]))
    if not folder.is_dir():
        return True
    try:
        named = found(folder, str(said["tag"]))
    except MisuseError:
        return False
    return named is not None and named.mark == said["mark"]
