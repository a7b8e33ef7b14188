"""What torchrun tells the processes that it starts, in their environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Launched", "launched"]


@dataclass(frozen=True)
class Launched:
    """``here``: ranks on this node, of which this is number ``local``; ``may_restart``: how often torchrun starts all of them
    again, when one fails."""

    rank: int = 0
    ranks: int = 1
    here: int = 1
    restarts: int = 0
    may_restart: int = 0
    local: int = 0

    @property
    def command(self) -> list[str]:
        """What comes before the arguments of ``tiered``, to start as many again."""
        if self.ranks == 1:
            return ["tiered"]
        nodes = ["--nnodes", str(self.ranks // self.here)] if self.here < self.ranks else []
        return ["torchrun", *nodes, "--nproc-per-node", str(self.here), "-m", "tiered"]


def launched() -> Launched:
    """One rank where torchrun did not start this process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Launched()
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    rank, ranks, here, restarts, may_restart = (int(os.environ.get(name, 0)) for name in names)
    return Launched(rank, ranks, max(1, here), restarts, may_restart, int(os.environ.get("LOCAL_RANK", 0)))
