"""A plan before the run: what fits, how many bytes a step moves, how long it takes, and what would be better.

``plan`` has the model's pager train it on the meta device over a store that takes notes (``dry_run``), and plays the notes in a
simulated store (``rehearsal``): by the store's own eviction and read-ahead, over a drive of the machine's rates.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import nn

from tiered.engine.retention import bytes_moved, plan_retention
from tiered.errors import CapacityError, MisuseError, expect_type, listed, one_of, whole_number
from tiered.packing.quantised import QUANTIZE, Quantize
from tiered.planning.dry_run import Activations, Repeats, TrainingSetup, Update
from tiered.planning.machine import Machine
from tiered.planning.notes import StepNotes, WorkNote, in_groups, slices_in_groups, slices_of
from tiered.planning.optimum import lower_bound
from tiered.planning.rehearsal import COUNTED, WARM_UP, Offloading, Rehearsed, Seconds, no_time, rehearse
from tiered.planning.simulated import DriveRates
from tiered.planning.sizes import UnitSizes, sizes_of
from tiered.planning.sources import Numbers, Subject, Workload, beyond_positions, subject_of
from tiered.planning.timing import Timing, measure_operations
from tiered.store.activations import piece_of
from tiered.store.opening import SMALLEST_DRAM, default_dram
from tiered.system import KEPT, SELDOM
from tiered.types import OptimizerName, Use, budget_text, format_size, parse_size, with_unit
from tiered.zero.page import smallest_pool
from tiered.zero.paging.recompute.micro_batch import split_modules
from tiered.zero.paging.step_trace import LONGEST
from tiered.zero.paging.units import Limits, ModelPlan, Policy, divide
from tiered.zero.rules.forms import updates_whole
from tiered.zero.rules.known import CHOICES
from tiered.zero.rules.rule import UpdateRule

__all__ = ["Choice", "Offloading", "Plan", "PlannedMemory", "PlannedRanks", "Prediction", "Sweep", "plan"]

Told = Callable[[str, float], object]
NAME = "model"
REHEARSED, COARSE = 3000, 600
"""Touches of optimizer states that are played as they are; of a step with more of them chunks are taken together, until there
are so many: of Llama-3 8B with 56 GiB a step's bytes differ by 0.8 %, and it is played in an eighth of the time."""
IN_TRANSIT = 62 << 20
"""Bytes beside the pool, the activations and the imports: pieces in transit, buffers of torch's libraries, and what the C
library keeps of what was freed (``docs/memory.md``)."""
SAVED = 6
"""Of these touches, one in so many may be of activations before pieces of them are taken together."""
MANY = 1500
"""Operations of a step that takes seconds to play: then two steps go before the one that counts, not three before two, and
modes that are not faster are left out. From the third on, steps of Llama-3 8B and 70B differ by 1 to 2 %, bytes and seconds."""
PAYS = 0.5
"""Of the tokens a second that so many more ranks would bring at best, what they must bring to pay."""
HIDDEN = 1.15
"""Times the seconds of a step with activations in memory that one takes at most whose activations the drive hides."""
AS_FAST = 1.05
"""Of steps that take long to play: times the seconds of one with activations in memory, within which no other way is looked
for."""
PARTS = (2, 4, 8, 16)
"""Parts of a batch that are tried where nothing else makes a model fit."""
ENOUGH, SHARE = 8, 128
"""Times the smallest budget, and one in so many of all bytes of a state: with less, units are cut into so many pieces that
leases take more time than bytes. Planned steps of two models, of 113 and 184 million parameters, take 5 and 7 % longer with 8
times the smallest budget than with 16 times, and 75 and 84 % longer with the smallest."""
DECIDES = {
    "forward": "flops", "backward": "flops", "update": "update", "store": "lease", "gradients": "gradient",
    "transfers": "handling", "activations": "memory",
}  # fmt: skip
"""The number of a machine that decides most how long work of a kind takes."""
OPEN, TABLES = 8 << 20, 256
"""Bytes beside a pool: of an open store, and one in so many of the pool for its page tables."""


