"""torchrun whose ranks are forked from where torch is imported already: ``python -m tests.cli.train.launched``, which
``tests.programs`` forks as well. All else is torchrun's own."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import programs

__all__ = ["PIDS"]

PIDS = "TIERED_TEST_PIDS"
"""The variable that may name a folder; in it, a file by the name of each rank has the process's number."""


class Rank(programs.Popen):
    """Without what would have to be said before an interpreter begins: ``-u``, which the command line does not need, and NCCL's
    variables."""

    def __init__(self, args: tuple[str, ...], *, env: dict[str, str], **more: Any) -> None:
        env = {name: value for name, value in env.items() if not name.startswith("TORCH_NCCL_")}
        super().__init__([word for word in args if word != "-u"], env=env, **more)
        if folder := os.environ.get(PIDS):
            file = Path(folder) / env["RANK"]
            file.with_suffix(".new").write_text(str(self.pid))
            file.with_suffix(".new").replace(file)


if __name__ == "__main__":
    programs.fork_from_here()

    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.run import main

    subprocess_handler.Popen = Rank  # type: ignore[assignment,misc]
    subprocess_handler.subprocess = SimpleNamespace(Popen=Rank)  # type: ignore[attr-defined]  # where torch 2.6 takes it from
    main()
