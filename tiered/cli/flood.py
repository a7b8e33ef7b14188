"""How long a read waits while another thread writes as fast as the store takes it, beside how long it takes alone."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tiered import TieredStore
from tiered.cli.measure import Spread, quantiles
from tiered.cli.stop import StopRequest
from tiered.cli.table import duration, table
from tiered.cli.walk import Setup, Walk

__all__ = ["Flood"]

RUNNING = 2
"""Pools that the other thread has written before any read counts: by then its write-backs are what room has to wait for."""


@dataclass
class Flood:
    """Rounds of both. ``alone`` and ``flooded``: seconds of each lease of a tensor that was on disk."""

    store: TieredStore
    setup: Setup
    stop: StopRequest
    alone: array[float] = field(default_factory=lambda: array("d"))
    flooded: array[float] = field(default_factory=lambda: array("d"))
    written: list[float] = field(default_factory=list)
    """Bytes per second that went to the disk during each round's flood."""

    def round(self) -> None:
        """Lease every tensor once, one after the other, with nothing fetched ahead; then the same in the flood."""
        self.store.commit()  # what is dirty is on disk, so that reads are alone
        self.alone.extend(self._leases())
        with self._flood():
            began, before = time.perf_counter(), self._written()
            self.flooded.extend(self._leases())
            self.written.append((self._written() - before) / (time.perf_counter() - began))

    def _leases(self) -> Iterator[float]:
        for index in range(self.setup.tensors):
            self.stop.check()
            began = time.perf_counter()
            with self.store.lease(f"r/{index}"):
                pass
            yield time.perf_counter() - began

    def _written(self) -> int:
        return self.store.statistics().links[-1].down.bytes

    @contextmanager
    def _flood(self) -> Iterator[None]:
        """Another thread replaces tensors until this context ends; its error, if any, is raised here."""
        over, begun = threading.Event(), threading.Event()
        errors: list[BaseException] = []

        def write() -> None:
            walk = Walk(self.store, self.setup, StopRequest())
            count = 0
            try:
                while not over.is_set():
                    walk.replace(f"w/{count % self.setup.tensors}")
                    count += 1
                    if count * self.setup.tensor >= RUNNING * self.setup.pool:
                        begun.set()
            except BaseException as error:
                errors.append(error)
            finally:
                begun.set()

        thread = threading.Thread(target=write, name="tiered-flood")
        thread.start()
        try:
            begun.wait()
            self.stop.check()
            yield
        finally:
            over.set()
            thread.join()
        if errors:
            raise errors[0]

    @property
    def ratios(self) -> dict[str, float]:
        """Of the same percentile, in the flood by alone."""
        alone, flooded = quantiles(self.alone), quantiles(self.flooded)
        return {name: flooded[name] / max(alone[name], 1e-9) for name in alone}

    def as_json(self) -> dict[str, Any]:
        return {
            "alone_seconds": quantiles(self.alone),
            "flooded_seconds": quantiles(self.flooded),
            "ratios": self.ratios,
            "leases": len(self.flooded),
            "written_bytes_per_second": Spread.of(self.written).as_json(),
        }

    def described(self) -> str:
        """A table for people."""
        alone, flooded = quantiles(self.alone), quantiles(self.flooded)
        rows = [["one lease", *alone]]
        rows += [[name, *map(duration, found.values())] for name, found in (("alone", alone), ("in the flood", flooded))]
        rows.append(["ratio", *(f"{ratio:.2f}" for ratio in self.ratios.values())])
        told = (
            f"flood: {len(self.flooded)} leases each way, nothing fetched ahead; another thread meanwhile wrote "
            f"{Spread.of(self.written).shown(1e-9)} GB/s"
        )
        return f"{told}\n{table(rows)}"