@dataclass(frozen=True)
class Choice(Repeats):
    """How a model is trained: ``update`` as in ``zero.AdamW``, ``activations`` and ``micro_batch`` as in ``zero.page``, and
    ``dram`` bytes of pool."""

    update: Update = "on_fetch"
    activations: Activations = "memory"
    dram: int = 0
    micro_batch: int = 1

    @property
    def saves(self) -> bool:
        """Whether activations wait in the store."""
        return self.activations == "store" or self.computes_again

    def __str__(self) -> str:
        parts = f", micro_batch={self.micro_batch}" if self.micro_batch > 1 else ""
        return f"update={self.update!r}, activations={self.activations!r}{parts}"


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes by kind. ``parameters``, ``gradients`` and ``states`` are tensors of the store, in the pool and on the drive;
    ``activations`` are at most alive at a time, beside the pool, one gradient included: with "store" what stays in memory.
    ``pool`` is the most of the budget that is used, ``drive`` what has to have room there, ``process`` the most that the
    process takes, its imports included. ``device``: of the memory of a device that computes, which then has the activations,
    and parameters as far as they have room beside them, at least what the smallest budget holds; 0 without a device."""

    parameters: int
    gradients: int
    states: int
    activations: int
    workspace: int
    pool: int
    drive: int
    process: int
    device: int = 0


@dataclass(frozen=True)
class Prediction:
    """One choice, and what a step of it does. Bytes of the drive are each step's. ``seconds`` is 0 where no machine was given;
    ``by_work`` are the processor's, by kind ("forward", "backward", "update", "gradients", "store", and "transfers": what the
    store's thread takes from computing), ``waiting`` those in which
    it waits for the drive, ``drive_busy`` those in which the drive works. ``least_bytes``: read and written by the best that
    could be done on demand with all of the budget, knowing the whole order. ``optimum``: bytes that no way to serve the step
    within the budget goes below, where that was asked for. ``touches``: leases and creations of tensors.
    ``sending``: seconds in which the link to a device works, beside computing; a step takes no less.
    ``fits``: whether the machine, and its device, have that ``memory``; what is not known of a machine does not limit.
    ``offloading``: what of the activations goes through the store; None where none does. ``in_memory``: with
    ``activations="store"``, the seconds of a step whose activations stay in memory."""

    choice: Choice
    read: float
    written: float
    least_bytes: float
    seconds: float
    waiting: float
    drive_busy: float
    memory: PlannedMemory
    touches: int
    by_work: Mapping[str, float] = field(default_factory=dict)
    optimum: float | None = None
    offloading: Offloading | None = None
    in_memory: float | None = None
    sending: float = 0.0
    fits: bool = True

    @property
    def hides_activations(self) -> bool | None:
        """Whether the drive moves activations beside computing: a step takes at most 1.15 times what it takes with activations
        in memory. None where activations are not "store", or no time is known."""
        return None if not self.in_memory else self.seconds <= HIDDEN * self.in_memory

    @property
    def processor(self) -> float:
        """Seconds in which the processor works."""
        return sum(self.by_work.values())


@dataclass(frozen=True)
class PlannedRanks:
    """So many ranks with ZeRO stage 3, each with the batch that was asked for and a store of its own. Bytes are those of one
    rank and step: ``sent`` to the others, ``read`` and ``written`` of its drive. ``network`` are seconds that it waits for
    the other ranks' bytes: by the network between nodes, or by the memory of the node that has all ranks. ``process``: bytes
    of memory of one rank, ``node`` those of the ranks of a node together. ``refused`` says why a node does not have them, and
    which budget it has. ``pays``: whether twice the ranks of the row before that fits bring half as many more tokens a second,
    at least."""

    ranks: int
    seconds: float
    tokens_per_second: float
    sent: float
    read: float
    written: float
    waiting: float
    network: float
    process: int
    node: int
    refused: str | None = None
    pays: bool = True

    @property
    def fits(self) -> bool:
        """Whether a node has the memory of its ranks; what is not known of a machine does not limit."""
        return self.refused is None


@dataclass(frozen=True)
class Plan:
    """What ``tiered.plan`` found.

    ``chosen``: the prediction for what was asked, where that fits; ``others``: for other modes at the same budget, those that
    fit first, and the fastest of them. ``curve``: predictions for other budgets, ``ranks`` for numbers of ranks, where these
    were asked for. ``smallest``: bytes of DRAM with which the model can be paged at all; ``enough``: with which one would want
    to run. ``refused`` says why it does not fit, ``changes`` what would make it fit, or faster, the cheapest change first.
    ``notes`` say what the plan does not know.
    """

    model: str
    parameters: int
    tokens: int
    optimizer: str
    machine: Machine | None
    smallest: int
    enough: int
    chosen: Prediction | None
    others: tuple[Prediction, ...] = ()
    curve: tuple[Prediction, ...] = ()
    ranks: tuple[PlannedRanks, ...] = ()
    refused: str | None = None
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the model can be trained as asked."""
        return self.chosen is not None and self.refused is None

    @property
    def written_per_day(self) -> float:
        """Bytes written to the drive in a day of steps; 0 where the time of a step is not known."""
        found = self.chosen
        return found.written * 86_400 / found.seconds if found is not None and found.seconds else 0.0

    @property
    def days_of_life(self) -> float | None:
        """Days of training after which the drive's rated life is written; None where either is not known."""
        life = self.machine.rated_life if self.machine is not None else 0.0
        return life / self.written_per_day if life and self.written_per_day else None

    @property
    def stops_paying(self) -> int | None:
        """The number of ranks from which on twice as many no longer pay; None where there is none among ``ranks`` that fit."""
        rows = [row for row in self.ranks if row.fits]
        return next((before.ranks for before, row in pairwise(rows) if not row.pays), None)

    def of_step(self) -> dict[str, Any] | None:
        """Return what a report sets beside a step that was measured: seconds, bytes of the drive, and memory; None where the
        model does not fit."""
        found = self.chosen
        if found is None:
            return None
        timed, machine = bool(found.seconds), self.machine
        by = "no machine" if machine is None else f"with the rates of {machine.name or 'a machine'}"
        return {
            "seconds": found.seconds if timed else None,
            "waiting": found.waiting if timed else None,
            "read": found.read,
            "written": found.written,
            "process": found.memory.process,
            "activations": found.memory.activations,
            "by": f"tiered.plan, {by}.",
        }

    def as_json(self) -> dict[str, Any]:
        """Return the plan as a value for ``json.dumps``; bytes, seconds and counts are numbers."""
        found = asdict(self)
        return found | {"fits": self.fits, "written_per_day": self.written_per_day, "days_of_life": self.days_of_life}


