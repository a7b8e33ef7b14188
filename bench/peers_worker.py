"""The other side of ``bench/peers.py``: what runs in the peer's own environment, and the same reads done by a store.

    python bench/peers_worker.py deepspeed probe                 versions, as JSON; builds the extension where it is not built
    python bench/peers_worker.py deepspeed serve FOLDER SIZE     rates: "read", "write" or "mixed" on stdin, JSON on stdout
    python bench/peers_worker.py deepspeed|tiered make FOLDER    one tensor of 16 MiB on disk
    python bench/peers_worker.py deepspeed|tiered find FOLDER    a line: the file and the offset where its bytes are
    python bench/peers_worker.py deepspeed|tiered read FOLDER    read it; JSON of what came back
    python bench/peers_worker.py deepspeed|tiered cut FOLDER     ask for it, cut its file in half, then see what comes back

It imports nothing of tiered for DeepSpeed and nothing of DeepSpeed for tiered.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

TENSOR = 16 << 20
BLOCK = 1 << 20
AT_ONCE = 8
"""Tensors of one handle that are under way together; there are two handles, as its own swapper has."""
WARM_UP = 2


def pattern() -> torch.Tensor:
    """What is written: 16 MiB in which no two blocks are the same."""
    return (torch.arange(TENSOR // 4, dtype=torch.int32) * 2_654_435_761 % 4_294_967_291).to(torch.int32).view(torch.uint8)


def compared(found: torch.Tensor) -> dict[str, Any]:
    wrong = int((found.view(torch.uint8).reshape(-1) != pattern()).sum())
    return {"wrong_bytes": wrong, "bytes": TENSOR}


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


# DeepSpeed


def handle(depth: int) -> Any:
    """``async_io`` with the block size and depth that its documentation begins with, or a deeper queue for rates."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().load(verbose=False).aio_handle(BLOCK, depth, False, True, 1)


def probe() -> None:
    import deepspeed

    handle(8)
    say({"deepspeed": deepspeed.__version__, "torch": torch.__version__})


class Served:
    """``size`` bytes each way, in one file that is read and one that is written, through locked buffers of its own."""

    def __init__(self, folder: str, size: int) -> None:
        self.count = size // TENSOR
        self.paths = {way: os.path.join(folder, way) for way in ("read", "write")}
        self.handles = [handle(32), handle(32)]
        example = torch.empty(0, dtype=torch.uint8)
        self.buffers = [[h.new_cpu_locked_tensor(TENSOR, example) for _ in range(AT_ONCE)] for h in self.handles]
        for row in self.buffers:
            for buffer in row:
                buffer.copy_(torch.randint(0, 256, (TENSOR,), dtype=torch.uint8))
        self.move("write", "read")
        for _ in range(WARM_UP):
            self.move("write")

    def run(self, mode: str) -> dict[str, Any]:
        cpu, began = time.process_time(), time.perf_counter()
        if mode == "mixed":
            self.both()
        else:
            self.move(mode)
        seconds = time.perf_counter() - began
        nbytes = self.count * TENSOR * (2 if mode == "mixed" else 1)
        return {"bytes": nbytes, "seconds": seconds, "cpu_seconds": time.process_time() - cpu}

    def begin(self, which: int, way: str, path: str, first: int, last: int) -> bool:
        """Whether anything is under way now."""
        for slot, number in enumerate(range(first, min(first + AT_ONCE, last))):
            call = self.handles[which].async_pread if way == "read" else self.handles[which].async_pwrite
            if call(self.buffers[which][slot], path, number * TENSOR) != 0:
                raise SystemExit(f"async_io refused to {way} {path}")
        return first < last

    def move(self, way: str, file: str = "") -> None:
        """All tensors one way: while one handle's are waited for, the other's are under way."""
        path = self.paths[file or way]
        busy = [self.begin(which, way, path, which * AT_ONCE, self.count) for which in (0, 1)]
        following = 2 * AT_ONCE
        which = 0
        while any(busy):
            if busy[which]:
                self.handles[which].wait()
                busy[which] = self.begin(which, way, path, following, self.count)
                following += AT_ONCE
            which = 1 - which
        if way == "write":
            sync(path)

    def both(self) -> None:
        """One handle reads all, the other writes all."""
        following = [AT_ONCE, AT_ONCE]
        ways = ("read", "write")
        busy = [self.begin(which, way, self.paths[way], 0, self.count) for which, way in enumerate(ways)]
        while any(busy):
            for which, way in enumerate(ways):
                if busy[which]:
                    self.handles[which].wait()
                    busy[which] = self.begin(which, way, self.paths[way], following[which], self.count)
                    following[which] += AT_ONCE
        sync(self.paths["write"])


def sync(path: str) -> None:
    """What counts is when it is durable; async_io does not see to that itself."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def serve(folder: str, size: int) -> None:
    served = Served(folder, size)
    say({"ready": True})
    for line in sys.stdin:
        say(served.run(line.strip()))


def deepspeed_read(path: str, cut: bool) -> dict[str, Any]:
    h = handle(8)
    buffer = h.new_cpu_locked_tensor(TENSOR, torch.empty(0, dtype=torch.uint8))
    buffer.fill_(0xAA)
    began = h.async_pread(buffer, path, 0)
    if cut:
        os.truncate(path, TENSOR // 2)
    returned = h.wait() if began == 0 else began
    return {"returned": f"async_pread {began}, wait {returned}", **compared(buffer)}


# A store


def tiered_read(folder: str, cut: bool) -> dict[str, Any]:
    from tiered import TieredError, TieredStore

    with TieredStore.open(folder, dram="64MiB") as store:
        if cut:
            path, offset = tiered_find(folder)
            store.prefetch(["it"])
            os.truncate(path, offset + TENSOR // 2)
        else:
            store.get("other")  # one io_getevents, or more: then the second one is of what counts
        try:
            answer: dict[str, Any] = {"returned": "get: a tensor", **compared(store.get("it"))}
        except TieredError as error:
            answer = {"raised": type(error).__name__, "says": str(error)}
        try:
            answer["other"] = "right" if bool((store.get("other") == pattern()[: 1 << 20]).all()) else "wrong"
        except TieredError as error:
            answer["other"] = f"{type(error).__name__}: {error}"
        store.close()
    return answer


def tiered_find(folder: str) -> tuple[str, int]:
    from tiered.format.generations import load

    manifest = load(folder)
    assert manifest is not None
    extent = next(record.extent for record in manifest.tensors if record.key == "it")
    assert extent is not None
    return os.path.join(folder, manifest.files[extent.file].name), extent.offset


def main() -> None:
    engine, what, *rest = sys.argv[1:]
    folder = rest[0] if rest else ""
    path = os.path.join(folder, "it")
    if what == "probe":
        probe()
    elif what == "serve":
        serve(folder, int(rest[1]))
    elif what == "make" and engine == "deepspeed":
        Path(path).write_bytes(pattern().numpy().tobytes())
    elif what == "make":
        from tiered import TieredStore

        with TieredStore.open(folder, dram="64MiB") as store:
            store.put("other", pattern()[: 1 << 20].clone())
            store.put("it", pattern())
    elif what == "find":
        file, offset = (path, 0) if engine == "deepspeed" else tiered_find(folder)
        say({"file": file, "offset": offset})
    elif engine == "deepspeed":
        say(deepspeed_read(path, what == "cut"))
    else:
        say(tiered_read(folder, what == "cut"))


if __name__ == "__main__":
    main()
