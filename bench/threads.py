"""Who runs where: a step with the store's threads arranged otherwise, beside the same step with them as they are.

    .venv/bin/python -m bench.threads --drive /mnt/nvme --layers 24 --width 768 --heads 12 --dram 400MiB --rounds 12
    .venv/bin/python -m bench.threads --only interval,nice ...       some ways

One process trains on the disk; neighbouring steps differ in the way alone, first the one and then the other in turn. Prints the
ratio of the seconds of a step, and of its processor time in all threads. Takes the options of ``tiered bench train``.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from bench.checkouts import likely, ratio
from bench.train import WARM, options_of
from tiered import TieredStore
from tiered.cli.bench.trainer import Trainer
from tiered.cli.output import told_environment
from tiered.cli.train.model import open_text
from tiered.measuring.meters import environment, scratch_store, turns

Way = Callable[[TieredStore], None]
MAIN = 0
"""Of ``os.sched_*``: the thread that calls."""


def _engine(store: TieredStore) -> int:
    thread = store._engine._thread
    assert thread is not None
    assert thread.native_id is not None
    return thread.native_id


def _niceness(much: int) -> Way:
    return lambda store: os.setpriority(os.PRIO_PROCESS, _engine(store), much)


def _scheduler(kind: int) -> Way:
    return lambda store: os.sched_setscheduler(_engine(store), kind, os.sched_param(0))


def _on_core(core: int | None) -> Way:
    everywhere = os.sched_getaffinity(MAIN)
    return lambda store: os.sched_setaffinity(_engine(store), everywhere if core is None else {core})


def _interval(seconds: float) -> Way:
    return lambda store: sys.setswitchinterval(seconds)


def _compute(threads: int) -> Way:
    return lambda store: torch.set_num_threads(threads)


def ways() -> Mapping[str, tuple[str, Way, Way]]:
    """What each way is, what arranges it, and what undoes that."""
    usual, threads, last = sys.getswitchinterval(), torch.get_num_threads(), max(os.sched_getaffinity(MAIN))
    return {
        "same": ("nothing differs (how much two equal steps do)", _interval(usual), _interval(usual)),
        "nice": ("the engine's thread with niceness 10", _niceness(10), _niceness(0)),
        "first": ("the engine's thread with niceness -10", _niceness(-10), _niceness(0)),
        "batch": ("the engine's thread in SCHED_BATCH", _scheduler(os.SCHED_BATCH), _scheduler(os.SCHED_OTHER)),
        "core": ("the engine's thread on the last core alone", _on_core(last), _on_core(None)),
        "fewer": ("one thread of torch fewer", _compute(max(1, threads - 1)), _compute(threads)),
        "interval": ("Python's switch interval 0.2 ms in place of 5", _interval(2e-4), _interval(usual)),
        "short": ("Python's switch interval 0.02 ms in place of 5", _interval(2e-5), _interval(usual)),
    }


def timed(training: Trainer) -> tuple[float, float]:
    """Make a step; return its seconds, and its seconds of processors."""
    began, spent = time.perf_counter(), time.process_time()
    training.step()
    return time.perf_counter() - began, time.process_time() - spent


@contextmanager
def arranged(store: TieredStore, arrange: Way, undo: Way) -> Iterator[None]:
    try:
        arrange(store)
        yield
    finally:
        undo(store)


def main() -> int:
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
    found = ways()
    names = list(found)
    if "--only" in arguments:
        at = arguments.index("--only")
        names, arguments = arguments[at + 1].split(","), arguments[:at] + arguments[at + 2 :]
    options = options_of(arguments)
    print(told_environment(environment()) + f", {torch.get_num_threads()} threads of torch")
    print(f"{options.shape}, {options.batch} x {options.context} tokens, {options.pool} bytes of memory, {options.update}\n")
    print("| way | seconds a step, as it is | so | ratio, median [quartiles] | 95 % confidence | of processor time |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    with ExitStack() as stack:
        text = open_text(options.text, options.context, stack)
        store = stack.enter_context(scratch_store(options.folder, dram=options.pool, backend=options.backend))
        training = Trainer(options, text, store)
        for _ in range(WARM):
            training.step()
        for name in names:
            what, arrange, undo = found[name]
            steps: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
            for _, order in turns((0, 1), options.rounds):
                for which in order:
                    if which:
                        with arranged(store, arrange, undo):
                            steps[1].append(timed(training))
                    else:
                        steps[0].append(timed(training))
            (before, cpu_before), (after, cpu_after) = (zip(*steps[which], strict=True) for which in (0, 1))
            print(
                f"| {name}: {what} | {statistics.median(before):.3f} | {statistics.median(after):.3f} | {ratio(after, before)} "
                f"| {likely(after, before)} | {ratio(cpu_after, cpu_before)} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
