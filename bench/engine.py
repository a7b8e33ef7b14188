"""Measure the engine's own rate: a whole store over a backend that completes at once and moves no byte.

    .venv/bin/python -m bench.engine                          Markdown, half a minute
    .venv/bin/python -m bench.engine --size 256KiB --way read only these
    .venv/bin/python -m bench.engine --against CHECKOUT       this checkout beside another one, round by round

All tensors hold the same bytes, and all of the pool has them, so that what a read finds there has the right checksum, although
nobody put it there: checksums are computed and compared as ever. Twice the pool's bytes of tensors are used in turn, so each of
them is brought up, or written out, anew.

Ways: ``read`` leases 64 tensors (or 32 MiB) together, and prefetches the next ones meanwhile; ``one`` leases one at a time,
which is not there yet; ``write`` replaces one tensor after the other (``create``, which fills nothing), and the engine writes
them out.

"of the cores" is the rate beside what all cores reach that do nothing but compute checksums, over the same memory in pieces of
4 MiB, measured before each round. CPU seconds are those of the process. ``--against`` gives the rounds to a process of each
checkout in turn, and takes ratios of neighbouring rounds; that of the CPU time scatters less where other programs run.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiered import TieredStore
from tiered.format.data_file import digest
from tiered.tiers.dram import DramTier
from tiered.types import PIECE_BYTES, IOCompletion, IORequest, format_size, parse_size

__all__ = ["WAYS", "Bench", "NullBackend", "checksum_rate", "main"]

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
WAYS = ("read", "one", "write")
POOL = 256 << 20
CONTENTS = 0x55
TOGETHER, MOST = 64, 32 << 20
"""Tensors that are leased together, and their bytes, at most."""
IN_A_ROUND, BYTES_OF_A_ROUND = 2048, 1 << 30
ROUNDS, PAIRED_ROUNDS = 5, 11


class NullBackend:
    """An ``IOBackend`` that completes each request at once, and moves nothing."""

    name = "null"
    alignment = 512
    depth = 64

    def __init__(self) -> None:
        self._done: list[IOCompletion] = []
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def submit(self, batch: Sequence[IORequest]) -> int:
        taken = batch[: self.depth - len(self._done)]
        if taken and not self._done:
            os.eventfd_write(self._signal, 1)
        self._done += [IOCompletion(request.tag, request.nbytes) for request in taken]
        return len(taken)

    def reap(self, min_events: int, timeout: float) -> list[IOCompletion]:
        done, self._done = self._done, []
        if done:
            os.eventfd_read(self._signal)
        return done

    def fileno(self) -> int:
        return self._signal

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._signal)


def checksum_rate(memory: ctypes.Array[ctypes.c_char], seconds: float = 0.1) -> float:
    """Return the bytes per second that all cores together compute checksums of."""
    cores = len(os.sched_getaffinity(0))
    begin, end = time.perf_counter(), time.perf_counter() + seconds
    counted = [0] * cores

    def work(number: int) -> None:
        pieces = [memoryview(memory)[at : at + PIECE_BYTES] for at in range(0, len(memory), PIECE_BYTES)]
        for piece in itertools.cycle(pieces[number::cores] or pieces):
            digest(bytes(16), 1, 1, 0, piece)
            counted[number] += len(piece)
            if time.perf_counter() > end:
                return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counted) / (time.perf_counter() - begin)


class Bench:
    """A store of ``2 * pool`` bytes in tensors of ``nbytes`` each, over the null backend, in a folder below ``folder``."""

    def __init__(self, folder: str, nbytes: int, pool: int = POOL) -> None:
        self.nbytes = nbytes
        self.count = 2 * pool // nbytes
        self.store = TieredStore.open(f"{folder}/store", dram=pool, backend=NullBackend, durability="none")
        contents = torch.full((nbytes,), CONTENTS, dtype=torch.uint8)
        self.keys = [f"t{number}" for number in range(self.count)]
        for key in self.keys:
            self.store.put(key, contents)
        self.store.offload()  # which gives the memory back, as zeros
        memory = self.store._parts.memories[0]
        assert isinstance(memory, DramTier)
        ctypes.memset(memory.address, CONTENTS, memory.capacity)
        self._at = 0  # what comes next

    def close(self) -> None:
        self.store.close()

    def round(self, way: str, count: int | None = None) -> dict[str, float]:
        """Use the next ``count`` tensors, as many as a round has by default; return rates. Raises RuntimeError where they were
        in memory already."""
        if count is None:
            count = max(1, min(IN_A_ROUND, BYTES_OF_A_ROUND // self.nbytes))
        before, used, began = self._moved(way), time.process_time(), time.perf_counter()
        getattr(self, f"_{way}")(count)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        moved = self._moved(way) - before
        if way != "write" and moved < 0.9 * count:  # what is replaced is written a pool later
            raise RuntimeError(f"{count} tensors were used and {moved} moved: something else than the engine was measured")
        nbytes = count * self.nbytes
        return {"tensors": count / seconds, "bytes": nbytes / seconds, "cpu": used / (nbytes / (1 << 30))}

    def _next(self, count: int) -> Iterator[str]:
        for _ in range(count):
            yield self.keys[self._at]
            self._at = (self._at + 1) % self.count

    def _read(self, count: int) -> None:
        together = max(1, min(TOGETHER, MOST // self.nbytes, self.count // 4))
        keys = list(self._next(count))
        groups = [keys[at : at + together] for at in range(0, count, together)]
        for group, following in itertools.zip_longest(groups, groups[1:]):
            if following:
                self.store.prefetch(following)
            with self.store.lease(group):
                pass

    def _one(self, count: int) -> None:
        for key in self._next(count):
            with self.store.lease(key):
                pass

    def _write(self, count: int) -> None:
        for key in self._next(count):
            self.store.create(key, (self.nbytes,), dtype=torch.uint8)

    def _moved(self, way: str) -> int:
        link = self.store.statistics().links[-1]
        return link.down.transfers if way == "write" else link.up.transfers


# -- this checkout ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """What to measure, in stores of which pool, and where."""

    folder: str
    sizes: Sequence[int]
    ways: Sequence[str]
    rounds: int
    pool: int


def measured(wanted: Wanted) -> Iterator[dict[str, Any]]:
    """Yield the rounds of each size and way: figures by name, a value for each round. The first round is not counted."""
    memory = (ctypes.c_char * wanted.pool)()
    ctypes.memset(memory, CONTENTS, wanted.pool)
    for nbytes in wanted.sizes:
        bench = Bench(wanted.folder, nbytes, wanted.pool)
        try:
            for way in wanted.ways:
                bench.round(way)
                found = []
                for _ in range(wanted.rounds):
                    cores = checksum_rate(memory)
                    one = bench.round(way)
                    found.append({**one, "cores": cores, "share": one["bytes"] / cores})
                yield {"size": nbytes, "way": way, **{name: [one[name] for one in found] for name in found[0]}}
        finally:
            bench.close()


def row(found: dict[str, Any]) -> str:
    from tiered.measuring.meters import Spread

    gigabytes = [value / 1e9 for value in found["bytes"]]
    cores = statistics.median(found["cores"]) / 1e9
    return (
        f"| {format_size(found['size'])} | {found['way']} | {Spread.of(found['tensors']).shown(digits=0)} | "
        f"{Spread.of(gigabytes).shown()} | "
        f"{Spread.of(found['cpu']).shown(digits=3)} | {cores:.1f} | {Spread.of(found['share']).shown()} |"
    )


def alone(wanted: Wanted) -> list[dict[str, Any]]:
    print("| tensor | way | tensors/s | GB/s | CPU s per GiB | checksums alone, GB/s | of the cores |")
    print("|---|---|---:|---:|---:|---:|---:|")
    rows = []
    for found in measured(wanted):
        rows.append(found)
        print(row(found), flush=True)
    return rows


# -- beside another checkout ---------------------------------------------------------------------------------------------------


def serve(parent: str, pool: int) -> None:
    """Answer each line ``NBYTES WAY`` with a round; the store is kept while the size stays."""
    bench: Bench | None = None
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        for line in sys.stdin:
            size, way = line.split()
            if bench is None or bench.nbytes != int(size):
                if bench is not None:
                    bench.close()
                bench = Bench(folder, int(size), pool)
            print(json.dumps(bench.round(way)), flush=True)
        if bench is not None:
            bench.close()


def against(other: Path, wanted: Wanted) -> list[dict[str, Any]]:
    from bench.checkouts import beside, in_turn, ratio  # not above: --serve runs this file on other checkouts, older ones too

    def cells(before: Sequence[dict[str, float]], after: Sequence[dict[str, float]], name: str, digits: int) -> str:
        there, here = ([one[name] for one in side] for side in (before, after))
        return f"{statistics.median(there):,.{digits}f} | {statistics.median(here):,.{digits}f} | {ratio(here, there)}"

    told = "here / there, median [quartiles]"
    print(f"| tensor | way | tensors/s there | here | {told} | CPU s per GiB there | here | {told} |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    rows = []
    with beside(other, __file__, ["--dir", wanted.folder, "--pool", str(wanted.pool)]) as pair:
        for nbytes, way in itertools.product(wanted.sizes, wanted.ways):
            before, after = in_turn(pair, f"{nbytes} {way}", wanted.rounds)
            rates, used = cells(before, after, "tensors", 0), cells(before, after, "cpu", 3)
            print(f"| {format_size(nbytes)} | {way} | {rates} | {used} |", flush=True)
            rows.append({"size": nbytes, "way": way, "there": before, "here": after})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m bench.engine --size 64KiB --size 1MiB --way read --rounds 9 --json engine.json",
    )
    parser.add_argument("--size", action="append", type=parse_size, help="only tensors of this size; may be repeated")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this way; may be repeated")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}, {PAIRED_ROUNDS} with --against")
    parser.add_argument("--pool", type=parse_size, default=POOL, help="bytes of the pool (default: 256MiB)")
    parser.add_argument("--dir", default="/var/tmp", help="a folder for the store's file, which stays unwritten")
    parser.add_argument("--json", metavar="FILE", help="write all figures of all rounds there")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with this other checkout, round by round")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.serve:
        serve(options.dir, options.pool)
        return 0
    from tiered.cli.output import told_environment  # not above: --serve runs this file on other checkouts, older ones too
    from tiered.measuring.meters import environment

    rounds = options.rounds or (PAIRED_ROUNDS if options.against else ROUNDS)
    told = environment()
    print(told_environment(told) + "\n")
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        wanted = Wanted(folder, options.size or SIZES, options.way or WAYS, rounds, options.pool)
        rows = against(options.against, wanted) if options.against else alone(wanted)
    if options.json:
        Path(options.json).write_text(json.dumps({"environment": told, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
