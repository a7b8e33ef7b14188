"""How long operations take on a machine: measured on this one, shape by shape, or from a machine's rates.

An operation that was not measured takes the longer of its floating point operations and of the bytes of its operands, at the
machine's rates (the roofline of Williams, Waterman and Patterson, 2009, https://doi.org/10.1145/1498765.1498785), and what the
smallest operation takes.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

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
"""Bytes of operands of operations that are measured in turns; one that has more takes the time that its rates say."""
LONGEST = 2.0
"""Seconds that these are expected to take; one that takes longer is not measured."""
LEAST, TIMES, ENOUGH = 3, 20, 0.02
"""How often an operation is timed: so many times at least and at most, and for so many seconds."""


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
    small = [name for name, kind in kinds.items() if kind.nbytes <= LARGEST and expected[name] <= LONGEST]
    order = sorted(small, key=lambda name: -expected[name] * counts[name])
    found: dict[str, float] = {}
    deadline = time.perf_counter() + seconds
    for names in _in_groups(order, kinds, expected):
        if (now := time.perf_counter()) > deadline:
            break
        found |= _timed({name: kinds[name] for name in names}, min(deadline, now + ENOUGH * len(names)))
    return found


def _in_groups(
    names: Sequence[str], kinds: Mapping[str, OperationKind], expected: Mapping[str, float]
) -> Iterator[Sequence[str]]:
    """Yield operations that have ``LARGEST`` bytes of operands and take ``LONGEST`` seconds at most, all together."""
    begin, nbytes, seconds = 0, 0.0, 0.0
    for end, name in enumerate(names):
        nbytes, seconds = nbytes + kinds[name].nbytes, seconds + expected[name]
        if nbytes > LARGEST or seconds > LONGEST:
            yield names[begin:end]
            begin, nbytes, seconds = end, kinds[name].nbytes, expected[name]
    yield names[begin:]


def _timed(kinds: Mapping[str, OperationKind], deadline: float) -> dict[str, float]:
    """Time operations in turns, as they come in a step: one by itself would have its operands, and what it leaves to others, in
    the caches of the processor, and the threads of torch awake."""
    calls: dict[str, tuple[Any, dict[str, Any]]] = {}
    taken: dict[str, list[float]] = {}
    for number in range(TIMES + 1):
        for name, kind in kinds.items():
            try:
                with torch.no_grad():
                    if not number:
                        calls[name] = _operands(kind)
                    if name in calls:
                        args, kwargs = calls[name]
                        began = time.perf_counter()
                        kind.call[0](*args, **kwargs)
                        taken.setdefault(name, []).append(time.perf_counter() - began)
            except (RuntimeError, TypeError, IndexError, NotImplementedError):
                calls.pop(name, None)
        if number >= LEAST and time.perf_counter() > deadline:
            break
    # not the least: a processor is not at its best for the whole of a step
    return {name: statistics.median(several[1:]) for name, several in taken.items() if name in calls}


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
