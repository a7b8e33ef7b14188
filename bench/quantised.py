"""Seconds and bytes a token of one model whose weights are fp32, bf16, int8 and int4 in the store, with the same memory.

    .venv/bin/python -m bench.quantised                          Markdown, some minutes
    .venv/bin/python -m bench.quantised --layers 16 --share 25% --rounds 3
    .venv/bin/python -m bench.quantised --kernels                the last table alone, half a minute

A Llama of random weights is imported once in each form (all compute in fp32). Then a round generates with each form in turn,
from a store that is open for reading with ``--share`` of the fp32 weights as memory, and the next round begins with another
form. The first two tokens, which read all and learn the order, are not counted. "full" is fp32 with memory for all weights. CPU
seconds are those of the whole process, which other programs on the machine change little.
The last table is what unpacking alone makes, in GB of output a second: by the C kernel, by torch with one thread and with all,
and copying for comparison.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.llama import config_of, generated, quiet
from tiered import TieredStore
from tiered.cli.output import told_environment
from tiered.measuring.meters import environment, turns
from tiered.packing.gguf import BLOCKS
from tiered.types import format_size

os.environ.setdefault("HF_HUB_OFFLINE", "1")

FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"compute": torch.float32},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
}
OF_FILES = (
    "int8 by row, float32 largest values",
    "float8_e4m3fn by 128 x 128, float32 scales",
    "float8_e4m3fn by 1 x 32, float32 scales",
    "float8_e5m2 by 1 x all, float32 scales",
    "float4_e2m1 by 32, scales of powers of two",
    *(kind.form for kind in BLOCKS.values()),
)
"""Forms of checkpoints that others have packed."""
SKIPPED = 2
"""Tokens that are not counted."""


def made(folder: Path, layers: int, width: int) -> int:
    """Save the model in fp32 and in bf16, and return the bytes of its fp32 weights."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of(layers, width, 4 * width))
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    model.save_pretrained(folder / "fp32")
    model.to(torch.bfloat16).save_pretrained(folder / "bf16")
    return weights


def measured(folder: Path, dram: int, tokens: int) -> tuple[list[float], list[int]]:
    """Return seconds, CPU seconds and bytes a token, and the tokens."""
    from tiered.integrations.transformers import open_model

    with TieredStore.open(folder, dram=dram, access="read") as store:

        def look() -> tuple[float, float, int]:
            return time.perf_counter(), time.process_time(), sum(link.up.bytes for link in store.statistics().links)

        found, seen = generated(open_model(store), torch.arange(10)[None], SKIPPED + tokens, look)
        store.close()
    before, after = seen[SKIPPED], seen[-1]
    return [(late - early) / tokens for early, late in zip(before, after, strict=True)], found


def kernels() -> None:
    """Print what unpacking makes, of forms that there are to choose and of some that files have, of random bytes."""
    from tiered.packing import form, quantised

    rows, columns = 2048, 4096
    print("\n| form | to | C, GB/s | torch, 1 thread | torch, all threads | copy, 1 thread |\n|---|---|---:|---:|---:|---:|")
    threads = torch.get_num_threads()
    for name in (*quantised.QUANTIZE, *OF_FILES):
        for dtype in quantised.TYPES:
            values = torch.randn(rows * columns).to(dtype)
            if name in OF_FILES:
                packing = quantised.packing_of(name, torch.Size((rows, columns)), (columns, 1))
            else:
                packing = quantised.packing_where_fit(name, torch.Size((rows, columns)), (columns, 1), dtype)
            assert packing is not None
            packed, out = torch.randint(0, 127, (packing.nbytes,), dtype=torch.uint8), torch.empty_like(values)
            if name not in OF_FILES:
                packing.pack(values, packed, "w")

            unpack, copy = partial(packing.unpack, packed, out), partial(out.copy_, values)
            torch.set_num_threads(1)
            cells = [rate(unpack, out) if form.has_kernels() else "none"]
            with mock.patch.object(form, "lib", None):
                cells.append(rate(unpack, out))
                torch.set_num_threads(threads)
                cells.append(rate(unpack, out))
            torch.set_num_threads(1)
            cells.append(rate(copy, out))
            torch.set_num_threads(threads)
            print(f"| {name} | {str(dtype).removeprefix('torch.')} | {' | '.join(cells)} |", flush=True)


def rate(call: Callable[[], object], out: torch.Tensor) -> str:
    return f"{out.nbytes / min(timed(call) for _ in range(7)) / 1e9:.1f}"


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--share", default="50%", help="memory, as a share of the fp32 weights (default: 50%%)")
    parser.add_argument("--tokens", type=int, default=8, help="counted in each run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", action="store_true", help="print the last table alone")
    options = parser.parse_args()
    from tiered.integrations.kept import opening_of
    from tiered.integrations.transformers import import_model

    quiet()
    print(told_environment(environment()) + "\n")
    if options.kernels:
        kernels()
        return 0
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        folder = Path(place)
        weights = made(folder, options.layers, options.width)
        dram = int(weights * float(options.share.rstrip("%")) / 100)
        stored, inexact, seconds_of = {}, {}, {}
        for form, given in FORMS.items():
            source = folder / ("bf16" if form == "bf16" else "fp32")
            with TieredStore.open(folder / form / "store", dram=2 * weights) as store:
                began = time.perf_counter()
                import_model(source, store, largest_unit=8 << 20, **given)
                seconds_of[form] = time.perf_counter() - began
                stored[form] = sum(store.spec(key).nbytes for key in store if "/param/" in key)
                inexact[form] = opening_of(store, "model").get("inexact", "exact")
                store.close()
        runs: dict[str, list[tuple[list[float], list[int]]]] = {form: [] for form in (*FORMS, "full")}
        for _, order in turns(list(runs), options.rounds):
            for form in order:
                memory = 2 * weights if form == "full" else dram
                runs[form].append(measured(folder / ("fp32" if form == "full" else form) / "store", memory, options.tokens))
    print(f"{format_size(weights)} of fp32 weights, {format_size(dram)} of memory; medians of {options.rounds} rounds\n")
    print("| stored as | at rest | of fp32 | import, s | s a token | CPU s | MB read a token | of fp32 | error |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---|")
    middle = {form: [statistics.median(run[i] for run, _ in found) for i in range(3)] for form, found in runs.items()}
    for form, found in runs.items():
        assert all(tokens == found[0][1] for _, tokens in found), form
        name = "fp32" if form == "full" else form
        (seconds, busy, read), most = middle[form], middle["fp32"][2]
        error = inexact[name].partition("relative error ")[2] or "exact"
        rest = f"{format_size(stored[name])} | {stored[name] / stored['fp32']:.3f} | {seconds_of[name]:.1f}"
        print(f"| {form} | {rest} | {seconds:.3f} | {busy:.3f} | {read / 1e6:.1f} | {read / most:.3f} | {error} |")
    kernels()
    return 0


if __name__ == "__main__":
    sys.exit(main())
