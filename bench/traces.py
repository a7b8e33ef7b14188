"""Access traces to judge eviction by: pure generators, the same for the same seed.

A trace is what one level of memory sees from above, in order. ``TRACES`` names the ten that the study in
``bench/simulate.py`` runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tiered.types import Then
from tiered.types import Use as Access

__all__ = ["TRACES", "Access", "Key", "Trace", "next_positions"]

Key = str


@dataclass(frozen=True)
class Trace:
    """``accesses`` in order, and the size in bytes of every key in them.

    ``then`` is what a store that follows it is told: rounds that are the same go on again, draws at random come once.
    """

    sizes: Mapping[Key, int]
    accesses: Sequence[tuple[Key, Access]]
    then: Then = "again"

    @property
    def total(self) -> int:
        """Bytes of all keys."""
        return sum(self.sizes.values())

    @property
    def largest(self) -> int:
        return max(self.sizes.values(), default=0)


def next_positions(trace: Trace) -> list[int]:
    """For each access the position of the same key's next one; ``len(trace.accesses)`` when there is none."""
    end = len(trace.accesses)
    following = [end] * end
    seen: dict[Key, int] = {}
    for position in range(end - 1, -1, -1):
        key = trace.accesses[position][0]
        following[position] = seen.get(key, end)
        seen[key] = position
    return following


def _equal(count: int, size: int = 64) -> dict[Key, int]:
    return {f"t{i}": size for i in range(count)}


def cyclic_read(keys: int = 100, rounds: int = 12) -> Trace:
    """All keys in the same order, round after round: inference."""
    sizes = _equal(keys)
    return Trace(sizes, [(key, Access.READ) for _ in range(rounds) for key in sizes])


def cyclic_write(keys: int = 100, rounds: int = 12) -> Trace:
    """The same, every second key being written: some state next to some constants."""
    sizes = _equal(keys)
    kinds = [Access.WRITE if i % 2 else Access.READ for i in range(keys)]
    return Trace(sizes, [access for _ in range(rounds) for access in zip(sizes, kinds, strict=True)])


def zigzag(keys: int = 100, rounds: int = 8) -> Trace:
    """Forward, then backward through the layers: training with frozen parameters."""
    sizes = _equal(keys)
    one = [*sizes, *reversed(sizes)]
    return Trace(sizes, [(key, Access.READ) for _ in range(rounds) for key in one])


def _training(layers: Sequence[int], steps: int) -> Trace:
    sizes: dict[Key, int] = {f"{part}{i}": size for i, size in enumerate(layers) for part in "pmvg"}
    accesses: list[tuple[Key, Access]] = []
    for step in range(steps):
        for i in range(len(layers)):
            if step:
                accesses += [(f"g{i}", Access.READ)]
                accesses += [(f"{part}{i}", Access.WRITE) for part in "mvp"]
            else:
                accesses += [(f"p{i}", Access.READ)]
        for i in reversed(range(len(layers))):
            accesses += [(f"p{i}", Access.READ), (f"g{i}", Access.PUT)]
    return Trace(sizes, accesses)


def training(layers: int = 32, steps: int = 10) -> Trace:
    """Steps with Adam, updated when a layer is next fetched: parameter p, moments m and v, gradient g of each layer."""
    return _training([64] * layers, steps)


def training_unequal(layers: int = 32, steps: int = 10, seed: int = 0) -> Trace:
    """The same with layers of 16 to 256 bytes and large embeddings at both ends."""
    rng = random.Random(seed)
    return _training([400, *(rng.randint(16, 256) for _ in range(layers - 2)), 400], steps)


def _random(keys: int, length: int, written: float, skew: float, seed: int) -> Trace:
    rng = random.Random(seed)
    sizes = {f"t{i}": rng.randint(16, 256) for i in range(keys)}
    weights = [1 / (rank + 1) ** skew for rank in range(keys)]
    drawn = rng.choices(list(sizes), weights, k=length)
    return Trace(sizes, [(key, Access.WRITE if rng.random() < written else Access.READ) for key in drawn], "end")


def uniform_read(seed: int = 1) -> Trace:
    """Uniformly random reads of keys of unequal sizes."""
    return _random(100, 2000, 0.0, 0.0, seed)


def uniform_write(seed: int = 2) -> Trace:
    """The same, three in ten being writes."""
    return _random(100, 2000, 0.3, 0.0, seed)


def zipf_read(seed: int = 3) -> Trace:
    """Reads by Zipf's law: an embedding table."""
    return _random(100, 2000, 0.0, 1.0, seed)


def zipf_write(seed: int = 4) -> Trace:
    """The same, three in ten being writes."""
    return _random(100, 2000, 0.3, 1.0, seed)


def experts(layers: int = 12, experts: int = 8, steps: int = 60, chosen: int = 2, seed: int = 5) -> Trace:
    """Mixture of experts: dense layers in turn, and behind each a few experts drawn anew at every step."""
    rng = random.Random(seed)
    sizes = {f"dense{i}": 128 for i in range(layers)} | {f"expert{i}.{e}": 64 for i in range(layers) for e in range(experts)}
    accesses: list[tuple[Key, Access]] = []
    for _ in range(steps):
        for i in range(layers):
            accesses += [(f"dense{i}", Access.READ)]
            accesses += [(f"expert{i}.{e}", Access.READ) for e in rng.sample(range(experts), chosen)]
    return Trace(sizes, accesses, "end")


TRACES: dict[str, Callable[[], Trace]] = {
    "cyclic_read": cyclic_read,
    "cyclic_write": cyclic_write,
    "zigzag": zigzag,
    "training": training,
    "training_unequal": training_unequal,
    "uniform_read": uniform_read,
    "uniform_write": uniform_write,
    "zipf_read": zipf_read,
    "zipf_write": zipf_write,
    "experts": experts,
}
