"""Count the calls from one file of ``tiered`` to another that a lease, a commit, a forward and a backward make.

    .venv/bin/python -m bench.calls                             Markdown, half a minute
    .venv/bin/python -m bench.calls --pairs 15                  also the file -> file edges with the most calls
    .venv/bin/python -m bench.calls --by-file --json calls.json

Five operations, each from its first call until the store is idle again:

- "lease, resident": a READ lease of a tensor that is in DRAM;
- "lease, from NVMe": a READ lease of a tensor that is only on NVMe, for which a clean one is evicted from a full pool;
- "commit, one tensor": ``store.commit()`` after one resident tensor was changed;
- "forward, 16 units" and "backward, 16 units": of 16 linear layers that are paged, in a pool of half of the bytes of their
  parameters and Adam states, with ``zero.AdamW(update="on_fetch")``.

Each is done ``WARM_UP`` times before the first that counts. Rules of the count:

- A file is a Python file below the folder of the installed package. Each has its path from there as its name.
- A call is one start of a Python function that is written in such a file, or one continuation of a generator or a coroutine.
  Its caller is the nearest function below it on the stack that is written in such a file too, whatever functions of Python or
  torch lie between them. A call is counted where the two files differ. A call without such a caller, from outside of the
  package, adds only to the files that are crossed.
- Not seen are calls of C functions, and of functions without a source file: the ``__init__`` of a dataclass, for example.
- Running a module at its import is no call, and neither is what it calls itself.
- A one-line function is a lambda, or a ``def`` whose body, without its docstring, is exactly one ``return`` statement, on
  however many source lines; most properties are. ``pass``, an assignment or a bare call is no ``return``.
- The calls of all threads count, the store's own included. While this script waits for the store to be idle, its own thread
  does not count. Idle is: no function of the package began and no link was busy for ``QUIET`` seconds. The store's thread
  looks around once a second even then, so that a round now and then has some calls more. The garbage collector is off in a
  round.

Figures are medians of the rounds, with the least and the most. Only the public interface of ``tiered`` is used.
"""

from __future__ import annotations

import argparse
import ast
import collections
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import tiered
from tiered import TieredStore, zero

__all__ = ["Calls", "Counter", "Function", "main"]

POOL, NBYTES, TENSORS = 1 << 20, 64 << 10, 48
"""Bytes of the pool and of each tensor, and how many tensors, for leases and commits."""
UNITS, WIDTH, BATCH = 16, 256, 8
WARM_UP = 5
"""Rounds of each operation before the first that counts: the second step makes the moments, the fourth repeats the third."""
QUIET = 0.03


@dataclass(frozen=True)
class Function:
    """Describe a function of the package: its file, its name in that, its first line, and whether it is a one-line function."""

    file: str
    name: str
    line: int
    one_line: bool


class Calls:
    """Hold the calls of one round, by caller and called function."""

    def __init__(self, files: set[str], pairs: collections.Counter[tuple[Function, Function]]) -> None:
        self.files = files
        self.pairs = pairs

    @property
    def total(self) -> int:
        """Return the number of calls from one file to another."""
        return sum(self.pairs.values())

    @property
    def without_one_line(self) -> int:
        """Return the same without the calls of one-line functions."""
        return sum(count for (_, called), count in self.pairs.items() if not called.one_line)


