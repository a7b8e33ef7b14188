"""``tiered train --check``: the same training on the store and in memory, compared bit by bit."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiered import TieredStore, zero
from tiered.cli.arguments import launched
from tiered.cli.output import counted, refuse_unwritable, write_report
from tiered.cli.stop import Stopped, StopRequest
from tiered.cli.train.loop import Result, Schedule, TrainingLoop
from tiered.cli.train.model import GPT, Shape, Text, build, in_parts, open_text
from tiered.cli.train.optimizers import kind_of
from tiered.cli.train.options import Options
from tiered.cli.train.ranks import Peers
from tiered.cli.train.run import (
    describe_model,
    opened,
    page,
    refuse_endless,
    refuse_existing,
    refuse_full_disk,
)
from tiered.types import format_size

__all__ = ["check"]

Named = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class CheckOutcome:
    """All numbers of one training. ``state``: the moments, by the position of the parameter, as in ``torch.optim.AdamW``."""

    results: list[Result]
    parameters: dict[str, torch.Tensor]
    state: dict[int, dict[str, torch.Tensor]]

    def losses(self) -> Named:
        """Name the losses of each step."""
        for result in self.results:
            yield f"loss of step {result.step}", torch.tensor(result.losses, dtype=torch.float64, device="cpu")

    def norms(self) -> Named:
        """Name the gradient norm of each step."""
        for result in self.results:
            if result.norm is not None:
                yield f"gradient norm of step {result.step}", torch.tensor(result.norm, dtype=torch.float64, device="cpu")

    def values(self) -> Named:
        """Name the parameters."""
        for name, value in self.parameters.items():
            yield f"parameter {name!r}", value

    def moments(self) -> Named:
        """Name the moments of each parameter."""
        for index, states in sorted(self.state.items()):
            for name, value in sorted(states.items()):
                yield f"{name} of parameter {index}", value


def check(options: Options) -> int:
    """Train in a store and in memory, and print the comparison; returns 0 where all numbers are identical, else 1."""
    stream = sys.stderr if options.json == "-" else sys.stdout
    refuse_unwritable(options.json)
    kind = kind_of(options)
    with ExitStack() as stack:
        text = open_text(options.text, options.context, stack)
        folder = options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="tiered-check-", dir="."))
        store = stack.enter_context(closing(TieredStore.open(folder, **opened(options, launched()))))
        parameters = Shape.of(options).parameters
        refuse_endless(options)
        refuse_existing(store, options)
        refuse_full_disk(store, kind, parameters)
        model = build(Shape.of(options))
        print(
            f"{describe_model(options, parameters)}\n"
            f"{counted(options.steps or 0, 'step')}, activations {_activations(options)} for backward\n"
            f"first in the store with {format_size(options.dram)} of memory, then in memory",
            file=stream,
            flush=True,
        )
        try:
            with StopRequest() as stop:
                page(model, store, options, options.existing, lambda done: None, stop, Peers())
                start = model.state_dict()
                optimizer = kind.in_store(model, options)
                loop = TrainingLoop(model, optimizer, text, options, Schedule(options))
                stored = _outcome(loop.steps(), model, optimizer, stop)
                evictions = store.statistics().evictions
                remembered = _in_memory(start, text, options, zero.statistics(model).split, stop)
        except Stopped as stopped:
            print("tiered: stopped; nothing was committed", file=sys.stderr)
            return stopped.exit_code
        compared = {
            "losses": _compare(stored.losses(), remembered.losses()),
            "gradient norms": _compare(stored.norms(), remembered.norms()),
            "final parameters": _compare(stored.values(), remembered.values()),
            "optimizer states": _compare(stored.moments(), remembered.moments()),
        }
        print(f"{counted(evictions, 'eviction')} from memory during training in the store", file=stream)
        for what, (numbers, difference) in compared.items():
            print(f"  {what:<18}{numbers:>12,} numbers  {difference or 'identical'}", file=stream)
        same = not any(difference for _, difference in compared.values())
        print("identical" if same else "different", file=stream)
        write_report(
            options.json,
            {
                "identical": same,
                "steps": len(stored.results),
                "evictions": evictions,
                "compared": {what: {"numbers": n, "difference": d} for what, (n, d) in compared.items()},
            },
        )
    return 0 if same else 1


def _activations(options: Options) -> str:
    told = {"memory": "kept", "recompute": "recomputed", "store": "kept in the store", "auto": "kept where a plan says"}
    return "recomputed" if options.recompute else told[options.activations]


def _in_memory(
    start: dict[str, torch.Tensor], text: Text, options: Options, split: Iterable[str], stop: StopRequest
) -> CheckOutcome:
    model = GPT(Shape.of(options))
    model.load_state_dict(start)
    in_parts(model, split if options.micro_batch > 1 else (), options.micro_batch)
    optimizer = kind_of(options).in_memory(model, options)
    loop = TrainingLoop(model, optimizer, text, options, Schedule(options))
    return _outcome(loop.steps(), model, optimizer, stop)


def _outcome(steps: Iterable[Result], model: nn.Module, optimizer: torch.optim.Optimizer, stop: StopRequest) -> CheckOutcome:
    results = []
    for result in steps:
        results.append(result)
        stop.check()
    state: dict[str, Any] = optimizer.state_dict()
    return CheckOutcome(results, model.state_dict(), state["state"])


def _compare(ours: Named, theirs: Named) -> tuple[int, str | None]:
    """Count the numbers, and describe the first difference; None where all are identical."""
    mine, reference = dict(ours), dict(theirs)
    numbers = sum(tensor.numel() for tensor in reference.values())
    for name in sorted(mine.keys() ^ reference.keys()):
        return numbers, f"{name} exists in one of the trainings only"
    for name, expected in reference.items():
        value = mine[name]
        if value.shape != expected.shape or value.dtype != expected.dtype:
            return numbers, f"{name} has another shape or type in the store: {tuple(value.shape)}, not {tuple(expected.shape)}"
        unequal = (_bits(value) != _bits(expected)).any(-1)
        if unequal.any():
            where = int(unequal.nonzero()[0])
            got, want = value.reshape(-1)[where].item(), expected.reshape(-1)[where].item()
            return numbers, f"{name} differs first at element {where}: {got!r} in the store, {want!r} in memory"
    return numbers, None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View the bytes of each element, shape (elements, bytes), so that NaNs and signed zeros compare by their bits."""
    return tensor.detach().reshape(-1, 1).contiguous().view(torch.uint8)
