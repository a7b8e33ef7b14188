"""How long operations take on a machine: measured on this one, shape by shape, or from a machine's rates.

An operation that was not measured takes the longer of its floating point operations and of the bytes of its operands, at the
machine's rates (the roofline of Williams, Waterman and Patterson, 2009, https://doi.org/10.1145/1498765.1498785), and what the
smallest operation takes.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tiered.planning.machine import Machine
from tiered.planning.notes import (
    Cost,
    CreateNote,
    DeleteNote,
    LeaseNote,
    Operation,
    OperationKind,
    PauseNote,
    StepNotes,
    TensorForm,
    WorkNote,
)

__all__ = ["Timing", "measure_operations"]

LARGEST = 1 << 30
"""Bytes of operands of an operation that is measured; a larger one takes the time that its rates say."""
LONGEST = 2.0
"""Seconds that the operations of one shape are expected to take, of those that are measured."""
OPERANDS, COLD = 8, 64 << 20
"""Sets of operands that an operation is measured with in turn, at most, and their bytes: beyond a processor's caches, where the
operands of a step are, too."""


class Timing:
    """Seconds of the operations of a step on ``machine``; ``measured`` seconds by the signature of an operation go first."""

    def __init__(self, machine: Machine, measured: Mapping[str, float] | None = None, ranks: int = 1) -> None:
        self.machine, self._measured, self._ranks = machine, dict(measured or {}), ranks
        self._known: dict[int, float] = {}

    def __call__(self, operation: Operation) -> tuple[str, float]:
        """Return the kind of work of an operation, and the seconds that it takes of the processor."""
        machine = self.machine
        if isinstance(operation, PauseNote):
            return "backward" if operation.cost.backward else "forward", self._of_cost(operation.cost)
        if isinstance(operation, LeaseNote | CreateNote | DeleteNote):
            return "store", machine.lease
        if isinstance(operation, WorkNote):
            if operation.kind == "call":
                return "store", machine.lease
            moved = operation.nbytes / machine.memory
            if operation.kind == "update":
                return "update", operation.elements / machine.update
            if operation.kind in ("gather", "reduce"):
                return "network", self.network(operation.nbytes)
            if operation.kind == "activation":
                return "activations", moved + machine.lease * (operation.pieces - 1)  # of the first it is a lease
            return "gradients", moved + machine.gradient * operation.pieces
        return "store", 0.0

    def lost(self, nbytes: float, transfers: int, beside: str) -> float:
        """Return the seconds that work of a kind loses to the store's thread, which moves so many bytes in so many transfers
        beside it: none where a core is left for that thread, as also while a device computes, but for updates."""
        machine = self.machine
        if machine.threads < machine.cores or (machine.hbm and beside != "update"):
            return 0.0
        return nbytes / machine.hashing + transfers * machine.handling

    def network(self, nbytes: float) -> float:
        """Return the seconds in which a unit of so many bytes is gathered, or reduced: a ring, in which each rank sends all but
        its share, a share at a time (Thakur, Rabenseifner and Gropp, 2005, https://doi.org/10.1177/1094342005051521). The ranks
        of a node share its network. Where one node has all ranks, they share its memory instead, in which each byte is read and
        written, and the latency between nodes is none of theirs."""
        machine, others = self.machine, self._ranks - 1
        sent = nbytes * others / self._ranks * min(self._ranks, machine.ranks_per_node)
        if self._ranks <= machine.ranks_per_node:
            return 2 * sent / machine.memory
        return others * machine.latency + sent / machine.network

    def _of_cost(self, cost: Cost) -> float:
        found = self._known.get(id(cost))
        if found is None:
            found = self._known[id(cost)] = sum(self.seconds(one, cost.backward) for one in cost.operations)
        return found

    def seconds(self, operation: OperationKind, backward: bool = False) -> float:
        """Return the seconds of one operation of torch, of a backward pass or of a forward pass."""
        machine = self.machine
        found = self._measured.get(operation.signature)
        if found is not None:
            return found
        narrow = any(isinstance(one, TensorForm) and one.dtype.itemsize == 2 for one in _leaves(operation.call[1]))
        flops, memory = machine.computing(2 if narrow else 4, device=machine.hbm > 0, backward=backward)
        return max(operation.flops / flops, operation.nbytes / memory) + machine.operation

    def compute(self, step: StepNotes) -> tuple[float, float]:
        """Return the seconds of forward and of backward of a step."""
        found = [0.0, 0.0]
        for cost in step.costs:
            found[cost.backward] += self._of_cost(cost)
        return found[0], found[1]


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    tree_map(found.append, value, is_leaf=lambda one: isinstance(one, TensorForm))
    return found


def measure_operations(
    step: StepNotes, machine: Machine, seconds: float = 5.0, known: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Time the operations of a step on this machine's CPU, those of one shape once and but for those that are ``known``:
    seconds by signature.

    Takes about ``seconds`` at most, the shapes that take most of the time first; operations that cannot be run by themselves,
    or are too large, are left out. Values are random; indices are 0.
    """
    timing, counts = Timing(machine), Counter[str]()
    kinds: dict[str, OperationKind] = {}
    for one in (one for cost in step.costs for one in cost.operations):
        if known is None or one.signature not in known:
            counts[one.signature] += 1
            kinds[one.signature] = one
    expected = {name: timing.seconds(kind) for name, kind in kinds.items()}
    found: dict[str, float] = {}
    deadline = time.perf_counter() + seconds
    for name in sorted(kinds, key=lambda name: -expected[name] * counts[name]):
        if time.perf_counter() > deadline:
            break
        if kinds[name].nbytes <= LARGEST and expected[name] <= LONGEST:
            taken = _timed(kinds[name])
            if taken is not None:
                found[name] = taken
    return found


def _timed(kind: OperationKind) -> float | None:
    try:
        with torch.no_grad():
            calls = [_operands(kind)]
            nbytes = sum(one.nbytes for one in tree_leaves(calls[0]) if isinstance(one, torch.Tensor))
            while len(calls) < OPERANDS and 0 < nbytes * len(calls) < COLD:
                calls.append(_operands(kind))
            taken: list[float] = []
            while len(taken) <= max(3, len(calls)) or (len(taken) < 20 and sum(taken) < 0.02):
                args, kwargs = calls[len(taken) % len(calls)]
                began = time.perf_counter()
                kind.call[0](*args, **kwargs)
                taken.append(time.perf_counter() - began)
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        return None
    return statistics.median(taken[1:])  # not the least: a processor is not at its best for the whole of a step


def _operands(kind: OperationKind) -> tuple[Any, dict[str, Any]]:
    """Return new operands of an operation: positional and by name."""
    _, args, kwargs = kind.call
    args, kwargs = tree_map(_made, (args, kwargs), is_leaf=lambda one: isinstance(one, TensorForm))
    return args, {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}


def _made(value: Any) -> Any:
    if not isinstance(value, TensorForm):
        return value
    made = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="cpu")
    if not value.dtype.is_floating_point:
        return made.zero_()
    if value.dtype.itemsize >= 4:
        return made.uniform_(0.01, 1.0)
    return made.copy_(torch.rand(value.shape, dtype=torch.float32, device="cpu"))
