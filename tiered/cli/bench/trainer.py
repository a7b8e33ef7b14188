"""Trainings that take turns, each in a process of its own, so that its memory can be measured: in memory, in a store without a
disk, or on disk. Single steps, timed by phase.

``python -m tiered.cli.bench.trainer`` is such a process. It reads lines from stdin, the options first and then "step" or "end",
and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import IO, Any, Literal

import torch

from tiered import TieredError, TieredStore, zero
from tiered.cli.train.loop import Schedule, TrainingLoop
from tiered.cli.train.model import GPT, STATE_BYTES, Shape, Text, build, in_parts, open_text, seeded_initialiser
from tiered.cli.train.optimizers import kind_of
from tiered.cli.train.options import Options as TrainOptions
from tiered.measuring.meters import Meter, peak_memory, scratch_store
from tiered.store.opening import SMALLEST_DRAM
from tiered.types import BackendName

__all__ = ["PHASES", "BenchTraining", "Trainer", "TrainerOptions", "Variant", "training"]

PHASES = ("forward", "backward", "update", "waiting", "other")
DRAM_BYTES = 17
"""Bytes per parameter in a store without a disk: value, moments, gradient, and room for fragmentation."""
KEPT = 8
"""Most inputs that a block saves for backward, each as large as its output."""


@dataclass(frozen=True)
class TrainerOptions:
    """What trainings that take turns have in common. ``dram``: bytes of memory of those on disk, None for a tenth of the state;
    ``text`` None: the text of this package. ``clip`` 0: no limit for the norm of the gradients, as with updates in backward."""

    folder: str
    text: str | None
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    accumulate: int = 1
    micro_batch: int = 1
    dram: int | None = None
    update: Literal["on_fetch", "in_backward"] = "on_fetch"
    backend: BackendName = "auto"
    rounds: int = 5
    clip: float = 1.0

    @property
    def shape(self) -> Shape:
        """The shape of the model."""
        return Shape.of(self)

    @property
    def state(self) -> int:
        """Bytes of parameters and moments."""
        return STATE_BYTES * self.shape.parameters

    @property
    def pool(self) -> int:
        """Bytes of memory of the store on disk."""
        return max(SMALLEST_DRAM, self.state // 10) if self.dram is None else self.dram

    @property
    def whole(self) -> int:
        """Bytes of memory of the store without a disk."""
        kept = KEPT * 4 * self.layers * self.batch * self.context * self.width if self.micro_batch > 1 else 0
        return DRAM_BYTES * self.shape.parameters + kept + (32 << 20)


@dataclass(frozen=True)
class Variant:
    """What they differ in. ``place``: in memory without a store, in a store without a disk, or on disk. ``activation_memory``:
    bytes that activations may take, where ``activations`` is "auto"."""

    name: str
    place: Literal["memory", "dram", "disk"]
    optimizer: str = "adamw"
    activations: Literal["memory", "recompute", "store", "auto"] = "memory"
    activation_memory: int | None = None

    def training(self, options: TrainerOptions) -> TrainOptions:
        """Return the options of the training loop: it never ends, and its learning rate stays."""
        given = TrainOptions.of(asdict(options) | {"optimizer": self.optimizer, "warmup": 1})
        return replace(given, steps=None, clip=0.0 if options.update == "in_backward" else options.clip)


class Trainer:
    """Trains in ``store``; None: in memory, with the modules named ``split`` computed in parts as ``zero.page`` does."""

    def __init__(
        self,
        options: TrainerOptions,
        text: Text,
        store: TieredStore | None,
        variant: Variant = Variant("training", "disk"),
        split: tuple[str, ...] = (),
    ) -> None:
        given = variant.training(options)
        kind = kind_of(given)
        self.store = store
        if store is None:
            self.model = GPT(options.shape)
            initialise = seeded_initialiser(self.model, options.shape)
            for module in self.model.modules():
                if module._parameters:
                    initialise(module)
            in_parts(self.model, split, options.micro_batch)
            self.optimizer: torch.optim.Optimizer = kind.in_memory(self.model, given)
        else:
            self.model = build(options.shape)
            auto = variant.activations == "auto"
            zero.page(
                self.model, store, micro_batch=options.micro_batch,
                activations=zero.AutoPlan(memory=variant.activation_memory) if auto else variant.activations,
                param_init_fn=seeded_initialiser(self.model, options.shape),
            )  # fmt: skip
            split = zero.statistics(self.model).split
            self.optimizer = kind.in_store(self.model, given)
        self.split = split
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._steps = TrainingLoop(self.model, self.optimizer, text, given, Schedule(given), phase=self._phase).steps()
        self._meter = Meter(store)

    def step(self) -> dict[str, Any]:
        """Forward and backward of every batch, and the optimizer's step. Seconds by phase, bytes, losses, and the norm."""
        self._meter.lap()
        self._seconds = seconds = dict.fromkeys(PHASES, 0.0)
        result = next(self._steps)
        used = self._meter.lap()
        seconds["other"] = used.seconds - sum(seconds.values())
        return {"seconds": used.seconds, "phases": seconds, "losses": result.losses, "norm": result.norm} | {
            name: getattr(used, name) for name in ("read", "written", "kernel_read", "kernel_written")
        }

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Add up the seconds of a phase. Updates and waiting are phases of their own, in whichever phase they happen."""
        began = self._now()
        yield
        whole, updates, waiting = (b - a for a, b in zip(began, self._now(), strict=True))
        self._seconds["update"] += updates
        self._seconds["waiting"] += waiting
        self._seconds[name] += whole - updates - waiting

    def _now(self) -> tuple[float, float, float]:
        if self.store is None:
            return time.perf_counter(), 0.0, 0.0
        updates, stalled = zero.statistics(self.model).update_seconds, self.store.statistics().stalled
        return time.perf_counter(), updates, stalled


class BenchTraining:
    """A training in a process of its own, which Ctrl-C does not reach: ``close`` ends it."""

    def __init__(self, options: TrainerOptions, variant: Variant, split: tuple[str, ...] = ()) -> None:
        self.variant = variant
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tiered.cli.bench.trainer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._first = first_line(options, variant, split)

    def begin(self) -> dict[str, Any]:
        """Start the training, and wait until the model is made."""
        return self._ask(self._first)

    def step(self) -> dict[str, Any]:
        """Run one step; returns its measurements."""
        return self._ask("step\n")

    def end(self) -> dict[str, Any]:
        """End the training; returns the memory that it used."""
        found = self._ask("end\n")
        self.child.wait()
        return found

    def close(self) -> None:
        """Kill the process where it has not ended."""
        self.child.kill()
        self.child.wait()
        for pipe in self._pipes():
            with suppress(BrokenPipeError):
                pipe.close()

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        return self.child.stdin, self.child.stdout

    def _ask(self, line: str) -> dict[str, Any]:
        to, back = self._pipes()
        try:
            to.write(line)
            to.flush()
        except BrokenPipeError:
            pass  # the process has ended, and its last line says why
        answer = back.readline()
        if not answer:
            code = self.child.wait()
            why = f"was killed by signal {-code}, perhaps because memory ran out" if code < 0 else f"ended with code {code}"
            raise TieredError(f"training {self.variant.name} {why}")
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise TieredError(f"training {self.variant.name}: {found['error']}")
        return found


@contextmanager
def training(options: TrainerOptions, variant: Variant, split: tuple[str, ...] = ()) -> Iterator[BenchTraining]:
    """Have a training, whose process ends with this context."""
    found = BenchTraining(options, variant, split)
    try:
        yield found
    finally:
        found.close()


def first_line(options: TrainerOptions, variant: Variant, split: tuple[str, ...]) -> str:
    """Write the first line that the process reads."""
    return json.dumps({"options": asdict(options), "variant": asdict(variant), "split": split}) + "\n"


def _answer(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def main() -> int:
    """Run the process: answer the lines of stdin."""
    given = json.loads(sys.stdin.readline())
    options, variant = TrainerOptions(**given["options"]), Variant(**given["variant"])
    try:
        with ExitStack() as stack:
            text = open_text(options.text, options.context, stack)
            store = None
            if variant.place == "dram":
                store = stack.enter_context(TieredStore.open(None, dram=options.whole))
            elif variant.place == "disk":
                store = stack.enter_context(scratch_store(options.folder, dram=options.pool, backend=options.backend))
            baseline = peak_memory()
            trainer = Trainer(options, text, store, variant, tuple(given["split"]))
            _answer(split=trainer.split, baseline=baseline)
            for line in sys.stdin:
                if line.strip() == "end":
                    break
                _answer(**trainer.step())
            dram = None if store is None else store.statistics().tiers[0]
            seen = None if store is None else zero.statistics(trainer.model)
            _answer(
                peak_rss=peak_memory(),
                pool=None if dram is None else {"budget_bytes": dram.capacity, "peak_bytes": dram.peak},
                units=None if seen is None else seen.units,
                plan=None if seen is None or seen.plan is None else asdict(seen.plan),
            )
    except TieredError as error:
        _answer(error=str(error))
        return 1
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)):
            raise
        _answer(error="memory ran out: lower --layers, --width or --batch")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
