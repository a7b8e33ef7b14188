"""Results of what is measured again and again, in rounds that are interleaved: what changes with time meets all alike."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tiered.cli.measure import Spread, Usage, quantiles
from tiered.cli.progress import Progress
from tiered.cli.stop import StopRequest

__all__ = ["Result", "Run", "Series", "in_rounds", "ratios", "series_as_json"]

Group = TypeVar("Group", bound=Hashable)


class Result(Protocol):
    """Of one round. ``latencies``: seconds of each operation, where they were taken; ``usage``: None of other programs."""

    @property
    def rate(self) -> float: ...
    @property
    def cpu_seconds_per_gib(self) -> float: ...
    @property
    def latencies(self) -> Sequence[float]: ...
    @property
    def usage(self) -> Usage | None: ...


Run = Callable[[], Result]


@dataclass
class Series:
    """Results of one thing that is measured, one per round; ``latencies`` of all together."""

    name: str
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    latencies: array[float] = field(default_factory=lambda: array("d"))

    def add(self, result: Result) -> None:
        self.rates.append(result.rate)
        self.cpu.append(result.cpu_seconds_per_gib)
        self.latencies.extend(result.latencies)
        if result.usage is not None:
            self.usages.append(result.usage)

    def latency(self) -> dict[str, float]:
        """Empty where none was taken."""
        return quantiles(self.latencies)

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "bytes_per_second": {**Spread.of(self.rates).as_json(), "all": self.rates},
            "cpu_seconds_per_gib": Spread.of(self.cpu).as_json(),
        }
        if self.latencies:
            found["latency_seconds"] = self.latency()
        if self.usages:
            found["bytes"] = [usage.bytes for usage in self.usages]
            found["kernel_bytes"] = [usage.kernel_bytes for usage in self.usages]
        return found


def in_rounds(
    runs: Mapping[Group, Mapping[str, Run]], rounds: int, stop: StopRequest, progress: Progress
) -> dict[Group, list[Series]]:
    """Everything once in each round; by group, in the order of names. Who begins, and from three on who follows whom, changes
    from round to round, for what ran before leaves its trace: a drive's cache, a warm CPU."""
    measured = {group: {name: Series(name) for name in named} for group, named in runs.items()}
    total, done = rounds * sum(map(len, runs.values())), 0
    for turn in range(rounds):
        for group, named in runs.items():
            names, onwards = list(named), -1 if turn % 2 else 1
            for name in (names[(turn + onwards * place) % len(names)] for place in range(len(names))):
                stop.check()
                progress.working(f"round {turn + 1} of {rounds}: {group}, {name}", done / total)
                measured[group][name].add(named[name]())
                done += 1
    progress.working("done", 1.0)
    return {group: list(series.values()) for group, series in measured.items()}


def ratios(series: Sequence[Series]) -> dict[str, Spread]:
    """The first one's rate by each other's, of the pairs in each round."""
    ours, *others = series
    return {other.name: Spread.of([a / b for a, b in zip(ours.rates, other.rates, strict=True)]) for other in others}


def series_as_json(series: Sequence[Series]) -> dict[str, Any]:
    return {
        **{one.name: one.as_json() for one in series},
        "ratios": {name: spread.as_json() for name, spread in ratios(series).items()},
    }
