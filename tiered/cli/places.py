"""Where a training goes on that any number of ranks began, and where its stores are then."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tiered import MisuseError
from tiered.cli.peers import Peers
from tiered.zero.rank_stores import Joint, folder_of, has_commit, in_all, joints, newest_set

__all__ = ["Place", "find", "refuse_others"]


@dataclass(frozen=True)
class Place:
    """``opened``: what ``peers.open`` is given. ``newest``: a store with the newest commit. ``source``: what another number of
    ranks committed there is taken over from, as of ``generation`` of ``newest``; None where these stores have it."""

    opened: str
    newest: str
    source: str | None = None
    generation: int | None = None


class _Seen(msgspec.Struct, forbid_unknown_fields=True):
    """What a rank finds: number and ranks of the newest commit, whether one process committed there, and the commits of all
    ranks that are in its own store."""

    newest: tuple[int, int]
    plain: bool
    mine: list[tuple[int, str, int]]


def find(folder: str, peers: Peers) -> Place | None:
    """From the newest commit in ``folder``, whoever made it: one process in ``folder`` itself, or N ranks in
    ``folder/rank-R-of-N``. None where there is none. All ranks call it.

    Raises MisuseError where other ranks' stores have it and some rank here cannot see all of them.
    """
    ranks, rank = peers.launched.ranks, peers.launched.rank
    own = str(folder_of(folder, rank, ranks))
    with peers.together():
        seen = newest_set(folder, apart=ranks)
        plain = _is_store(folder)
        mine = joints(Path(own)) if ranks > 1 else []
    if ranks == 1:
        if seen is None:
            return Place(folder, folder) if plain else None
        if seen.ranks == 1:
            return Place(own, own)
        return Place(own, str(seen.folders[0]), folder, seen.joints[0].generation)
    everybody = peers.said(
        {
            "newest": [0, 0] if seen is None else [seen.number, seen.ranks],
            "plain": plain,
            "mine": [[joint.number, joint.name, joint.generation] for joint in mine],
        },
        _Seen,
    )
    common = in_all([[Joint(*joint) for joint in said.mine] for said in everybody])
    newest = max(said.newest for said in everybody)
    if common is not None and common[0].number >= newest[0]:
        return Place(folder, own)
    if newest[0]:
        blind = [str(number) for number, said in enumerate(everybody) if said.newest != newest]
        if blind or seen is None:
            raise MisuseError(
                f"the newest commit in {folder} is of {newest[1]} ranks, and rank {', '.join(blind)} does not see the stores "
                f"of all of them: go on with {newest[1]} ranks, or copy these stores to where all ranks read them"
            )
        return Place(folder, str(seen.folders[0]), folder, seen.joints[0].generation)
    return Place(folder, folder, folder) if all(said.plain for said in everybody) else None


def refuse_others(folder: str, ranks: int) -> None:
    """Raises MisuseError where a training that begins in ``folder`` would be one of two: another number of ranks has one, or
    one process that took it over from several."""
    seen = newest_set(folder)
    if seen is not None and (ranks == 1 or seen.ranks != ranks):
        who = f"of {seen.ranks} ranks" if seen.ranks > 1 else "of one process"
    elif ranks > 1 and _is_store(folder):
        who = "of one process"
    else:
        return
    raise MisuseError(
        f"{folder} holds the training {who} already: go on with it with --resume, name another --dir, or delete it first"
    )


def _is_store(folder: str) -> bool:
    return has_commit(Path(os.path.expanduser(folder)))
