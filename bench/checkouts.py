"""Another checkout of this project beside this one: a process of each answers in turn, so that what else the machine does falls
upon both. Shared by the benchmarks that have ``--against``; measures nothing itself.

A process runs the benchmark's file of this checkout over the package of its own, which may be older, and needs its built
``tiered/io/_aio*.so``. It gets a line for each round and answers it with a line of JSON.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiered.measuring.meters import turns

__all__ = ["Checkout", "beside", "in_turn", "likely", "ratio"]


class Checkout:
    """A process that measures the checkout in ``root``, with the benchmark ``script``, which is given ``options``."""

    def __init__(self, root: Path, script: str, options: Sequence[str] = ()) -> None:
        command = [sys.executable, str(Path(script).resolve()), "--serve", *options]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )

    def asked(self, line: str) -> Any:
        """Return the answer to ``line``. Raises SystemExit where the process ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        said = self._process.stdout.readline()
        if not said:
            raise SystemExit("a process that measures ended early; its message stands above")
        return json.loads(said)

    def end(self) -> None:
        """Have the process end, and wait for that."""
        self._process.communicate()


@contextmanager
def beside(other: Path, script: str, options: Sequence[str] = ()) -> Iterator[tuple[Checkout, Checkout]]:
    """Yield a process of the checkout in ``other``, and one of the checkout that ``script`` is in."""
    if not (other / "tiered" / "__init__.py").exists():
        raise SystemExit(f"{other} is not a checkout of this project: it has no tiered/__init__.py")
    pair = Checkout(other.resolve(), script, options), Checkout(Path(script).resolve().parents[1], script, options)
    try:
        yield pair
    finally:
        for one in pair:
            one.end()


def in_turn(pair: tuple[Checkout, Checkout], line: str, rounds: int) -> tuple[list[Any], list[Any]]:
    """Ask both for ``rounds`` rounds, first the one and then the other; return the answers of each. A round before these makes
    what is measured, and does not count."""
    found: tuple[list[Any], list[Any]] = [], []
    for one in pair:
        one.asked(line)
    for _, order in turns((0, 1), rounds):
        for which in order:
            found[which].append(pair[which].asked(line))
    return found


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """Return the median and the quartiles of the ratios of neighbouring rounds, as text."""
    low, middle, high = statistics.quantiles([one / other for one, other in zip(values, others, strict=True)], n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def likely(values: Sequence[float], others: Sequence[float]) -> str:
    """Return between which ratios of neighbouring rounds their median is with a confidence of 95 %, as text: the order
    statistics that the sign test gives (normal approximation of the binomial distribution)."""
    ratios = sorted(one / other for one, other in zip(values, others, strict=True))
    beside = 1.96 * len(ratios) ** 0.5 / 2
    low, high = math.floor(len(ratios) / 2 - beside), math.ceil(len(ratios) / 2 + beside)
    return f"{ratios[max(low, 0)]:.3f} to {ratios[min(high, len(ratios) - 1)]:.3f}"
