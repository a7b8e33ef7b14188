"""A training under way, on a store or in memory: an ordinary PyTorch loop that can be left after, or within, any step.

Commits of a training that ``tiered train`` makes, and what is in them beside the state: how to go on with it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from tiered import zero
from tiered.cli.train.command import Options
from tiered.cli.train.ranks import One, Peers
from tiered.errors import MisuseError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tiered.cli.train.model import Text
    from tiered.cli.train.ranks import Peers
    from tiered.zero import AdamW

__all__ = ["Course", "Result", "Saving", "Schedule"]

@dataclass(frozen=True)
class Result:
    """One step. ``losses``: of each batch; ``norm``: of the gradients before clipping, None without clipping."""

    step: int
    losses: tuple[float, ...]
    norm: float | None

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


class Schedule:
    """How far training is, and from that the learning rate: a linear warm-up, then a cosine down to a tenth.

    ``seconds`` of it went by in earlier processes. ``clock``: in seconds.
    """

    def __init__(self, options: Options, seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._warmup = options.steps, options.warmup
        self._seconds = None if options.minutes is None else options.minutes * 60
        self._clock = clock
        self._began = clock() - seconds

    @property
    def seconds(self) -> float:
        """Since training began, without the time between two processes."""
        return self._clock() - self._began

    def share(self, step: int) -> float:
        """Of the training, after ``step`` steps; 1 at its end."""
        by_steps = step / self._steps if self._steps else 0.0
        by_time = self.seconds / self._seconds if self._seconds else 0.0
        return min(1.0, max(by_steps, by_time))

    def factor(self, step: int) -> float:
        """Of the learning rate, for the step after ``step`` steps."""
        return min(1.0, (step + 1) / self._warmup) * (0.55 + 0.45 * math.cos(math.pi * self.share(step)))


class Course:
    """The order of the data depends on the seed alone. ``data`` and ``scheduler`` are a checkpoint's, ``done`` counts steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[float], torch.Tensor],
        text: Text,
        options: Options,
        schedule: Schedule,
        peers: Peers | None = None,
    ) -> None:
        self.data = torch.Generator().manual_seed(options.seed)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)
        self.schedule = schedule
        self.done = 0
        self._peers = One() if peers is None else peers
        self._model, self._optimizer, self._clip, self._text, self._options = model, optimizer, clip, text, options
        self._begun: tuple[torch.Tensor, torch.Tensor] | None = None
        self._device = next(model.parameters()).device

    def go_on(self, done: int) -> None:
        """From here: all has been loaded. The learning rate is the schedule's, which may have another end than it had."""
        self.done = done
        for group, base in zip(self._optimizer.param_groups, self.scheduler.base_lrs, strict=True):
            group["lr"] = base * self.schedule.factor(done)

    def steps(self) -> Iterator[Result]:
        """Train until the schedule is over, a step at least."""
        while True:
            yield self._step()
            if self.schedule.share(self.done) >= 1:
                return

    def _step(self) -> Result:
        options = self._options
        self._begun = self.data.get_state(), torch.get_rng_state()
        self._optimizer.zero_grad()
        losses = []
        for _ in range(options.accumulate):
            launched = self._peers.launched
            inputs, targets = self._text.batch(options.batch, self.data, launched.rank, launched.ranks)
            inputs, targets = inputs.to(self._device), targets.to(self._device)
            loss = F.cross_entropy(self._model(inputs).flatten(0, 1), targets.flatten())
            losses.append(self._finite("loss", self._peers.agree(loss)))
            (loss / options.accumulate).backward()  # type: ignore[no-untyped-call]
        norm = self._finite("norm of the gradients", self._clip(options.clip).item()) if options.clip else None
        self._optimizer.step()
        self.scheduler.step()
        self.done += 1
        self._begun = None
        return Result(self.done, tuple(losses), norm)

    def _finite(self, what: str, found: float) -> float:
        """Raises MisuseError where it is NaN or infinite: this step would make every parameter NaN."""
        if not math.isfinite(found):
            raise MisuseError(
                f"the {what} of step {self.done + 1} is {found}: training diverged, and nothing of that step was kept; begin "
                "again with a smaller --lr"
            )
        return found

    def give_up_step(self) -> None:
        """All as before the step that an exception in forward or backward interrupted; its graph must be gone."""
        if self._begun is not None:
            data, random = self._begun
            self.data.set_state(data)
            torch.set_rng_state(random)
            self._optimizer.zero_grad()
            self._begun = None


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
