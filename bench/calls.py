"""Count the Python functions of ``tiered`` that start for a lease, a commit, and each unit of a step, and their CPU time.

    .venv/bin/python -m bench.calls                             Markdown, two minutes
    .venv/bin/python -m bench.calls --only "commit" --functions 40
    .venv/bin/python -m bench.calls --against CHECKOUT          this checkout beside another one, round by round

Rows (``CASES``) are of tensors of 64 KiB in a pool of 2 MiB, three times as many as fit, and of a model of 16 linear layers
with 256 x 256 weights, whose parameters and moments take twice the pool. Each round does an operation many times where it is
short, and lasts until the store is idle again: until the process has used next to no CPU time for ``QUIET`` seconds.

A call is one start of a Python function whose file is below the folder of the package, or one continuation of a generator or a
coroutine, in any thread. C functions do not count, nor functions without a source file, such as the ``__init__`` of a
dataclass; nor does what a module does when it is imported. The garbage collector is off in a round that is counted.

CPU microseconds are those of all threads of the process, in the kernel too, of rounds in which nothing is counted. Figures are
medians. ``--against`` gives the rounds to a process of each checkout in turn, and takes ratios of neighbouring rounds.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import tiered
from tiered import TieredStore, zero

__all__ = ["CASES", "Case", "Counter", "Round", "counted", "main", "timed", "wait_until_idle"]

POOL, NBYTES, TENSORS, TOGETHER = 2 << 20, 64 << 10, 96, 16
"""Bytes of the pool and of each tensor, how many tensors there are, and how many one lease asks for."""
ORDERED = 4
"""How many times as many tensors are in the order that is followed, in a pool as much larger: read-ahead has a share of it."""
UNITS, WIDTH, BATCH = 16, 256, 8
RESIDENT = 500
"""Leases of a resident tensor in a round."""
PAUSE = 0.002
"""Seconds between two touches of an order: a fetch takes less."""
WARM_UP = 5
"""Rounds before the first that counts: the second step makes the moments, the fourth repeats the third."""
QUIET, IDLE = 0.03, 0.0003
"""The store is idle when the process used less than IDLE seconds of CPU time within QUIET."""
COUNTED, TIMED, PAIRED = 5, 9, 21
"""Rounds that are counted, timed, and timed in turn with another checkout."""


class Round(NamedTuple):
    """What a round does: ``prepare``, which is not measured, then ``operation``. ``waits`` seconds of it are spent in pauses of
    ``PAUSE``, whose CPU time is not the operation's."""

    operation: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    waits: float = 0.0


@dataclass(frozen=True)
class Case:
    """A row: ``each`` is by how many a round's calls are divided, and ``opened(folder)`` opens what the rounds use."""

    name: str
    each: int
    opened: Callable[[str], AbstractContextManager[Round]]


# -- what is measured ----------------------------------------------------------------------------------------------------------


@contextmanager
def tensors(folder: str, times: int = 1) -> Iterator[TieredStore]:
    """Open a store of ``TENSORS`` tensors that are committed, or of ``times`` as many in a pool as much larger."""
    with TieredStore.open(f"{folder}/store", dram=times * POOL) as store:
        for index in range(times * TENSORS):
            store.put(f"t{index}", torch.zeros(NBYTES, dtype=torch.uint8))
        store.commit()
        yield store


def lease(store: TieredStore, asked: Iterable[str | list[str]]) -> None:
    """Lease what is asked for, one after the other."""
    for one in asked:
        with store.lease(one):
            pass


@contextmanager
def of_misses(store: TieredStore, expected: int) -> Iterator[None]:
    """Raise RuntimeError where the leases within do not miss as often as ``expected``: something else was measured."""
    before = store.statistics().misses
    yield
    missed = store.statistics().misses - before
    if missed != expected:
        raise RuntimeError(f"{missed} leases had to wait for their tensors instead of {expected}")


@contextmanager
def resident(folder: str) -> Iterator[Round]:
    with tensors(folder) as store:
        lease(store, ["t0"])
        with of_misses(store, 0):
            yield Round(lambda: lease(store, ["t0"] * RESIDENT))


@contextmanager
def prefetched(folder: str) -> Iterator[Round]:
    """Lease all tensors along an order that is followed, each long enough after the one before that it is there."""
    with tensors(folder, ORDERED) as store:
        keys = [f"t{index}" for index in range(ORDERED * TENSORS)]
        store.follow(keys)

        def touches() -> None:
            for key in keys:
                time.sleep(PAUSE)
                lease(store, [key])

        yield Round(touches, waits=PAUSE * len(keys))


@contextmanager
def missing(folder: str) -> Iterator[Round]:
    """Lease all tensors in turn: the least recently used is the next one, and leaves for the one that is asked for."""
    with tensors(folder) as store:
        yield Round(lambda: lease(store, [f"t{index}" for index in range(TENSORS)]))


@contextmanager
def missing_together(folder: str) -> Iterator[Round]:
    with tensors(folder) as store:
        groups = [[f"t{index}" for index in range(at, at + TOGETHER)] for at in range(0, TENSORS, TOGETHER)]
        yield Round(lambda: lease(store, groups))