class Planner:
    """Predictions for one model on one machine: dry runs are kept, because budgets and modes share them."""

    def __init__(
        self, subject: Subject, machine: Machine | None, rule: UpdateRule, policy: Policy, passes: int,
        measure: bool = False, rehearsed: int = REHEARSED, progress: Told | None = None,
    ) -> None:
        self._told, self._played, self._share = progress, 0, 0.0
        self.expected = 1
        """Predictions that are played in all, as far as is known: what is played next depends on what was found."""
        self.subject, self.machine, self._rule, self._policy, self.passes = subject, machine, rule, policy, passes
        self._rehearsed = rehearsed
        self._updates_whole = updates_whole(rule)
        self._divided: dict[tuple[int, int, bool, bool], ModelPlan] = {}
        self._sizes: dict[tuple[int, int, bool, int], list[UnitSizes]] = {}
        self._steps: dict[tuple[Choice, int, int], StepNotes] = {}
        self._together_steps: dict[Choice, tuple[StepNotes, float]] = {}
        self._predicted: dict[tuple[Choice, bool, bool], Prediction] = {}
        self._measured: dict[str, float] = {}
        self._measures = measure and not (machine is not None and machine.hbm)  # a device is not measured here
        self._long: dict[str, int] = {}
        self.notes: dict[str, None] = {}

    def divided(self, dram: int, ranks: int = 1, *, saves: bool = False, largest_alone: bool = False) -> ModelPlan:
        """Return the model's units for a budget; ``saves`` as in ``Limits.of``, ``largest_alone`` as in ``divide``."""
        key = dram, ranks, saves, largest_alone
        if key not in self._divided:
            limits = Limits.of(dram, ranks, saves=saves, converts=self._policy.converts)
            self._divided[key] = divide(self.subject.model, limits, {}, self._policy, ranks, largest_alone=largest_alone)
        return self._divided[key]

    def sizes(self, dram: int, ranks: int = 1, together: int = 1, *, saves: bool = False) -> list[UnitSizes]:
        """Return the tensors of each unit for a budget, with so many chunks of optimizer states as one."""
        key = dram, ranks, saves, together
        if key not in self._sizes:
            plan = self.divided(dram, ranks, saves=saves)
            larger = replace(plan.limits, chunk=plan.limits.chunk * together)
            self._sizes[key] = sizes_of(replace(plan, limits=larger), NAME, self._rule)
        return self._sizes[key]

    def fits(self, choice: Choice) -> bool:
        """Return whether ``zero.page``, and the optimizer, take the model with the budget of ``choice``."""
        return self.smallest(choice, choice.dram) == choice.dram

    def smallest(self, way: Choice | None = None, least: int = SMALLEST_DRAM) -> int:
        """Return the bytes of the smallest budget, from ``least`` on, with which ``zero.page``, and the optimizer, take the
        model.
        """
        dram = max(least, SMALLEST_DRAM)
        while True:
            saves = way is not None and way.saves
            needed = self._needed(self.divided(dram, saves=saves, largest_alone=True), saves)
            if needed <= dram:
                return dram
            dram = needed

    def _needed(self, plan: ModelPlan, saves: bool) -> int:
        """Return the bytes of the smallest budget for a model that is divided so. Raises MisuseError where its rule updates
        whole parameters, and one is divided whatever the budget."""
        needed = smallest_pool(plan, self.subject.model, saves=saves)
        if not self._updates_whole:
            return needed
        for unit, sizes in zip(plan.units, sizes_of(plan, NAME, self._rule), strict=True):
            if not sizes.gradient:
                continue
            found = 3 * unit.nbytes + sizes.states
            for placement in unit.placements:
                if placement.sliced is not None:  # unless the parameter is at most a third of the budget
                    if placement.sliced.rows is None:
                        raise MisuseError(
                            f"{type(self._rule).__name__} updates whole parameters, and {placement.name!r} is one of several "
                            "slices of a parameter: plan another optimizer"
                        )
                    whole = Limits.pool_for(placement.whole.nbytes, saves=saves, converts=self._policy.converts)
                    found = max(found, whole)
            needed = max(needed, -(-found // 4096) * 4096)
        return needed

    def step(self, choice: Choice, ranks: int = 1, together: int | None = None) -> StepNotes:
        """Return what a step asks of the store, of one of so many ranks. So many chunks of optimizer states are one
        (``together``; None: as many as are played as one). Raises MisuseError where nothing of the model can be computed again,
        and what ``dry_run`` raises."""
        plan = self.divided(choice.dram, ranks, saves=choice.saves)
        if choice.computes_again and not split_modules(self.subject.model, plan, choice.micro_batch):
            raise MisuseError(
                f"{choice}: no module of this model holds all of its parameters while it runs, so none can be computed "
                "again: use activations='store', or a larger memory budget"
            )
        together = self._together(choice, ranks) if together is None else together
        key = choice, ranks, together
        if key not in self._steps:
            limits = replace(plan.limits, chunk=plan.limits.chunk * together)
            training = TrainingSetup(
                *(choice.dram, limits, self._rule, self._policy, choice.update, self.passes, choice.activations),
                *(choice.micro_batch, ranks, NAME),
            )
            found = self._steps[key] = self.subject.train(training)
            if self._measures and self.machine is not None:
                self._measured |= measure_operations(found, self.machine, known=self._measured)
        return self._steps[key]

    def _together(self, choice: Choice, ranks: int = 1) -> int:
        """Return how many chunks of optimizer states are played as one: no more than an eighth of the budget has one state of,
        because all states of a chunk need room beside the unit and its gradient."""
        leases = _leases_of_states(self.sizes(choice.dram, ranks, saves=choice.saves))
        most = max(1, choice.dram // 8 // (4 * self.divided(choice.dram, ranks, saves=choice.saves).limits.chunk))
        return 1 if leases <= self._rehearsed else min(-(-leases // min(COARSE, self._rehearsed)), most)

    def seconds(self) -> Seconds:
        return no_time if self.machine is None else Timing(self.machine, self._measured)

    def predict(self, choice: Choice, *, briefly: bool = False, compared: bool = True) -> Prediction:
        """Play steps of a choice, fewer of them ``briefly``; and where activations wait in the store, also those of a choice
        with activations in memory (``compared``, for ``Prediction.in_memory``). Raises CapacityError where it does not fit,
        MisuseError where it cannot be."""
        key = choice, briefly, compared
        if key not in self._predicted:
            self._tell(f"{choice}, {format_size(choice.dram)}")
            found = self._predict(choice, briefly)
            self._predicted[key] = replace(found, in_memory=self._in_memory(choice)) if compared else found
        return self._predicted[key]

    def takes_long(self, choice: Choice) -> bool:
        """Return whether a step of a choice takes long to play."""
        return len(self.step(choice).operations) > MANY

    def _tell(self, what: str) -> None:
        """Tell that another prediction begins, which may raise, to stop. The share that is done never becomes less."""
        if self._told is not None:
            done = self._played / max(self.expected, self._played + 1)
            self._share = max(self._share, min(0.99, done))
            self._told(f"playing steps, number {self._played + 1}: {what}", self._share)
        self._played += 1

    def _predict(self, choice: Choice, briefly: bool) -> Prediction:
        if not self.fits(choice):
            raise CapacityError(
                f"a budget of {choice.dram:,} bytes of DRAM is too small for this model: the smallest that works is "
                f"{self.smallest(choice, choice.dram):,} bytes"
            )
        step, sizes, together = self.step(choice), self.sizes(choice.dram, saves=choice.saves), self._together(choice)
        touches = len(step.touches()[0])
        if together > 1:
            self.notes["chunks of optimizer states are taken together in the rehearsal, of which a step has very many"] = None
            coarse = self.sizes(choice.dram, together=together, saves=choice.saves)
            touches += _leases_of_states(sizes) - _leases_of_states(coarse)
        if touches > LONGEST:
            self._long[str(choice)] = max(touches, self._long.get(str(choice), 0))
        rates = _in_blocks(DriveRates(1e9, 1e9) if self.machine is None else self.machine.drive, together)
        step, least = self._played_step(choice)
        warm_up, counted = (1, 1) if briefly or self.takes_long(choice) else (WARM_UP, COUNTED)
        found = rehearse(step, choice.dram, rates, self.seconds(), warm_up=warm_up, counted=counted)
        sending, memory = self._sending(sizes, step, found), self._memory(choice, sizes, step, found)
        return Prediction(
            choice=choice,
            read=found.read,
            written=found.written,
            least_bytes=float(least),
            seconds=max(found.seconds, sending) if self.machine is not None else 0.0,
            sending=sending,
            waiting=found.waiting if self.machine is not None else 0.0,
            drive_busy=found.busy if self.machine is not None else 0.0,
            memory=memory,
            fits=self._has(memory),
            touches=touches,
            by_work=found.by_work,
            offloading=found.offloading if choice.saves else None,
        )

    def _played_step(self, choice: Choice) -> tuple[StepNotes, float]:
        """Return a step as it is played, with slices and pieces taken together, and the bytes that it moves at least."""
        if choice not in self._together_steps:
            step = self.step(choice)
            of_activations = sum(key in step.activations for key in step.touches()[0])
            step = in_groups(slices_in_groups(step, self._slices(step, choice.dram)), self._pieces(choice, of_activations))
            uses = uses_of(step)
            self._together_steps[choice] = step, bytes_moved(*uses, choice.dram, plan_retention(*uses, choice.dram))
        return self._together_steps[choice]

    def seconds_at_least(self, choice: Choice) -> float:
        """Return the seconds in which the drive moves what it must: no step of a choice takes less. Nothing is played."""
        return 0.0 if self.machine is None else self._played_step(choice)[1] / max(self.machine.read, self.machine.write)

    def enough(self, smallest: int) -> int:
        """Return the bytes of the smallest budget with which one would want to run, where ``smallest`` works."""
        sizes = self.sizes(max(smallest, self.subject.nbytes // 16))
        everything = sum(one.nbytes + one.states + one.gradient for one in sizes)
        return max(min(ENOUGH * smallest, everything), everything // SHARE // 4096 * 4096, smallest)

    def _sending(self, sizes: Sequence[UnitSizes], step: StepNotes, found: Rehearsed) -> float:
        """Return the seconds in which a link moves what a step sends to a device and back, beside computing, both ways at once.
        Parameters come up in forward and in backward where the device's memory does not hold them beside activations, and once
        a step where it does, because the host updates them; gradients go down. Activations that wait in the store go both ways.
        """
        machine = self.machine
        if machine is None or not machine.hbm:
            return 0.0
        parameters, gradients = sum(one.nbytes for one in sizes), sum(one.gradient for one in sizes)
        trained = sum(one.nbytes for one in sizes if one.gradient) / max(1, parameters)
        held = min(parameters, max(0, machine.hbm - step.peak))
        up = 2 * self.passes * (parameters - held) + trained * held + found.offloading.restored
        down = self.passes * gradients + found.offloading.stored
        return max(up, down) / machine.link

    def _has(self, memory: PlannedMemory) -> bool:
        """Return whether the machine has that memory."""
        return self.over_dram(memory) <= 0 and self.over_hbm(memory) <= 0

    def over_dram(self, memory: PlannedMemory) -> int:
        """Return the bytes that the machine lacks for the process: 0 or less where it has them, or is not known."""
        return 0 if self.machine is None or not self.machine.dram else memory.process - self.machine.room

    def over_hbm(self, memory: PlannedMemory) -> int:
        """Return the bytes that its device lacks: 0 or less where it has them, or there is none."""
        return 0 if self.machine is None or not self.machine.hbm else memory.device - self.machine.hbm

    def in_process(self, activations: int) -> int:
        """Return the bytes of activations that are in the process: those of a device are in its memory."""
        return 0 if self.machine is not None and self.machine.hbm else activations

    def on_device(self, choice: Choice, peak: int, parameters: int) -> int:
        """Return the bytes that a device has, with activations of ``peak``: at least what can be paged there at all."""
        if self.machine is None or not self.machine.hbm:
            return 0
        return max(peak + self.smallest(choice), min(self.machine.hbm, peak + parameters))

    def may_fit(self, choice: Choice) -> bool:
        """Return whether the machine may have the memory of a choice, with the smallest budget: by what is not played."""
        machine, peak = self.machine, self.step(choice).peak
        if machine is None:
            return True
        process = machine.base + IN_TRANSIT + OPEN + self.in_process(peak) + min(choice.dram, self.smallest(choice))
        return (not machine.dram or process <= machine.room) and self.on_device(choice, peak, 0) <= machine.hbm

    def _in_memory(self, choice: Choice) -> float | None:
        """Return the seconds of a step whose activations stay in memory, beside one whose activations do not."""
        if choice.activations != "store" or self.machine is None:
            return None
        return self.predict(replace(choice, activations="memory")).seconds

    def note_long(self) -> None:
        """Note which choices have steps that lease more tensors than a store follows."""
        if self._long:
            steps = " and ".join(f"{touches:,} tensors ({choice})" for choice, touches in self._long.items())
            self.notes[
                f"a step leases {steps}, and a store follows orders of up to {LONGEST:,}: it would evict by last use, and move "
                "more bytes than this plan says"
            ] = None

    def note_assumed(self, found: Prediction) -> None:
        """Note where the longest part of a step takes so long by a number of the machine that nobody measured or gave."""
        machine, by = self.machine, DECIDES
        parts = dict(found.by_work)
        if machine is None or not found.seconds:
            return
        if machine.hbm:
            by = DECIDES | {"forward": "device_flops", "backward": "device_flops", "sending": "link"}
            parts["sending"] = found.sending
        longest = max(parts, key=lambda kind: parts[kind], default="")
        if parts.get(longest, 0.0) < found.waiting or (self._measured and longest in ("forward", "backward")):
            return
        number = by.get(longest)
        if number is not None and machine.assumes(number):
            by_hand = number in ("device_flops", "link")
            self.notes[
                f"the longest part, {longest} {parts[longest]:.2f} s, is by the default {number}={getattr(machine, number):g}: "
                f"{'give it in the file of --machine' if by_hand else 'tiered info --machine measures it'}"
            ] = None

    def optimum(self, choice: Choice) -> float:
        """Return the bytes that no way to serve a step of a choice goes below, in the long run: of four steps without those of
        two. Raises MisuseError without scipy."""
        keys, uses, bytes_of = self.step(choice, together=1).touches()
        known = dict(zip(keys, bytes_of, strict=True))  # in whole slots they would take more room, and the bound would be none
        two, four = (
            lower_bound(list(zip(keys, uses, strict=True)) * count, known, choice.dram, final_writeback=False)
            for count in (2, 4)
        )
        return (four - two) / 2

    def with_ranks(self, choice: Choice, ranks: int, tokens: int) -> PlannedRanks:
        """Play steps of one of several ranks. Raises CapacityError where they do not fit."""
        machine = self.machine
        assert machine is not None
        if self._updates_whole:
            raise MisuseError(
                f"{type(self._rule).__name__} updates whole parameters, which ranks gather for that, and a plan of ranks knows "
                "optimizers that update elements: leave ranks out, or plan another optimizer"
            )
        plan = self.divided(choice.dram, ranks, saves=choice.saves)
        needed = smallest_pool(plan, self.subject.model, saves=choice.saves, shares=ranks)
        if needed > choice.dram:
            raise CapacityError(f"{_counted(ranks)} need {format_size(needed)} of DRAM each")
        self._tell(_counted(ranks))
        step, together = self.step(choice, ranks), self._together(choice, ranks)
        sharing = min(ranks, machine.ranks_per_node)
        drive = _in_blocks(DriveRates(machine.read / sharing, machine.write / sharing, machine.transfer), together)
        found = rehearse(step, choice.dram, drive, Timing(machine, self._measured, ranks), warm_up=WARM_UP, counted=COUNTED)
        sent = sum(one.nbytes for one in step.operations if isinstance(one, WorkNote) and one.kind in ("gather", "reduce"))
        seconds = max(found.seconds, self._sending(self.sizes(choice.dram, saves=choice.saves), step, found))
        memory = self._memory(choice, self.sizes(choice.dram, ranks, saves=choice.saves), step, found)
        return PlannedRanks(
            ranks=ranks,
            seconds=seconds,
            tokens_per_second=ranks * tokens / seconds,
            sent=sent * (ranks - 1) / ranks,
            read=found.read,
            written=found.written,
            waiting=found.waiting,
            network=found.by_work.get("network", 0.0),
            process=memory.process,
            node=sharing * memory.process,
            refused=self._refused_on_node(choice, memory, ranks, needed),
        )

    def _refused_on_node(self, choice: Choice, memory: PlannedMemory, ranks: int, needed: int) -> str | None:
        """Return why a node does not have the memory of its share of so many ranks, each of which takes a budget of ``needed``
        bytes at least, and the largest budget that it has memory for; None where it has the memory."""
        machine = self.machine
        assert machine is not None
        sharing = min(ranks, machine.ranks_per_node)
        more = sharing * memory.process - machine.room
        if not machine.dram or more <= 0:
            return None
        beside = memory.process - memory.pool - choice.dram // TABLES
        largest = budget_text(max(0, machine.room // sharing - beside) * TABLES // (TABLES + 1))
        fits = f"dram={largest!r} is the most that fits"
        if parse_size(largest) < needed:
            fits = f"each needs a budget of {format_size(needed)}: plan fewer ranks of a node"
        return (
            f"{_counted(ranks)}: the {sharing:,} of a node would take "
            f"{format_size(sharing * memory.process)}, {format_size(more)} too much; {fits}"
        )

    def _slices(self, step: StepNotes, dram: int) -> int:
        """Return how many slices of a parameter, such as experts, are played together: a quarter of them at most, and no more
        than an eighth of the budget has, because all states of them need room at a time."""
        touches, most, largest = slices_of(step)
        together = max(1, min(-(-touches // self._rehearsed), most // 4, dram // 8 // max(1, largest)))
        if together > 1:
            self.notes["slices of parameters, such as experts, are taken together in the rehearsal"] = None
        return together

    def _pieces(self, choice: Choice, touches: int) -> int:
        """Return how many pieces of an activation are played together, of which a step touches so many: no more than an eighth
        of the budget, because they need room at a time."""
        piece = piece_of(choice.dram)
        most = max(1, choice.dram // 8 // piece)
        together = max(1, min(-(-touches // (self._rehearsed // SAVED)), most))
        if together > 1:
            self.notes["pieces of activations are taken together in the rehearsal, of which a step has very many"] = None
        return together

    def _memory(self, choice: Choice, sizes: Sequence[UnitSizes], step: StepNotes, found: Rehearsed) -> PlannedMemory:
        parameters, states = sum(one.nbytes for one in sizes), sum(one.states for one in sizes)
        gradients = sum(one.gradient for one in sizes)
        if choice.update == "in_backward":
            gradients = max((one.gradient for one in sizes), default=0)
        everything = parameters + states + gradients
        passed = int(found.offloading.stored + found.offloading.restored)
        workspace = IN_TRANSIT + OPEN + choice.dram // TABLES + min(KEPT + SELDOM, passed)
        base = self.machine.base if self.machine is not None else 0
        return PlannedMemory(
            parameters=parameters,
            gradients=gradients,
            states=states,
            activations=step.peak,
            workspace=workspace,
            pool=found.peak,
            drive=max(0, everything if everything > choice.dram else parameters + states),
            process=base + found.peak + self.in_process(step.peak) + workspace,
            device=self.on_device(choice, step.peak, parameters),
        )


@dataclass(frozen=True)
class Sweep:
    """What ``tiered.plan`` predicts beside what was asked for.

    ``budgets``: other budgets of DRAM, bytes or "2GiB" (``Plan.curve``, for both update modes). ``ranks``: numbers of ranks, up
    to thousands, to simulate (``Plan.ranks``; they need a ``machine``, whose ``network``, ``latency`` and ``ranks_per_node``
    they use). Raises MisuseError for what is no size, and no number of ranks.
    """

    budgets: Sequence[int | str] = ()
    ranks: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name, what in (("budgets", "bytes, or a text such as '2GiB'"), ("ranks", "a number of ranks")):
            object.__setattr__(self, name, tuple(listed(getattr(self, name), f"{name} are several, each {what}")))
        for budget in self.budgets:
            parse_size(budget)
        for one in self.ranks:
            whole_number("each of ranks is a number of ranks", one)


USUAL, NOTHING = Workload(), Sweep()


@torch.inference_mode(False)  # in which nothing can be trained
def plan(
    model: nn.Module | str | os.PathLike[str] | Numbers | Mapping[str, Any],
    *,
    workload: Workload = USUAL,
    machine: Machine | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dram: int | str | None = None,
    optimizer: OptimizerName = "adamw",
    update: Update | None = None,
    activations: Activations | None = None,
    micro_batch: int | Sequence[int] | None = None,
    storage: torch.dtype | None = None,
    quantize: Quantize | None = None,
    measure: bool = False,
    sweep: Sweep = NOTHING,
    optimum: bool = False,
    progress: Told | None = None,
) -> Plan:
    """Plan a training: does ``model`` fit, what does a step move, and how long does it take?

    ``model``: an ``nn.Module`` (on any device; its values are not looked at), a folder with a ``config.json`` of transformers,
    a name on the Hugging Face hub (``"org/name"``, of which only that file is fetched), or numbers (``tiered.Numbers``, or a
    mapping of them). It is run once on the meta device, without memory.
    ``workload``: what a step computes, see ``tiered.Workload`` (default: one sequence of 1,024 tokens).
    ``machine``: a ``tiered.Machine``, the file of one (``tiered info --machine FILE`` measures it), or numbers by name
    (``read`` and ``write``, the drive's bytes per second, at least). Without it the plan has bytes and no seconds.
    ``dram``: the budget, bytes or "2GiB" (default: half of the machine's memory, or of what is available here).
    ``update``, ``activations``: "on_fetch" or "in_backward", "memory", "recompute" or "store" (None: the fastest that fits is
    chosen). ``micro_batch``: into how many parts the batch is divided inside units; of several numbers the fastest that fits is
    chosen (None: 1).
    ``storage``, ``quantize``: as in ``zero.Policy``: with the latter what of the model is frozen is packed, as the base of an
    adapter (``peft.get_peft_model`` of a model on the meta device makes one to plan). ``measure``: time the operations of the
    model on this machine's CPU, some seconds, instead of computing with the machine's rates. ``sweep``: other budgets, and
    numbers of ranks, to predict as well.
    ``optimum``: also say how few bytes any way to serve a step could move (``Prediction.optimum``); it needs scipy, and seconds
    to minutes. ``progress``: called with what is played next, and the share of all that was; it may raise, to stop.

    Bytes are those of the store's own code, played in a store without memory; seconds are estimates. Raises MisuseError for
    what cannot be planned; a model that does not fit is an answer (``Plan.refused``), not an error.
    """
    one_of("optimizer", optimizer, CHOICES)
    one_of("update", update, (*get_args(Update), None))
    one_of("activations", activations, (*get_args(Activations), None))
    one_of("quantize", quantize, (*QUANTIZE, None))
    expect_type(workload, Workload, "workload is a tiered.Workload")
    expect_type(sweep, Sweep, "sweep is a tiered.Sweep")
    expect_type(measure, bool, "measure is True or False")
    expect_type(optimum, bool, "optimum is True or False")
    accumulate = workload.accumulate
    parts = _parts(micro_batch, activations)
    if accumulate > 1 and update == "in_backward":
        raise MisuseError("update='in_backward' makes each backward a step: leave accumulate out, or use update='on_fetch'")
    found = None if machine is None else Machine.of(machine)
    if sweep.ranks and found is None:
        raise MisuseError("ranks need machine=, with its network")
    subject = subject_of(model, workload)
    _refuse_packed(subject, quantize)
    rule = CHOICES[optimizer].usual
    planner = Planner(subject, found, rule, Policy(storage=storage, quantize=quantize), accumulate, measure, progress=progress)
    budget = parse_size(dram) if dram is not None else _half(found)
    tokens = _tokens(subject) * accumulate
    divided: Sequence[Activations] = [activations or "memory"]  # which compute again anyway
    whole: Sequence[Activations] = [activations] if activations else get_args(Activations)
    ways = [
        Choice(activations=way, dram=budget, micro_batch=number)
        for number in parts
        for way in (whole if number == 1 else divided)
    ]
    smallest_of = {way: planner.smallest(way, budget) for way in ways}
    smallest = min(smallest_of.values())
    parameters, enough = subject.parameters, planner.enough(min(planner.smallest(way) for way in ways))
    if budget < smallest:
        return Plan(
            model=subject.name, parameters=parameters, tokens=tokens, optimizer=optimizer, machine=found, smallest=smallest,
            enough=enough, chosen=None,
            refused=f"{format_size(budget)} of DRAM is too little: the smallest budget that works is {format_size(smallest)}"
            f"{with_unit(budget if dram is None else dram) if budget < SMALLEST_DRAM else ''}",
            changes=(f"dram={budget_text(-(-enough * 101 // 100))!r}", *_smaller_units(planner, budget)),
        )
    updates: Sequence[Update] = [update] if update else (["on_fetch"] if accumulate > 1 else ["on_fetch", "in_backward"])
    planner.expected = len(ways) * len(updates) + len(sweep.budgets) * len(updates) + len(sweep.ranks)
    predictions = _predictions(planner, [way for way in ways if smallest_of[way] <= budget], updates)
    chosen, *rest = sorted(predictions, key=_order)
    others = tuple(rest)
    refused = _refused(planner, chosen)
    changes = _to_fit(planner, chosen, _rows_of(subject)) if refused else _faster(chosen, planner, update, activations)
    if optimum:
        chosen = replace(chosen, optimum=planner.optimum(chosen.choice))
    planner.note_assumed(chosen)
    curve = _curve(planner, chosen.choice, sweep.budgets, updates)
    rows = _rows(planner, chosen.choice, sweep.ranks, tokens)
    planner.note_long()
    if workload.inputs is None and (beyond := beyond_positions(subject.model, workload.sequence)) is not None:
        planner.notes[beyond] = None
    return Plan(
        model=subject.name, parameters=parameters, tokens=tokens, optimizer=optimizer, machine=found,
        smallest=planner.smallest(chosen.choice), enough=enough, chosen=chosen, others=others,
        curve=curve, ranks=rows, refused=refused, changes=changes, notes=tuple(planner.notes),
    )


def _refuse_packed(subject: Subject, quantize: Quantize | None) -> None:
    """Raise MisuseError where all of a model would be packed, so that nothing is trained."""
    if quantize is not None:
        units = divide(subject.model, Limits.of(1 << 40), {}, Policy(quantize=quantize)).units
        if all(unit.read_only for unit in units):
            raise MisuseError(
                f"quantize={quantize!r} packs what is frozen, and {subject.name} has nothing, or too little, that is: plan a "
                "model with an adapter (peft.get_peft_model), or leave quantize out"
            )


def _refused(planner: Planner, chosen: Prediction) -> str | None:
    """Return why the machine does not have the memory that a choice takes; None where it has."""
    machine, memory, found = planner.machine, chosen.memory, list[str]()
    if machine is None:
        return None
    activations = format_size(memory.activations)
    if planner.over_dram(memory) > 0:
        of_them = f" (activations {activations})" if planner.in_process(memory.activations) else ""
        found.append(
            f"the process would take {format_size(memory.process)}{of_them}, and the machine has {format_size(machine.dram)}, "
            f"{format_size(machine.dram - machine.room)} of it for the system"
        )
    if planner.over_hbm(memory) > 0:
        found.append(
            f"activations of {activations}, and the units beside them, would take {format_size(memory.device)} of the device, "
            f"and it has {format_size(machine.hbm)}"
        )
    return "; ".join(found) or None


def _parts(micro_batch: int | Sequence[int] | None, activations: Activations | None) -> list[int]:
    """Return the numbers of parts of a batch that are asked for, the smallest first."""
    given: Sequence[Any] = [1] if micro_batch is None else micro_batch if isinstance(micro_batch, Sequence) else [micro_batch]
    for one in given or [0]:
        whole_number("micro_batch is a number of parts, or several", one)
    if activations == "store" and max(given) > 1:
        raise MisuseError(
            f"micro_batch={max(given)} computes the inside of units again in any case, so nothing is left for "
            "activations='store': leave one of them out"
        )
    return sorted(set(given))


def _predictions(
    planner: Planner, ways: Sequence[Choice], updates: Sequence[Update]
) -> list[Prediction]:
    """Play each way with each update mode. No way is faster than activations in memory: where those fit, the others are played
    with the better update mode alone. Of steps that take long to play the others are left out once one that fits is as fast as
    that, and where activations do not fit the better mode of the first way is that of all; and updates on fetch, where moving
    their bytes takes longer than a whole step with updates in backward."""
    found: list[Prediction] = []
    refusals: list[MisuseError] = []
    for way in ways:
        modes = updates
        kept = [one for one in found if not one.choice.saves and one.fits]
        long = bool(found) and planner.takes_long(found[0].choice)
        if way.saves and (kept or long):
            modes = [min(kept or found, key=_order).choice.update]
            planner.expected -= len(updates) - 1
        if way.saves and long and (fastest := _as_fast_as_in_memory(found)):
            planner.expected -= 1
            planner.notes[
                f"no way is faster than activations={fastest.choice.activations!r}: those that were left out are planned by "
                "activations='recompute' or 'store'"
            ] = None
            continue
        try:
            if planner.takes_long(replace(way, update=modes[-1])):
                modes = modes[::-1]  # updates in backward first: they move fewer bytes
            for choice in (replace(way, update=one) for one in modes):
                if _is_slower(planner, choice, found):
                    planner.expected -= 1
                    planner.notes[
                        f"update={choice.update!r} is left out: no step is much faster with it than with "
                        f"update={found[-1].choice.update!r}; name it to plan it"
                    ] = None
                else:
                    found.append(planner.predict(choice, briefly=bool(kept) and way.saves))
        except MisuseError as refusal:
            refusals.append(refusal)
    if not found:
        raise refusals[0]
    for one in refusals:
        planner.notes[str(one)] = None
    return found


def _is_slower(planner: Planner, choice: Choice, found: Sequence[Prediction]) -> bool:
    """Return whether a step that takes long to play cannot be much faster than one that was found with another update mode,
    which keeps the same activations: that one hardly waits, or the drive takes longer for the bytes of this one."""
    same = [one for one in found if replace(one.choice, update=choice.update) == choice]
    if not same or not planner.takes_long(same[0].choice):
        return False
    other = min(same, key=_order)
    return AS_FAST * other.processor >= other.seconds > 0 or planner.seconds_at_least(choice) >= other.seconds > 0


def _as_fast_as_in_memory(found: Sequence[Prediction]) -> Prediction | None:
    """Return the fastest prediction that fits, where it takes no longer than activations in memory would, fit or not."""
    best = min((one for one in found if one.fits), key=_order, default=None)
    least = min((one.seconds for one in found if not one.choice.saves), default=0.0)
    return best if best is not None and best.seconds <= AS_FAST * least else None


def _curve(
    planner: Planner, choice: Choice, budgets: Sequence[int | str], updates: Sequence[Update]
) -> tuple[Prediction, ...]:
    """Return predictions for each update mode and each of the budgets that work, and say which do not."""
    fitting = []
    for dram in sorted(parse_size(one) for one in budgets):
        smallest = planner.smallest(choice, dram)
        if dram < smallest:
            planner.notes[
                f"a budget of {format_size(dram)} is left out: the smallest that works is {format_size(smallest)}"
            ] = None
        else:
            fitting.append(dram)
    return tuple(planner.predict(replace(choice, update=update, dram=dram)) for update in updates for dram in fitting)


def _rows(planner: Planner, choice: Choice, ranks: Sequence[int], tokens: int) -> tuple[PlannedRanks, ...]:
    """Return one row for each number of ranks, with what each brings beside the one before."""
    rows: list[PlannedRanks] = []
    for count in sorted(set(ranks)):
        try:
            row = planner.with_ranks(choice, count, tokens)
        except CapacityError as error:
            planner.notes[str(error)] = None
            continue
        before = next((one for one in reversed(rows) if one.fits), None)
        if before is not None:
            more = row.tokens_per_second / max(1e-12, before.tokens_per_second) - 1
            row = replace(row, pays=more >= PAYS * (count / before.ranks - 1))
        rows.append(row)
    return tuple(rows)


def _counted(ranks: int) -> str:
    return f"{ranks:,} rank{'' if ranks == 1 else 's'}"


def _in_blocks(rates: DriveRates, together: int) -> DriveRates:
    """Return a drive that moves so many blocks at a time: where chunks are taken together, the blocks of them are."""
    return replace(rates, block=rates.block * max(1, together))


def _order(one: Prediction) -> tuple[bool, float, bool, float, int]:
    """Rank predictions: of those that fit the fastest first; where no time is known, or it is the same in six digits, those
    that compute nothing twice, by the bytes that they move, and by their memory."""
    moved = one.read + one.written
    return not one.fits, float(f"{one.seconds:.6g}"), one.choice.computes_again, moved, one.memory.process


def _half(machine: Machine | None) -> int:
    return max(SMALLEST_DRAM, machine.dram // 2) if machine is not None and machine.dram else default_dram()


def _tokens(subject: Subject) -> int:
    """Return the elements of the first whole-number input; 0 where there is none."""
    given = (*subject.args, *subject.kwargs.values())
    found = next((one for one in given if isinstance(one, torch.Tensor) and not one.is_floating_point()), None)
    return 0 if found is None else found.numel()


def _rows_of(subject: Subject) -> int:
    """Return the leading size of the first tensor that the model is given, which is the batch; 1 where there is none."""
    given = (*subject.args, *subject.kwargs.values())
    found = next((one for one in given if isinstance(one, torch.Tensor) and one.dim()), None)
    return 1 if found is None else found.size(0)


def _smaller_units(planner: Planner, budget: int) -> list[str]:
    """Return what else than the smallest budget would do; a budget below the smallest of a store nothing does."""
    plan = planner.divided(budget)
    largest = max(plan.units, key=lambda unit: unit.nbytes, default=None)
    if largest is None or budget < SMALLEST_DRAM or largest.nbytes <= budget / 4:
        return []
    return [f"a largest unit of less than {format_size(budget / 4)}: {largest.name!r} has {format_size(largest.nbytes)}"]


def _faster(
    chosen: Prediction, planner: Planner, update: Update | None, activations: Activations | None
) -> tuple[str, ...]:
    """Return what would make a step faster, the cheapest change first."""
    if not chosen.seconds:
        return ()
    found, modes = [], list[Choice]()
    waits = chosen.waiting > 0.1 * chosen.seconds
    if (waits or chosen.choice.saves) and (update is None) is not (activations is None):  # who names both has chosen
        modes_of_step: Sequence[Update] = get_args(Update) if planner.passes == 1 else ["on_fetch"]  # else a backward is a step
        modes_of_step = [update] if update else modes_of_step
        modes = [
            replace(chosen.choice, update=one, activations=way)
            for one in modes_of_step
            for way in ([activations] if activations else get_args(Activations))
            if way == chosen.choice.activations or (way == "memory" and chosen.choice.saves)  # the others are not faster
        ]
    modes = [mode for mode in modes if mode != chosen.choice and planner.fits(mode)]
    twice = replace(chosen.choice, dram=2 * chosen.choice.dram)
    memory = chosen.memory
    more_memory = min(twice.dram, memory.parameters + memory.gradients + memory.states) - memory.pool
    has_it = planner.over_dram(replace(memory, process=memory.process + more_memory)) <= 0
    doubled = [twice] if waits and has_it and planner.fits(twice) else []
    planner.expected += len(modes) + len(doubled)
    for mode in modes:
        other = planner.predict(mode, compared=False)
        if other.fits and other.seconds < 0.95 * chosen.seconds:
            found.append(f"{mode}: {other.seconds:.2f} s a step instead of {chosen.seconds:.2f}")
    for mode in doubled:
        more = planner.predict(mode, compared=False)
        if more.fits and more.seconds < 0.95 * chosen.seconds:
            found.append(f"twice the budget: {more.seconds:.2f} s a step instead of {chosen.seconds:.2f}")
    if waits:
        found.append("more tokens in a step: the drive moves as many bytes for a larger batch")
    return tuple(found)


def _to_fit(planner: Planner, chosen: Prediction, batch: int) -> tuple[str, ...]:
    """Return what would make the training fit into the machine, the cheapest change first: budgets and modes that are enough.
    """
    choice = chosen.choice
    ways: list[tuple[Choice, str]] = [(choice, "")]
    if choice.activations == "memory" and choice.micro_batch == 1:
        ways.append((replace(choice, activations="store"), "activations='store'"))
        ways.append((replace(choice, activations="recompute"), "activations='recompute', about a third more computing"))
        fewer = [replace(choice, micro_batch=number) for number in PARTS if number <= batch]
        ways += [(one, f"micro_batch={one.micro_batch}, about a third more computing") for one in fewer]
    planner.expected += len(ways)
    found: list[tuple[float, str]] = []
    for way, told in ways:
        if way.micro_batch > 1 and any(other for _, other in found):
            break  # a smaller number of parts is enough, or another way
        if not planner.fits(way):
            continue
        try:
            if not planner.may_fit(way):
                continue
            other = planner.predict(way, briefly=True)
        except MisuseError:
            continue
        fewer_bytes = parse_size(budget_text(max(0, other.memory.pool - planner.over_dram(other.memory))))
        if other.fits:
            found.append((other.seconds, told))
        elif planner.over_hbm(other.memory) <= 0 and planner.fits(replace(way, dram=fewer_bytes)):
            mode, comma, aside = told.partition(", ")
            found.append((other.seconds, f"{mode}{', ' if mode else ''}dram={budget_text(fewer_bytes)!r}{comma}{aside}"))
    changes = [told for _, told in sorted(found, key=lambda one: one[0])]
    memory, smallest = chosen.memory, planner.smallest(choice)
    beside = "beside activations and with the smallest budget"
    least = memory.process - planner.in_process(memory.activations) - memory.pool + smallest
    if planner.over_dram(replace(memory, process=least)) > 0:
        changes.append(f"more memory: {beside} the process takes {format_size(least)}")
    elif planner.over_hbm(replace(memory, device=smallest)) > 0:
        changes.append(f"a device with more memory: {beside} it takes {format_size(smallest)}")
    else:
        changes.append(f"a smaller batch or sequence: activations are {format_size(memory.activations)}")
    return tuple(changes)


def uses_of(step: StepNotes) -> tuple[list[str], list[Use], list[int]]:
    """Return the touches of a step: keys, uses, and bytes in whole slots."""
    keys, uses, sizes = step.touches()
    return keys, uses, [-(-size // 4096) * 4096 for size in sizes]


def _leases_of_states(sizes: Sequence[UnitSizes]) -> int:
    """Return how many tensors of states the updates of a step lease."""
    return sum(len(chunk) for one in sizes for chunk in one.chunks)