class Counter:
    """Count calls between the Python files below ``folder``, in this thread and in all that start within a ``with`` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}{os.sep}"
        self._known: dict[int, tuple[CodeType, bool]] = {}  # by identity: the same lines in two files are equal code
        self._seen: list[tuple[int | None, int]] = []
        self._counting = False
        self._aside: int | None = None  # a thread that does not count

    def __enter__(self) -> Counter:
        self._before = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before[0])
        threading.setprofile(self._before[1])

    @property
    def seen(self) -> int:
        """Return how many calls were seen in this round, those within a file included."""
        return len(self._seen)

    def count(self, operation: Callable[[], object], settle: Callable[[], object] = lambda: None) -> Calls:
        """Return the calls of ``operation`` in this thread, and those of other threads until ``settle`` returns."""
        self._seen = []
        collected = gc.isenabled()
        gc.collect()
        gc.disable()
        self._counting = True
        try:
            operation()
            with self._standing_aside():
                settle()
        finally:
            self._counting = False
            if collected:
                gc.enable()
        return self._calls()

    @contextmanager
    def _standing_aside(self) -> Iterator[None]:
        self._aside = threading.get_ident()
        try:
            yield
        finally:
            self._aside = None

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not self._counting or not self._is_ours(frame.f_code):
            return
        if threading.get_ident() == self._aside:
            return
        caller = frame.f_back
        while caller is not None and not self._is_ours(caller.f_code):
            caller = caller.f_back
        self._seen.append((None if caller is None else id(caller.f_code), id(frame.f_code)))  # atomic

    def _is_ours(self, code: CodeType) -> bool:
        found = self._known.get(id(code))
        if found is None:
            found = self._known[id(code)] = code, code.co_filename.startswith(self._folder)
        return found[1]

    def _calls(self) -> Calls:
        files: set[str] = set()
        pairs: collections.Counter[tuple[Function, Function]] = collections.Counter()
        for (caller_id, called_id), count in collections.Counter(self._seen).items():
            called = self._function(called_id)
            caller = None if caller_id is None else self._function(caller_id)
            if "<module>" in (called.name, caller.name if caller else None):
                continue
            files.add(called.file)
            if caller is not None and caller.file != called.file:
                pairs[caller, called] += count
        return Calls(files, pairs)

    def _function(self, identity: int) -> Function:
        code, _ = self._known[identity]
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.11
        short = code.co_name == "<lambda>" or (code.co_firstlineno, code.co_name) in one_line_functions(code.co_filename)
        return Function(code.co_filename[len(self._folder) :], name, code.co_firstlineno, short)


@cache
def one_line_functions(path: str) -> frozenset[tuple[int, str]]:
    """Return the first line (a decorator's, where there is one) and the name of each one-line ``def`` in the file ``path``."""
    found = set()
    for node in ast.walk(ast.parse(Path(path).read_bytes())):
        if isinstance(node, ast.FunctionDef):
            body = node.body[ast.get_docstring(node, clean=False) is not None :]
            if len(body) == 1 and isinstance(body[0], ast.Return):
                found.add((min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.name))
    return frozenset(found)


def wait_until_idle(store: TieredStore, counter: Counter) -> None:
    """Return when nothing was under way in ``store`` for ``QUIET`` seconds."""
    now = counter.seen, store.statistics().links
    before = None
    while now != before:
        time.sleep(QUIET)
        before, now = now, (counter.seen, store.statistics().links)  # a link that is busy says so in its seconds


def moved(store: TieredStore) -> tuple[int, int, int, int, int]:
    """Return the hits, misses, evictions, reads and writes of ``store`` so far."""
    found = store.statistics()
    link = found.links[-1]
    return found.hits, found.misses, found.evictions, link.up.transfers, link.down.transfers


def count_store(counter: Counter, folder: str, rounds: int) -> dict[str, list[Calls]]:
    """Return the calls of each lease and each commit. Raises RuntimeError where one did not move what it should."""
    found: dict[str, list[Calls]] = {"lease, resident": [], "lease, from NVMe": [], "commit, one tensor": []}
    with TieredStore.open(f"{folder}/store", dram=POOL) as store:

        def measure(name: str, operation: Callable[[], object], expected: tuple[int, ...]) -> None:
            wait_until_idle(store, counter)
            before = moved(store)
            calls = counter.count(operation, lambda: wait_until_idle(store, counter))
            done = tuple(new - old for new, old in zip(moved(store), before, strict=True))
            if done != expected:
                raise RuntimeError(f"{name}: {done} hits, misses, evictions, reads and writes instead of {expected}")
            found[name].append(calls)

        def lease(key: str) -> None:
            with store.lease(key):
                pass

        for index in range(TENSORS):
            store.put(f"t{index}", torch.zeros(NBYTES, dtype=torch.uint8))
        store.commit()
        for index in range(WARM_UP + rounds):  # in order, over more than fits: the least recently used is the next one
            key = f"t{index % TENSORS}"
            measure("lease, from NVMe", lambda key=key: lease(key), (0, 1, 1, 1, 0))  # type: ignore[misc]
            measure("lease, resident", lambda key=key: lease(key), (1, 0, 0, 0, 0))  # type: ignore[misc]
        for _ in range(WARM_UP + rounds):
            with store.lease(key, access="write") as tensor:
                tensor.add_(1)
            del tensor
            measure("commit, one tensor", store.commit, (0, 0, 0, 0, 1))
    return {name: calls[WARM_UP:] for name, calls in found.items()}


def count_model(counter: Counter, folder: str, rounds: int) -> dict[str, list[Calls]]:
    """Return the calls of each forward and each backward of a paged model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
    state = 12 * sum(parameter.numel() for parameter in model.parameters())
    inputs = torch.randn(BATCH, WIDTH)
    forwards: list[Calls] = []
    backwards: list[Calls] = []
    with TieredStore.open(f"{folder}/model", dram=state // 2) as store:
        zero.page(model, store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-4, update="on_fetch")
        if zero.statistics(model).units != UNITS:
            raise RuntimeError(f"the model has {zero.statistics(model).units} units instead of {UNITS}")

        def settle() -> None:
            wait_until_idle(store, counter)

        for _ in range(WARM_UP + rounds):
            outputs: list[torch.Tensor] = []
            settle()
            forwards.append(counter.count(lambda: outputs.append(model(inputs)), settle))  # noqa: B023
            loss = outputs.pop().square().mean()
            backwards.append(counter.count(loss.backward, settle))
            optimizer.step()
            optimizer.zero_grad()
    return {f"forward, {UNITS} units": forwards[WARM_UP:], f"backward, {UNITS} units": backwards[WARM_UP:]}


def environment() -> dict[str, Any]:
    """Return what the figures depend on: versions, the package's commit where it is in a checkout, and the I/O backend."""
    root = Path(tiered.__file__).resolve().parents[1]
    commit = None
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    with tempfile.TemporaryDirectory() as folder, TieredStore.open(f"{folder}/store", dram=POOL, durability="none") as store:
        backend = store.statistics().backend
    python = platform.python_version()
    return {"tiered": tiered.__version__, "commit": commit, "torch": torch.__version__, "python": python, "backend": backend}


def spread(values: Sequence[int]) -> str:
    """Return the median, the least and the most of ``values`` as text."""
    return f"{statistics.median(values):,.0f} [{min(values):,} - {max(values):,}]"


def number(value: float) -> str:
    """Return ``value`` with one decimal, or without where that is 0."""
    return f"{value:,.1f}".removesuffix(".0")


Mean = dict[tuple[Function, Function], float]


def mean_pairs(rounds: Sequence[Calls]) -> Mean:
    """Return the calls of each pair of functions in a round, on average."""
    total = sum((calls.pairs for calls in rounds), collections.Counter[tuple[Function, Function]]())
    return {pair: count / len(rounds) for pair, count in total.items()}


def table(found: dict[str, list[Calls]]) -> str:
    """Return a line for each operation."""
    lines = ["| operation | files | calls between files | without one-line functions |", "|---|---:|---:|---:|"]
    for name, rounds in found.items():
        columns = ([len(calls.files) for calls in rounds], [c.total for c in rounds], [c.without_one_line for c in rounds])
        lines.append(f"| {name} | {' | '.join(spread(column) for column in columns)} |")
    return "\n".join(lines)


def table_by_file(found: dict[str, list[Calls]]) -> str:
    """Return a line for each file: calls into it from other files, in a round, on average; a dash where it is not crossed."""
    into: dict[str, dict[str, float]] = {name: {} for name in found}
    for name, rounds in found.items():
        into[name] = dict.fromkeys(set().union(*(calls.files for calls in rounds)), 0.0)
        for (_, called), count in mean_pairs(rounds).items():
            into[name][called.file] += count
    lines = [f"| calls into | {' | '.join(found)} |", "|---|" + "---:|" * len(found)]
    for file in sorted(set().union(*into.values())):
        cells = (number(counts[file]) if file in counts else "-" for counts in into.values())
        lines.append(f"| `{file}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_pairs(rounds: Sequence[Calls], most: int) -> str:
    """Return a line for each of the ``most`` edges with the most calls, with the functions that are called."""
    edges: dict[tuple[str, str], collections.Counter[Function]] = collections.defaultdict(collections.Counter)
    for (caller, called), count in mean_pairs(rounds).items():
        edges[caller.file, called.file][called] += count  # type: ignore[assignment]
    ordered = sorted(edges.items(), key=lambda edge: (-sum(edge[1].values()), edge[0]))
    lines = ["| from | to | calls | of one-line functions | functions |", "|---|---|---:|---:|---|"]
    for (caller_file, called_file), functions in ordered[:most]:
        short = sum(count for function, count in functions.items() if function.one_line)
        told = ", ".join(
            f"`{function.name}`{'*' if function.one_line else ''} {number(count)}"
            for function, count in functions.most_common()
        )
        total = sum(functions.values())
        lines.append(f"| `{caller_file}` | `{called_file}` | {number(total)} | {number(short)} | {told} |")
    return "\n".join(lines)


def report(found: dict[str, list[Calls]]) -> dict[str, Any]:
    """Return all figures as JSON values."""
    return {
        name: {
            "files": [sorted(calls.files) for calls in rounds],
            "calls": [calls.total for calls in rounds],
            "calls_without_one_line": [calls.without_one_line for calls in rounds],
            "pairs": [
                {
                    "from": caller.file,
                    "caller": caller.name,
                    "to": called.file,
                    "called": called.name,
                    "one_line": called.one_line,
                    "calls": count,
                }
                for (caller, called), count in sorted(mean_pairs(rounds).items(), key=lambda pair: -pair[1])
            ],
        }
        for name, rounds in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.calls",
        description="Calls from one file of the package to another, in leases, a commit, a forward and a backward.",
        epilog="example: python -m bench.calls --pairs 15",
    )
    parser.add_argument("--dir", default="/var/tmp", help="a folder on the drive (default /var/tmp)")
    parser.add_argument("--leases", type=int, default=20, help="rounds of each lease, and of the commit (default 20)")
    parser.add_argument("--steps", type=int, default=7, help="rounds of forward and backward (default 7)")
    parser.add_argument("--by-file", action="store_true", help="also the calls into each file")
    parser.add_argument("--pairs", type=int, default=0, metavar="N", help="also the N file -> file edges with the most calls")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    told = environment()
    with Counter(Path(tiered.__file__).parent) as counter, tempfile.TemporaryDirectory(dir=options.dir) as folder:
        found = count_store(counter, folder, options.leases) | count_model(counter, folder, options.steps)
    commit = f" (commit {told['commit']})" if told["commit"] else ""
    print(f"tiered {told['tiered']}{commit}, torch {told['torch']}, Python {told['python']}, backend {told['backend']}")
    print(f"{options.leases} leases and commits, {options.steps} steps\n")
    print(table(found))
    if options.by_file:
        print(f"\nCalls into each file from others, in a round, on average (-: not crossed):\n\n{table_by_file(found)}")
    for name, rounds in found.items() if options.pairs else ():
        print(f"\n{name}: the edges with the most calls in a round, on average (*: a one-line function)\n")
        print(table_of_pairs(rounds, options.pairs))
    if options.json:
        Path(options.json).write_text(json.dumps({"environment": told, "operations": report(found)}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
