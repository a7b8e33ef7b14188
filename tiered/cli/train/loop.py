"""The training loop, an ordinary PyTorch loop that works on a store and in memory and can stop after or within any step; and
the commits of its state."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from tiered import zero
from tiered.cli.train.options import Options, StoreOptions, names_of
from tiered.cli.train.ranks import Peers
from tiered.errors import MisuseError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tiered.cli.train.model import Text
    from tiered.zero import Optimizer

__all__ = ["Checkpointer", "Result", "Schedule", "TrainingLoop"]


@dataclass(frozen=True)
class Result:
    """The numbers of one step: the loss of each batch, and the norm of the gradients (None without clipping)."""

    step: int
    losses: tuple[float, ...]
    norm: float | None

    @property
    def loss(self) -> float:
        """The mean over the batches."""
        return sum(self.losses) / len(self.losses)


class Schedule:
    """The progress of a training and its learning rate: a linear warm-up, then a cosine down to a tenth.

    ``seconds`` have passed in earlier processes. ``clock`` returns seconds.
    """

    def __init__(self, options: Options, seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._warmup = options.steps, options.warmup
        self._seconds = None if options.minutes is None else options.minutes * 60
        self._clock = clock
        self._began = clock() - seconds

    @property
    def seconds(self) -> float:
        """Seconds of training so far, without the time between two processes."""
        return self._clock() - self._began

    def share(self, step: int) -> float:
        """The completed share of the training after ``step`` steps: 1 at its end."""
        by_steps = step / self._steps if self._steps else 0.0
        by_time = self.seconds / self._seconds if self._seconds else 0.0
        return min(1.0, max(by_steps, by_time))

    def factor(self, step: int) -> float:
        """The factor on the highest learning rate in the step that follows ``step`` steps."""
        return min(1.0, (step + 1) / self._warmup) * (0.55 + 0.45 * math.cos(math.pi * self.share(step)))


class TrainingLoop:
    """Trains ``model`` step by step. The order of the data depends on the seed alone.

    A checkpoint has ``data``, the generator of the batches, and ``scheduler``. ``done`` counts completed steps. ``phase`` is
    entered around "forward", "backward" and "update" of each step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        text: Text,
        options: Options,
        schedule: Schedule,
        peers: Peers | None = None,
        phase: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.data = torch.Generator().manual_seed(options.seed)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)
        self.schedule = schedule
        self.done = 0
        self._peers = Peers() if peers is None else peers
        self._phase = phase
        self._model, self._optimizer, self._text, self._options = model, optimizer, text, options
        self._begun: tuple[torch.Tensor, torch.Tensor] | None = None
        self._device = next(model.parameters()).device

    def continue_after(self, done: int) -> None:
        """Continue after step ``done``, whose state has been loaded. The learning rate follows the schedule of this process,
        which may end later than the one that the checkpoint was made with."""
        self.done = done
        for group, base in zip(self._optimizer.param_groups, self.scheduler.base_lrs, strict=True):
            group["lr"] = base * self.schedule.factor(done)

    def steps(self) -> Iterator[Result]:
        """Train until the schedule ends, but at least one step."""
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
            with self._phase("forward"):
                loss = F.cross_entropy(self._model(inputs).flatten(0, 1), targets.flatten())
            losses.append(self._finite("loss", self._peers.agree(loss)))
            with self._phase("backward"):
                (loss / options.accumulate).backward()  # type: ignore[no-untyped-call]
        with self._phase("update"):
            norm = self._finite("norm of the gradients", self._clip().item()) if options.clip else None
            self._optimizer.step()
        self.scheduler.step()
        self.done += 1
        self._begun = None
        return Result(self.done, tuple(losses), norm)

    def _clip(self) -> torch.Tensor:
        """Clip the gradients, where they are; returns their norm."""
        if isinstance(self._optimizer, zero.Optimizer):
            return self._optimizer.clip_grad_norm_(self._options.clip)
        return nn.utils.clip_grad_norm_(self._model.parameters(), self._options.clip)

    def _finite(self, what: str, found: float) -> float:
        """Return ``found``. Raises MisuseError where it is NaN or infinite, because the step would make every parameter NaN."""
        if not math.isfinite(found):
            raise MisuseError(
                f"the {what} of step {self.done + 1} is {found}: training diverged, and nothing of that step was kept; start "
                "again with a smaller --lr"
            )
        return found

    def give_up_step(self) -> None:
        """Restore the state before the step that an exception in forward or backward interrupted. The graph of that step must
        have been freed."""
        if self._begun is not None:
            data, random = self._begun
            self.data.set_state(data)
            torch.set_rng_state(random)
            self._optimizer.zero_grad()
            self._begun = None


class Checkpointer:
    """Commits the state of a training: every ``commit_every`` steps in the background, one commit at a time, and on request.

    ``losses`` is the caller's list, with the loss of every step since the beginning of the training. Several ranks commit
    together: each waits until all of them have the commit."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        loop: TrainingLoop,
        options: Options,
        text: Text,
        losses: list[float],
        peers: Peers,
    ) -> None:
        self._model, self._optimizer, self._loop, self._losses = model, optimizer, loop, losses
        self._options, self._text_bytes, self._ranks = options, text.nbytes, peers.launched.ranks
        session = names_of("session")
        self._recorded = {name: value for name, value in asdict(options).items() if name not in session}
        if options.text is not None:
            self._recorded["text"] = os.path.abspath(options.text)
        self._open: Future[int] | None = None
        self._step = loop.done

    def stepped(self) -> None:
        """Begin a commit where one is due after this step. Raises the exception with which an earlier commit failed."""
        if self._open is not None and self._open.done():
            self._wait()
        every = self._options.commit_every
        if every is None or self._loop.done % every:
            return
        if self._ranks > 1:
            self.commit()
        else:
            self._wait()
            self._open = zero.commit_async(self._model, self._optimizer, **self._record())
            self._step = self._loop.done

    def finish(self) -> None:
        """Make the last completed step durable. Raises the exceptions of ``zero.commit``."""
        self._wait()
        if self._step != self._loop.done:
            self.commit()

    def commit(self) -> int:
        """Commit the present state; returns the generation."""
        self._wait()
        generation = zero.commit(self._model, self._optimizer, **self._record())
        self._step = self._loop.done
        return generation

    def _wait(self) -> None:
        if self._open is not None:
            future, self._open = self._open, None
            future.result()

    def _record(self) -> dict[str, Any]:
        return {
            "scheduler": self._loop.scheduler,
            "data": self._loop.data,
            "extra": {
                "command": "train",
                "options": self._recorded,
                "text_bytes": self._text_bytes,
                "step": self._loop.done,
                "seconds": self._loop.schedule.seconds,
                "losses": torch.tensor(self._losses, dtype=torch.float64, device="cpu"),
            },
            "meta": {
                "command": "train",
                "step": self._loop.done,
                "loss": self._losses[-1],
                "seed": self._options.seed,
                "opening": {one.name: self._recorded[one.name] for one in fields(StoreOptions)},
            },
        }
