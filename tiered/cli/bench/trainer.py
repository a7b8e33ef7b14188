"""One training of ``tiered bench train``, in memory, in a store without a disk, or on disk: single steps, timed by phase.

``python -m tiered.cli.bench.trainer`` runs such a training as a process of its own, so that its memory can be measured. The
process reads lines from stdin, the options first and then "step" or "end", and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from tiered import TieredError, TieredStore, zero
from tiered.cli.train.model import GPT, STATE_BYTES, Shape, Text, build, in_parts, open_text, seeded_initialiser
from tiered.cli.train.optimizers import decayed
from tiered.measuring.meters import Meter, peak_memory, scratch_store
from tiered.store.opening import SMALLEST_DRAM
from tiered.types import BackendName

__all__ = ["PHASES", "Options", "Trainer", "Variant", "as_lines"]

Variant = Literal["memory", "dram", "disk"]
PHASES = ("forward", "backward", "update", "waiting", "other")
CLIP = 1.0
"""Largest norm of the gradients; updates within backward work without clipping."""
DRAM_BYTES = 17
"""Bytes per parameter in a store without a disk: value, moments, gradient, and room for fragmentation."""
KEPT = 8
"""Most inputs that a block saves for backward, each as large as its output."""


@dataclass(frozen=True)
class Options:
    """Options of ``tiered bench train``. ``dram``: bytes of memory of the variant on disk, None for a tenth of the state;
    ``text`` None: the text of this package."""

    folder: str
    text: str | None
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    accumulate: int
    micro_batch: int
    dram: int | None
    update: Literal["on_fetch", "in_backward"]
    backend: BackendName
    rounds: int

    @property
    def shape(self) -> Shape:
        """The shape of the model."""
        return Shape(self.layers, self.width, self.heads, self.context)

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


class _Clock:
    """Adds up the seconds of each phase. Updates and waiting are phases of their own, in whichever phase they happen."""

    def __init__(self, model: nn.Module, store: TieredStore | None) -> None:
        self._model, self._store = model, store
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def _now(self) -> tuple[float, float, float]:
        if self._store is None:
            return time.perf_counter(), 0.0, 0.0
        updates, stalled = zero.statistics(self._model).update_seconds, self._store.statistics().stalled
        return time.perf_counter(), updates, stalled

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = self._now()
        yield
        whole, updates, waiting = (b - a for a, b in zip(began, self._now(), strict=True))
        self.seconds["update"] += updates
        self.seconds["waiting"] += waiting
        self.seconds[name] += whole - updates - waiting


class Trainer:
    """Trains in ``store``; None: in memory, with the modules named ``split`` computed in parts as ``zero.page`` does."""

    def __init__(self, options: Options, text: Text, store: TieredStore | None, split: tuple[str, ...] = ()) -> None:
        self._options, self._text, self.store = options, text, store
        settings = {"lr": 1e-4, "betas": (0.9, 0.95)}
        if store is None:
            self.model = GPT(options.shape)
            initialise = seeded_initialiser(self.model, options.shape)
            for module in self.model.modules():
                if module._parameters:
                    initialise(module)
            in_parts(self.model, split, options.micro_batch)
            groups = decayed(self.model, 0.1)
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, fused=True, **settings)  # type: ignore[arg-type]
        else:
            self.model = build(options.shape)
            initialise = seeded_initialiser(self.model, options.shape)
            zero.page(self.model, store, micro_batch=options.micro_batch, param_init_fn=initialise)
            split = zero.statistics(self.model).split
            groups = decayed(self.model, 0.1)
            self.optimizer = zero.AdamW(groups, update=options.update, **settings)  # type: ignore[arg-type]
        self.split = split
        self._generator = torch.Generator().manual_seed(0)
        self._meter = Meter(store)

    def step(self) -> dict[str, Any]:
        """Forward and backward of every batch, and the optimizer's step. Seconds by phase, bytes, losses, and the norm."""
        options, clock = self._options, _Clock(self.model, self.store)
        losses, norm = [], None
        self._meter.lap()
        for _ in range(options.accumulate):
            inputs, targets = self._text.batch(options.batch, self._generator)
            with clock.phase("forward"):
                loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
            with clock.phase("backward"):
                (loss / options.accumulate).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        with clock.phase("update"):
            if options.update == "on_fetch":
                norm = self._clip().item()
            self.optimizer.step()
            self.optimizer.zero_grad()
        used = self._meter.lap()
        seconds = clock.seconds
        seconds["other"] = used.seconds - sum(seconds.values())
        return {"seconds": used.seconds, "phases": seconds, "losses": losses, "norm": norm} | {
            name: getattr(used, name) for name in ("read", "written", "kernel_read", "kernel_written")
        }

    def _clip(self) -> torch.Tensor:
        if isinstance(self.optimizer, zero.AdamW):
            return self.optimizer.clip_grad_norm_(CLIP)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)


def _answer(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def main() -> int:
    """Run the process: answer the lines of stdin."""
    given = json.loads(sys.stdin.readline())
    options, variant = Options(**given["options"]), given["variant"]
    try:
        with ExitStack() as stack:
            text = open_text(options.text, options.context, stack)
            store = None
            if variant == "dram":
                store = stack.enter_context(TieredStore.open(None, dram=options.whole))
            elif variant == "disk":
                store = stack.enter_context(scratch_store(options.folder, dram=options.pool, backend=options.backend))
            baseline = peak_memory()
            trainer = Trainer(options, text, store, tuple(given["split"]))
            _answer(split=trainer.split, baseline=baseline)
            for line in sys.stdin:
                if line.strip() == "end":
                    break
                _answer(**trainer.step())
            seen = store.statistics() if store is not None else None
            dram = None if seen is None else seen.tiers[0]
            _answer(
                peak_rss=peak_memory(),
                pool=None if dram is None else {"budget_bytes": dram.capacity, "peak_bytes": dram.peak},
                units=None if store is None else zero.statistics(trainer.model).units,
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


def as_lines(options: Options, variant: Variant, split: tuple[str, ...]) -> str:
    """Write the first line that the process reads."""
    return json.dumps({"options": asdict(options), "variant": variant, "split": split}) + "\n"


if __name__ == "__main__":
    sys.exit(main())
