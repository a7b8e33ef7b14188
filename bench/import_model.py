"""Import a model into a store, and open it, beside what the drive needs to read and to write as many bytes.

    .venv/bin/python -m bench.import_model --dir /mnt/nvme                     a Llama of 1 GB; needs root (a memory cgroup)
    .venv/bin/python -m bench.import_model --dir /mnt/nvme --layers 16 --width 2048 --dram 1GiB --rounds 5

A Llama with random weights (fp32, W bytes) is written as safetensors files once. Each round then measures, the files dropped
from the page cache before each step:

- the read rate of the drive on these files, and its write rate on a file of W bytes, without a store. The
  bound of an import is W/read rate + W/write rate.
- the import, in a process of its own in a memory cgroup with a limit of its imports (measured, printed) + 1.1 x ``--dram`` +
  128 MiB. Its seconds are those of opening the store and ``import_model``, committed.
- opening the store and the first token of a prompt of 25 tokens, in another process in such a cgroup. The bound is max(W/read
  rate, compute) + 1 s, where compute is the prompt in memory, in a third process.

The first two processes find memory of their limit ready (``ready_memory``); ``--fresh`` leaves that out. "memory GB/s" is the
rate at which the system handed it out before the import: below a few GB/s a hypervisor has to find it first.

"CPU s" is the processor time of the import, which other programs on the machine change little. Prints Markdown, medians last;
exits 1 where a process was killed, or a token is not that of the model in memory.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.limited import MIB, Ended, anonymous_of, drop, say, under
from bench.llama import PROMPT, config_of, quiet, write_weights
from tiered.cli.arguments import count, size
from tiered.cli.output import told_environment
from tiered.measuring.drive import read_rate, write_rate
from tiered.measuring.meters import environment
from tiered.types import format_size

__all__ = ["main"]

SAID = 128 * MIB


# -- the children -------------------------------------------------------------------------------------------------------------


def child(what: str, folder: Path, dram: int) -> None:
    """The first line on standard output ends the imports, and waits for one on standard input."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    from tiered import TieredStore
    from tiered.integrations.transformers import import_model, open_model

    assert LlamaForCausalLM is not None
    torch.set_num_threads(2)
    quiet()
    say("imports")
    began, computed = time.perf_counter(), time.process_time()
    if what == "import":
        store = TieredStore.open(folder / "store", dram=dram)
        import_model(folder / "weights", store, progress=lambda what, share: None)
        took = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - computed}
        say("end", written=store.statistics().links[-1].down.bytes, **took)
        store.close()
        return
    prompt = torch.tensor([list(PROMPT.encode())])
    given: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 1, "do_sample": False}
    if what == "open":
        store = TieredStore.open(folder / "store", dram=dram, access="read")
        model = open_model(store)
        opened = time.perf_counter() - began
    else:
        model = AutoModelForCausalLM.from_pretrained(folder / "weights", dtype=torch.float32)
        model.generate(prompt, pad_token_id=0, **given)
        began, opened = time.perf_counter(), 0.0
    token = model.generate(prompt, pad_token_id=0, **given)[0, -1].item()
    say("end", seconds=time.perf_counter() - began, opened=opened, token=token)
    if what == "open":
        store.close()


# -- the parent ---------------------------------------------------------------------------------------------------------------


def run(what: str, folder: Path, options: argparse.Namespace, *, limited: bool) -> Ended:
    """Run a child, ``limited`` by a cgroup from the end of its imports on; then it finds its memory ready."""
    drop(folder)
    extra = options.dram + options.dram // 10 + SAID
    words = ["bench.import_model", "--child", what, str(folder), str(options.dram)]
    ready = extra if limited and not options.fresh else 0
    return under(words, extra if limited else None, ready=ready, look=anonymous_of)


COLUMNS = (
    *("memory GB/s", "read GB/s", "write GB/s", "import s", "CPU s", "by the bound", "peak by the limit", "opening s"),
    *("first token s", "by its bound"),
)


def compared(folder: Path, options: argparse.Namespace, weights: int) -> bool:
    files, right = sorted((folder / "weights").glob("*.safetensors")), True
    print(f"| round | {' | '.join(COLUMNS)} |\n|---|{'---:|' * len(COLUMNS)}")
    rows = []
    for number in range(options.rounds):
        shutil.rmtree(folder / "store", ignore_errors=True)
        drop(folder)
        reading, writing = read_rate(files), write_rate(folder / "written", weights)
        importing, opening = (run(what, folder, options, limited=True) for what in ("import", "open"))
        imported, opened, whole = importing.last, opening.last, run("memory", folder, options, limited=False).last
        if not (importing.right and opening.right) or opened["token"] != whole["token"]:
            print(f"round {number + 1}: killed {importing.killed}, {opening.killed}, or another token than in memory")
            right = False
            continue
        bound = weights / reading + weights / writing
        first = 1.2 * max(weights / reading, whole["seconds"]) + 1
        peak = max((one.most() - one.imports) / (one.limit - one.imports) for one in (importing, opening))
        rows.append(
            (
                *(importing.fresh / 1e9, reading / 1e9, writing / 1e9),
                *(imported["seconds"], imported["cpu"], imported["seconds"] / bound, peak),
                *(opened["opened"], opened["seconds"], opened["seconds"] / first),
            )
        )
        print(f"| {number + 1} | {' | '.join(f'{value:.2f}' for value in rows[-1])} |", flush=True)
    if rows:
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"| median | {' | '.join(f'{value:.2f}' for value in medians)} |\n")
        taken = {"limit": importing.limit, "highest": importing.most(), "peak": importing.peak}
        sizes = {name: format_size(nbytes - importing.imports) for name, nbytes in taken.items()}
        print(
            f"W = {weights:,} bytes; {imported['written']:,} were written to the store. The programs' own imports are "
            f"{format_size(importing.imports)}, the limit {sizes['limit']} more. The import took {sizes['highest']} of that, "
            f"or {sizes['peak']} with the page cache. The prompt in memory: {whole['seconds']:.2f} s."
        )
    return right


def main(given: list[str] | None = None) -> int:
    if given is None and sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(), help="a folder on the drive to measure (default: here)")
    parser.add_argument("--layers", type=count, default=18)
    parser.add_argument("--width", type=count, default=1024)
    parser.add_argument("--dram", type=size, default=512 * MIB, help="memory of the store (default: 512MiB)")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--fresh", action="store_true", help="have no memory ready for the processes")
    options = parser.parse_args(given)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench-import-") as made:
        folder = Path(made)
        weights = write_weights(folder / "weights", config_of(options.layers, options.width))
        model = f"{options.layers} layers of width {options.width}: {weights / 1e9:.2f} GB in fp32"
        print(f"{told_environment(environment())}\n\n{model}; {format_size(options.dram)} of memory\n")
        return 0 if compared(folder, options, weights) else 1


if __name__ == "__main__":
    sys.exit(main())
