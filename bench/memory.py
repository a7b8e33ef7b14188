"""Does training stay within its memory, whatever the size of the model?

    .venv/bin/python -m bench.memory                   4 GiB of state under a limit of 1.5 GiB for the whole process
    .venv/bin/python -m bench.memory --growth          one layer count and ten times as many, both with --checkpoint
    .venv/bin/python -m bench.memory --beside          what a process takes beside its pool, step by step (docs/memory.md)

The limit is a memory cgroup (v2 or v1) where this user may make one; else the peak RSS is compared with it. Prints a Markdown
table and exits 1 when the limit, or the pool's budget, was exceeded.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.command import tiered
from bench.limited import anonymous_of, memory_cgroup, read_peak, say, under
from tiered.types import format_size, parse_size

DYNAMO = "torch._dynamo, which torch imports with its first optimizer, or meta tensor"


def train(arguments: list[str], group: Path | None) -> dict[str, Any]:
    """Run ``tiered train`` (inside ``group``); its summary."""
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-memory-") as folder:
        _, summary = tiered("train", f"{folder}/store", *arguments, group=group)
        return summary | {"command": " ".join(["tiered", "train", *arguments])}


def row(summary: dict[str, Any], peak: int | None) -> str:
    cells = [
        f"`{summary['command']}`",
        f"{summary['parameters']:,}",
        format_size(summary["state_bytes"]),
        f"{format_size(summary['pool']['peak_bytes'])} of {format_size(summary['pool']['budget_bytes'])}",
        format_size(summary["peak_rss_bytes"]),
        format_size(peak) if peak is not None else "-",
        f"{summary['per_step']['seconds']:.2f} s",
    ]
    return "| " + " | ".join(cells) + " |"


# -- beside the pool ----------------------------------------------------------------------------------------------------------

def work(folder: str, pool: int) -> None:
    """Do what programs do with a store, and say when each of it has ended."""
    import torch
    from torch import nn

    from tiered import TieredStore, zero

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4096, 1024)
            self.layers = nn.ModuleList(
                nn.Linear(1024, 2048, bias=False) if n % 2 == 0 else nn.Linear(2048, 1024, bias=False) for n in range(24)
            )
            self.head = nn.Linear(1024, 4096, bias=False)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.embedding(words)
            for layer in self.layers:
                x = layer(x)
            found: torch.Tensor = self.head(x)
            return found

    torch.set_num_threads(2)
    say("imports of torch and tiered")
    import torch._dynamo

    say(DYNAMO)
    _ = torch.ones(512, 512) @ torch.ones(512, 512)
    say("the first product: buffers of torch's libraries")
    with TieredStore.open(folder + "/store", dram=pool) as store:
        say("open")
        with zero.init(store):
            model = Model()
        say("zero.init")
        zero.page(model, store)
        say("zero.page of that")
        zero.export(model, folder + "/weights", shard="100MB")
        say("zero.export")
        with torch.device("meta"):
            again = Model()
        zero.page(again, store, name="again", weights=folder + "/weights")
        say("zero.page from safetensors")
        optimizer = zero.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(16)).square().mean().backward()
            optimizer.step()
        say("two steps of training, 16 words")
        store.close()


def beside(pool: int) -> int:
    """A table of what a process has at the end of each step, and at most within it, beside its pool (all of it, once open);
    the imports are what it begins with. Looked at from outside, every millisecond or so."""
    said = pool // 10 + (128 << 20)
    print(f"A pool of {format_size(pool)}, a model of 224 MiB whose largest parameter has 16. Said: {format_size(said)}.\n")
    print("| step | at its end | at most | beside the pool |\n|---|---|---|---|")
    worst = imports = 0
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-memory-") as folder:
        words = ["bench.memory", "--child", folder, "--dram", str(pool)]
        ended = under(words, None, look=anonymous_of)
    for during, after in itertools.pairwise(ended.phases):
        sizes = f"| {after.name} | {format_size(after.begins)} | {format_size(during.most)}"
        if not imports or after.name == DYNAMO:
            imports = after.begins
            print(f"{sizes} | - |")
        else:
            extra = max(0, during.most - imports - pool)
            worst = max(worst, extra)
            print(f"{sizes} | {format_size(extra)} |")
    print(f"\nat most {format_size(worst)} beside the pool")
    return int(worst > said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="1.5GiB", help="for the whole process (default: 1.5GiB)")
    parser.add_argument("--layers", type=int, default=51, help="of width 768: 51 have 4 GiB of parameters and Adam states")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--growth", action="store_true", help="compare 4 and 40 small layers instead")
    parser.add_argument("--beside", action="store_true", help="what a process takes beside its pool, step by step")
    parser.add_argument("--dram", default="64MiB", help="the pool of --beside (default: 64MiB)")
    parser.add_argument("--child", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        work(options.child, parse_size(options.dram))
        return 0
    if options.beside:
        return beside(parse_size(options.dram))
    print("| command | parameters | state | pool peak | peak RSS | cgroup peak | per step |\n|---|---|---|---|---|---|---|")
    failed = False
    if options.growth:
        small = ["--width=256", "--heads=4", "--context=64", "--batch=1", "--dram=16MiB", "--checkpoint"]
        peaks = []
        for layers in (4, 40):
            summary = train([*small, f"--layers={layers}", f"--steps={options.steps}"], None)
            print(row(summary, None), flush=True)
            peaks.append(summary["peak_rss_bytes"])
            failed |= summary["pool"]["peak_bytes"] > summary["pool"]["budget_bytes"]
        print(f"\nten times the layers: {format_size(peaks[1] - peaks[0])} more RSS at the peak")
        return int(failed)
    limit = parse_size(options.limit)
    with memory_cgroup(limit) as group:
        shape = ["--batch=1", "--context=256", "--dram=256MiB", "--checkpoint"]
        summary = train([*shape, f"--layers={options.layers}", f"--steps={options.steps}"], group)
        print(row(summary, read_peak(group)))
        failed = summary["pool"]["peak_bytes"] > summary["pool"]["budget_bytes"] or summary["peak_rss_bytes"] > limit
        how = f"under a cgroup limit of {format_size(limit)}" if group else "no cgroup could be made: RSS only"
        print(f"\n{how}; losses {', '.join(f'{loss:.4f}' for loss in summary['loss']['all'])}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