@contextmanager
def commit(folder: str) -> Iterator[Round]:
    with tensors(folder) as store:

        def change() -> None:
            with store.lease("t0", access="write") as tensor:
                tensor.add_(1)

        yield Round(store.commit, change)


class Training:
    """A model that is paged, and its training."""

    def __init__(self, store: TieredStore, model: nn.Module) -> None:
        self.store, self.model = store, zero.page(model, store)
        self.optimizer = zero.AdamW(model.parameters(), lr=1e-4, update="on_fetch")
        self.inputs = torch.randn(BATCH, WIDTH)
        self.loss: torch.Tensor | None = None

    def forward(self) -> None:
        self.loss = self.model(self.inputs).square().mean()

    def backward(self) -> None:
        assert self.loss is not None
        loss, self.loss = self.loss, None
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.optimizer.step()

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        self.forward()
        self.backward()

    def rest(self) -> None:
        """Do what comes between two forward passes."""
        if self.loss is not None:
            self.backward()
            self.step()
            self.optimizer.zero_grad()

    def commit(self) -> None:
        zero.commit(self.model, self.optimizer)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))


@contextmanager
def training(folder: str) -> Iterator[Training]:
    model = layers()
    state = 12 * sum(parameter.numel() for parameter in model.parameters())
    with TieredStore.open(f"{folder}/model", dram=state // 2) as store:
        yield Training(store, model)


@contextmanager
def forward(folder: str) -> Iterator[Round]:
    with training(folder) as trained:
        yield Round(trained.forward, trained.rest)


@contextmanager
def backward(folder: str) -> Iterator[Round]:
    with training(folder) as trained:

        def until_backward() -> None:
            trained.step()
            trained.optimizer.zero_grad()
            trained.forward()

        trained.gradients()
        yield Round(trained.backward, until_backward)


@contextmanager
def step(folder: str) -> Iterator[Round]:
    with training(folder) as trained:
        yield Round(trained.step, trained.gradients)


@contextmanager
def commit_model(folder: str) -> Iterator[Round]:
    with training(folder) as trained:

        def one_step() -> None:
            trained.gradients()
            trained.step()

        yield Round(trained.commit, one_step)


@contextmanager
def inference(folder: str) -> Iterator[Round]:
    model = layers()
    with TieredStore.open(f"{folder}/model", dram="64MiB") as store, torch.no_grad():
        paged = zero.page(model, store).eval()
        inputs = torch.randn(BATCH, WIDTH)
        yield Round(lambda: paged(inputs))


CASES = (
    Case("lease, resident", RESIDENT, resident),
    Case("lease, prefetched along an order", ORDERED * TENSORS, prefetched),
    Case("lease that misses, one at a time", TENSORS, missing),
    Case("lease that misses, 16 in one lease, each", TENSORS, missing_together),
    Case("forward with pending updates, per unit", UNITS, forward),
    Case("backward, per unit", UNITS, backward),
    Case("optimizer.step(), per parameter", 2 * UNITS, step),
    Case("inference forward, all resident, per unit", UNITS, inference),
    Case("commit of one dirty tensor", 1, commit),
    Case("zero.commit of the model", 1, commit_model),
)


# -- how it is measured --------------------------------------------------------------------------------------------------------


class Counter:
    """Count starts of functions in the Python files below ``folder``, in this thread and in all that start within a ``with``
    block."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}{os.sep}"
        self._known: dict[int, tuple[CodeType, bool]] = {}  # by identity: the same lines in two files are equal code
        self._seen: list[int] = []
        self._counting = False

    def __enter__(self) -> Counter:
        self._before = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before[0])
        threading.setprofile(self._before[1])

    def count(self, operation: Callable[[], object]) -> collections.Counter[str]:
        """Return how often each function started while ``operation`` ran, in any thread, by its file and name."""
        self._seen = []
        collected = gc.isenabled()
        gc.collect()
        gc.disable()
        self._counting = True
        try:
            operation()
        finally:
            self._counting = False
            if collected:
                gc.enable()
        found: collections.Counter[str] = collections.Counter()
        for identity, count in collections.Counter(self._seen).items():
            code = self._known[identity][0]
            if code.co_name != "<module>":
                name = getattr(code, "co_qualname", code.co_name)  # Python 3.11
                found[f"{code.co_filename[len(self._folder) :]}: {name}"] += count
        return found

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not self._counting:
            return
        code = frame.f_code
        known = self._known.get(id(code))
        if known is None:
            known = self._known[id(code)] = code, code.co_filename.startswith(self._folder)
        if known[1]:
            self._seen.append(id(code))  # atomic


def wait_until_idle() -> float:
    """Return when the process has used next to no CPU time for ``QUIET`` seconds; its CPU time when these began."""
    while True:
        before = time.process_time()
        time.sleep(QUIET)
        if time.process_time() - before < IDLE:
            return before


def counted(case: Case, folder: str, rounds: int) -> list[collections.Counter[str]]:
    """Return the calls of each round of ``case``, by function."""
    found = []
    with Counter(Path(tiered.__file__).parent) as counter, case.opened(folder) as made:

        def whole() -> None:
            made.operation()
            wait_until_idle()

        for _ in range(WARM_UP + rounds):
            made.prepare()
            wait_until_idle()
            found.append(counter.count(whole))
    return found[WARM_UP:]


def timed(made: Round) -> float:
    """Return the CPU seconds of a round, those of all threads until the store is idle."""
    made.prepare()
    began = wait_until_idle()
    pauses = 0.0
    if made.waits:
        for _ in range(round(made.waits / PAUSE)):
            time.sleep(PAUSE)
        pauses = time.process_time() - began
    began = time.process_time()
    made.operation()
    return wait_until_idle() - began - pauses


def measured(case: Case, folder: str, rounds: int) -> list[float]:
    """Return the CPU microseconds of each round, of one."""
    with case.opened(folder) as made:
        return [timed(made) / case.each * 1e6 for _ in range(WARM_UP + rounds)][WARM_UP:]


# -- this checkout, and another one --------------------------------------------------------------------------------------------


def serve(parent: str) -> None:
    """Answer each line ``count NUMBER`` with the calls of case NUMBER, ``time NUMBER`` with the microseconds of a round; what a
    case uses stays open while the line stays the same."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        line = sys.stdin.readline()
        while line:
            asked, (what, number) = line, line.split()
            case = CASES[int(number)]
            if what == "count":
                calls = [sum(one.values()) / case.each for one in counted(case, f"{folder}/c{number}", COUNTED)]
                print(json.dumps(statistics.median(calls)), flush=True)
                line = sys.stdin.readline()
                continue
            with case.opened(f"{folder}/t{number}") as made:
                for _ in range(WARM_UP):
                    timed(made)
                while line == asked:
                    print(json.dumps(timed(made) / case.each * 1e6), flush=True)
                    line = sys.stdin.readline()


def against(other: Path, parent: str, chosen: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    from bench.checkouts import beside, in_turn, ratio  # not above: --serve runs this file on other checkouts, older ones too

    print("| operation | calls there | here | CPU microseconds there | here | here / there, median [quartiles] |")
    print("|---|---:|---:|---:|---:|---:|")
    rows = []
    with beside(other, __file__, ["--dir", parent]) as pair:
        for number in chosen:
            calls = [one.asked(f"count {number}") for one in pair]
            there, here = in_turn(pair, f"time {number}", rounds)
            cells = f"{calls[0]:,.0f} | {calls[1]:,.0f} | {statistics.median(there):,.1f} | {statistics.median(here):,.1f}"
            print(f"| {CASES[number].name} | {cells} | {ratio(here, there)} |", flush=True)
            rows.append({"name": CASES[number].name, "calls": calls, "there": there, "here": here})
    return rows


def alone(parent: str, chosen: Sequence[int], rounds: int, functions: int) -> list[dict[str, Any]]:
    from tiered.measuring.meters import Spread

    print("| operation | calls, median [least - most] | CPU microseconds, median [least - most] |")
    print("|---|---:|---:|")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        for number in chosen:
            case = CASES[number]
            found = counted(case, f"{folder}/c{number}", COUNTED)
            calls, used = [sum(one.values()) / case.each for one in found], measured(case, f"{folder}/t{number}", rounds)
            print(f"| {case.name} | {Spread.of(calls).shown(digits=0)} | {Spread.of(used).shown(digits=1)} |", flush=True)
            total = sum(found, collections.Counter[str]())
            by = {name: count / case.each / len(found) for name, count in total.most_common()}
            rows.append({"name": case.name, "calls": calls, "microseconds": used, "functions": by})
    for row in rows if functions else ():
        print(f"\n{row['name']}: the functions that start most often\n\n| function | calls |\n|---|---:|")
        for name, count in list(row["functions"].items())[:functions]:
            print(f"| `{name}` | {count:,.2f} |")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='example: python -m bench.calls --only "lease, resident" --functions 20',
    )
    parser.add_argument("--dir", default="/var/tmp", help="a folder on the drive (default /var/tmp)")
    parser.add_argument("--only", metavar="TEXT", help="only rows whose name has this text")
    parser.add_argument("--rounds", type=int, help=f"rounds that are timed (default: {TIMED}, {PAIRED} with --against)")
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="also the N functions that start most often")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with this other checkout, round by round")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.serve:
        serve(options.dir)
        return 0
    from tiered.cli.output import told_environment
    from tiered.measuring.meters import environment

    chosen = [number for number, case in enumerate(CASES) if (options.only or "") in case.name]
    told = environment()
    print(told_environment(told) + "\n")
    if options.against:
        rows = against(options.against, options.dir, chosen, options.rounds or PAIRED)
    else:
        rows = alone(options.dir, chosen, options.rounds or TIMED, options.functions)
    if options.json:
        Path(options.json).write_text(json.dumps({"environment": told, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
