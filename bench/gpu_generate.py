"""Generation with a model twice as large as the device memory that it may take: a store, and accelerate's offload.

    .venv/bin/python -m bench.gpu_generate --dir /mnt/nvme --json generate.json

A Llama with random weights in bf16 is written as safetensors files and imported into a store. Then each way generates the same
number of tokens, greedily, from the same prompt:

- ``in device memory``: the whole model. Its tokens are the right ones.
- ``tiered``: ``open_model`` in a store with ``hbm=`` half of the weights and ``dram=`` room for all of them.
- ``accelerate``: ``device_map="auto"``, with ``max_memory`` of half of the weights on the device and the rest in host memory.
  Left out where accelerate is not installed.

Seconds of a token are the median after the second one. What was measured is written to ``--json`` after each way.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu_paths import MIB, Device
from bench.gpu_train import Result
from bench.llama import PROMPT, VOCABULARY, config_of, generated, quiet, write_weights
from tiered import TieredStore
from tiered.measuring.meters import scratch_folder
from tiered.types import format_size

WAYS = ("in device memory", "tiered", "accelerate")
SMALLEST = MIB


def in_memory(folder: Path, device: Device, budget: int) -> tuple[Any, Callable[[], None]]:
    """Return the model on the device, and what closes it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "weights", dtype=torch.bfloat16).to(device.device), lambda: None


def in_store(folder: Path, device: Device, budget: int) -> tuple[Any, Callable[[], None]]:
    """Return the model that was imported, in a store with ``budget`` bytes of device memory."""
    from tiered.integrations.transformers import open_model

    dram = 3 * budget + SMALLEST
    store = TieredStore.open(folder / "store", hbm=budget, dram=dram, device=str(device.device), access="read")
    return open_model(store), store.close


def offloaded(folder: Path, device: Device, budget: int) -> tuple[Any, Callable[[], None]]:
    """Return the model as accelerate divides it: ``budget`` bytes on the device (rehearsed: in memory, the rest on disk)."""
    from transformers import AutoModelForCausalLM

    most: dict[int | str, int] = {device.device.index or 0: budget, "cpu": 8 * budget} if device.cuda else {"cpu": budget}
    model = AutoModelForCausalLM.from_pretrained(
        folder / "weights",
        dtype=torch.bfloat16,
        device_map="auto",
        max_memory=most,
        offload_folder=str(folder / "offload"),
    )
    return model, lambda: None


MAKE = dict(zip(WAYS, (in_memory, in_store, offloaded), strict=True))


def run(options: argparse.Namespace) -> None:
    """Measure each way, and write what was measured."""
    from tiered.integrations.transformers import import_model

    quiet()
    device, result = Device(options.device), Result(options.json)
    with scratch_folder(options.dir) as scratch:
        folder = Path(scratch)
        weights = write_weights(folder / "weights", config_of(options.layers, options.width, options.vocabulary, "bfloat16"))
        budget = max(SMALLEST, weights // 2)
        with TieredStore.open(folder / "store", dram=max(SMALLEST, weights // 4)) as store:
            import_model(folder / "weights", store, largest_unit=budget // 8)
            store.close()
        result.keep(weights=weights, budget=budget, tokens=options.tokens, ways={})
        for way in WAYS:
            if way == "accelerate" and importlib.util.find_spec("accelerate") is None:
                result.keep(left_out={way: "it is not installed"})
                continue
            if device.cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device.device)
            began = time.perf_counter()
            model, close = MAKE[way](folder, device, budget)
            opened = time.perf_counter() - began
            there = device.device if way != "accelerate" or device.cuda else torch.device("cpu")
            prompt = torch.tensor([list(PROMPT.encode())], device=there)
            found, marks = generated(model.eval(), prompt, options.tokens, time.perf_counter)
            seconds = [after - before for before, after in itertools.pairwise(marks)]
            peak = torch.cuda.max_memory_allocated(device.device) if device.cuda else None
            one = {"opened": opened, "first": seconds[0], "seconds": seconds[1:], "tokens": found, "peak": peak}
            result.keep(ways={**result.data["ways"], way: one})
            print(f"{way}: {statistics.median(seconds[2:]):.4f} s a token of a model of {format_size(weights)}", flush=True)
            del model
            close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default=".", help="where the files are made, and removed (default: .)")
    parser.add_argument("--layers", type=int, default=8, help="(default: 8)")
    parser.add_argument("--width", type=int, default=2048, help="of the hidden layers (default: 2048)")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help=f"(default: {VOCABULARY})")
    parser.add_argument("--tokens", type=int, default=16, help="to generate (default: 16)")
    parser.add_argument("--json", help="write what was measured there")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...; cpu, or the tests' fake device, rehearse")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed")
        return 1
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
