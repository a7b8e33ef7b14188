"""One large tensor on several drives: striped over them, and whole on one of them, beside plain reads of the drives: Markdown.

    .venv/bin/python -m bench.striping --drives /mnt/a /mnt/b > bench/results/striping_<hardware>_<date>.md

- "written": ``put`` of one tensor, and the commit that flushes it.
- "read": a lease of it in a store that was just opened, so that it comes from the drives; checksums are compared.
- "plain reads": as many bytes with O_DIRECT in pieces of 4 MiB, one after the other on each drive, by a thread for each.

Medians of interleaved rounds, with the least and the most. Needs three times --size on each drive, and memory for it twice.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from unittest import mock

from tiered import TieredStore
from tiered.cli.arguments import size
from tiered.cli.output import told_environment
from tiered.format import stripes
from tiered.measuring.drive import Drive, Point
from tiered.measuring.meters import Meter, Spread, bytes_of, environment
from tiered.types import PIECE_BYTES, format_size

__all__ = ["main"]

LAYOUTS = ("whole, on one drive", "striped")


def timed(drives: list[Path], layout: str, nbytes: int) -> tuple[float, float, int, int]:
    """Seconds to write and to read the tensor, and bytes that the kernel counted for each."""
    home = drives[0] / "tiered-striping"
    paths = [drive / f"tiered-striping-{number}" for number, drive in enumerate(drives)]
    limit = sys.maxsize if layout == LAYOUTS[0] else stripes.LARGEST_WHOLE
    pool = nbytes + (32 << 20)
    try:
        with mock.patch.object(stripes, "LARGEST_WHOLE", limit):
            data = bytes_of(nbytes)
            with TieredStore.open(home, paths=paths, dram=pool) as store:
                store.put("small", data[:4096])
                store.commit()
                meter = Meter(store)
                began = time.perf_counter()
                store.put("large", data)
                store.commit()
                written, wrote = time.perf_counter() - began, meter.lap().kernel_written or 0
                assert store._parts.nvme is not None
                assert store._parts.nvme.striped(store.generation) == (layout != LAYOUTS[0])
            with TieredStore.open(home, paths=paths, dram=pool) as store:
                meter = Meter(store)
                began = time.perf_counter()
                with store.lease("large") as tensor:
                    read = time.perf_counter() - began
                    assert tensor.equal(data)
                del tensor
                got = meter.lap().kernel_read or 0
        return written, read, wrote, got
    finally:
        for path in (home, *paths):
            shutil.rmtree(path, ignore_errors=True)


def plain(drives: list[Path], nbytes: int) -> float:
    """Seconds to read ``nbytes`` in all, an equal part from each drive."""
    each = -(-nbytes // len(drives) // PIECE_BYTES) * PIECE_BYTES
    one_by_one = Point("read", "sequential", PIECE_BYTES, 1)
    with ExitStack() as stack:
        files = []
        for folder in drives:
            drive = stack.enter_context(closing(Drive(folder / "tiered-plain", each)))
            stack.callback(Path(drive.path).unlink)
            drive.prepare()
            files.append(drive)
        with ThreadPoolExecutor(len(files)) as threads:
            began = time.perf_counter()
            list(threads.map(lambda file: file.run(one_by_one, "posix"), files))
            return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.striping", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--drives", nargs="+", type=Path, required=True, help="a folder on each drive")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=size, default=512 << 20, help="bytes of the tensor (default: 512MiB)")
    options = parser.parse_args()
    print(told_environment(environment()), flush=True)
    found: dict[str, list[float]] = {}
    counted: dict[str, int] = {}
    for _ in range(options.rounds):
        for layout in LAYOUTS:
            written, read, wrote, got = timed(options.drives, layout, options.size)
            for what, seconds, nbytes in (("written", written, wrote), ("read", read, got)):
                found.setdefault(f"{what}, {layout}", []).append(seconds)
                counted[f"{what}, {layout}"] = nbytes
        for drives in (options.drives[:1], options.drives):
            found.setdefault(f"plain reads, {len(drives)} drives", []).append(plain(drives, options.size))
    print(f"\nOne tensor of {format_size(options.size)}, {len(options.drives)} drives, {options.rounds} rounds.\n")
    print("| what | MB/s | bytes by the kernel |\n|---|---:|---:|")
    for what, times in found.items():
        rates = Spread.of([options.size / 1e6 / seconds for seconds in times]).shown(digits=0)
        print(f"| {what} | {rates} | {format(counted[what], ',') if what in counted else ''} |")
    print("\n| ratio, round by round | |\n|---|---:|")
    for what in ("written", "read"):
        pairs = found[f"{what}, {LAYOUTS[0]}"], found[f"{what}, striped"]
        print(f"| {what}: rate striped, by rate whole | {Spread.by(*pairs).shown()} |")
    beside = found[f"plain reads, {len(options.drives)} drives"], found["read, striped"]
    print(f"| read striped, by plain reads of all drives | {Spread.by(*beside).shown()} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
