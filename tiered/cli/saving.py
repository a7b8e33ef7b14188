"""Commits of a training that ``tiered train`` makes, and what is in them beside the state: how to go on with it."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from tiered import zero
from tiered.cli.train import Options

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tiered.cli.course import Course
    from tiered.cli.peers import Peers
    from tiered.cli.text import Text
    from tiered.zero import AdamW

__all__ = ["Saving"]

NOT_KEPT = {"folder", "existing", "prefetch", "json", "timeline", "plot", "timeline_steps"}
"""Options that are about one process."""


class Saving:
    """At most one commit is open. ``losses`` is the caller's, of every step since training began. With several ranks all wait
    for a commit, which is one only when all have it."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: AdamW,
        course: Course,
        options: Options,
        text: Text,
        losses: list[float],
        peers: Peers,
    ) -> None:
        self._model, self._optimizer, self._course, self._losses = model, optimizer, course, losses
        self._options, self._text_bytes, self._ranks = options, text.nbytes, peers.launched.ranks
        self._kept = {name: value for name, value in asdict(options).items() if name not in NOT_KEPT}
        if options.text is not None:
            self._kept["text"] = os.path.abspath(options.text)
        self._open: Future[int] | None = None
        self._step = course.done

    def stepped(self) -> None:
        """After each step: begin a commit where one is due. Raises what an earlier one failed with."""
        if self._open is not None and self._open.done():
            self._settle()
        every = self._options.commit_every
        if every is None or self._course.done % every:
            return
        if self._ranks > 1:
            self.commit()
        else:
            self._settle()
            self._open = zero.commit_async(self._model, self._optimizer, **self._what())
            self._step = self._course.done

    def finish(self) -> None:
        """When it returns, the step that training is at is durable. Raises what ``zero.commit`` raises."""
        self._settle()
        if self._step != self._course.done:
            self.commit()

    def commit(self) -> int:
        """All as it is now; returns the generation."""
        self._settle()
        generation = zero.commit(self._model, self._optimizer, **self._what())
        self._step = self._course.done
        return generation

    def _settle(self) -> None:
        if self._open is not None:
            future, self._open = self._open, None
            future.result()

    def _what(self) -> dict[str, Any]:
        return {
            "scheduler": self._course.scheduler,
            "data": self._course.data,
            "extra": {
                "command": "train",
                "options": self._kept,
                "text_bytes": self._text_bytes,
                "step": self._course.done,
                "seconds": self._course.schedule.seconds,
                "losses": torch.tensor(self._losses, dtype=torch.float64),
            },
            "meta": {
                "command": "train",
                "step": self._course.done,
                "loss": self._losses[-1],
                "seed": self._options.seed,
                "opening": {name: self._kept[name] for name in ("dram", "hbm", "device", "backend", "commit_every")},
            },
        }


