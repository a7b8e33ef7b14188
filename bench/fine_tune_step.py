"""A step of an adapter over packed weights that are larger than the budget, in layers of a 70B model, beside what it must take.

    .venv/bin/python -m bench.fine_tune_step                        four layers; 12 minutes, 12 GB of memory, 10 GB of disk
    .venv/bin/python -m bench.fine_tune_step --layers 6 --dram 3200MiB
    .venv/bin/python -m bench.fine_tune_step --width 1024 --inner 3584 --heads 16 --layers 4 --dram 24MiB     a quick look

A Llama of random weights in bf16 is read from files into a store, packed as it comes, with LoRA on all linear layers; all is
computed in fp32. A step is forward and backward of one sequence, and the update of the adapters. What it must take is the
larger of two: computing, and the bytes that the kernel read at the rate of the drive, which is measured in the same folder.
Computing is that of the same adapters over layers in memory, of one layer and of each one more as a model of two has it,
measured before and after the steps of the store; and unpacking each weight once for each pass, by the store's own kernel. The
first two steps learn the order and are not counted. Prints Markdown.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import nn

from bench.llama import config_of, quiet, write_weights
from tiered import zero
from tiered.cli.output import told_environment
from tiered.integrations.transformers import from_pretrained
from tiered.measuring.meters import Meter, Noise, environment, measure, scratch_store
from tiered.packing.quantised import QUANTIZE, Quantize, packing_where_fit
from tiered.types import format_size, parse_size

LEARNED = 2
RATE = 1e-4
SMALL = 64 << 20
"""Bytes of the pool with which the drive is measured."""


def adapted(rank: int) -> Callable[[nn.Module], nn.Module]:
    """Return what puts adapters on all linear layers of a model."""

    def prepare(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)  # type: ignore[arg-type,return-value]

    return prepare


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """Train one step, and return its seconds."""
    began = time.perf_counter()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began


def in_memory(config: Any, layers: int, rank: int, tokens: torch.Tensor, times: int) -> float:
    """Return the seconds of a step of so many layers in memory, in fp32."""
    few = copy.deepcopy(config)
    few.num_hidden_layers, few.dtype = layers, torch.float32
    with torch.device("meta"):
        base: nn.Module = transformers.LlamaForCausalLM(few)
    for module in base.modules():
        for name, one in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.full(one.shape, 0.001), requires_grad=False))
        for name, one in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.full(one.shape, 0.001), persistent=False)
    model = adapted(rank)(base)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], RATE)
    return statistics.median([step(model, optimizer, tokens) for _ in range(times + 1)][1:])


def unpacking(shapes: list[torch.Size], form: Quantize) -> tuple[float, int]:
    """Return the seconds in which weights of these shapes are unpacked once, and the bytes that they have packed."""
    seconds, nbytes = dict[torch.Size, float](), dict[torch.Size, int]()
    for shape in sorted(set(shapes), key=tuple):
        packing = packing_where_fit(form, shape, (shape[1], 1), torch.float32)
        assert packing is not None
        packed, out = torch.zeros(packing.nbytes, dtype=torch.uint8), torch.empty(shape.numel())
        taken = []
        for _ in range(4):
            began = time.perf_counter()
            packing.unpack(packed, out)
            taken.append(time.perf_counter() - began)
        seconds[shape], nbytes[shape] = statistics.median(taken[1:]), packing.nbytes
    return sum(seconds[shape] for shape in shapes), sum(nbytes[shape] for shape in shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=8192, help="of a hidden state")
    parser.add_argument("--inner", type=int, default=28672, help="of the inside of a feed-forward network")
    parser.add_argument("--heads", type=int, default=64, help="of attention; an eighth of so many have keys and values")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--quantize", choices=QUANTIZE, default="nf4")
    parser.add_argument("--dram", default="2GiB", help="the budget of the store")
    parser.add_argument("--steps", type=int, default=3, help="that are counted, after two that are not")
    parser.add_argument("--dir", default=".", help="a folder on the drive")
    options = parser.parse_args()
    quiet()
    noise = Noise()
    print(told_environment(environment()) + f", {torch.get_num_threads()} threads of torch\n")
    sizes = {"intermediate_size": options.inner, "num_attention_heads": options.heads}
    sizes["num_key_value_heads"] = max(1, options.heads // 8)
    config = config_of(options.layers, options.width, options.vocabulary, "bfloat16", **sizes)
    tokens = torch.randint(0, options.vocabulary, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench-fine-tune-step-") as made:
        weights = write_weights(Path(made) / "weights", config)
        with scratch_store(made, dram=SMALL) as store:  # a larger pool would hold what is read
            rates = measure(store)
            assert rates is not None, "the drive has no room"
        with scratch_store(made, dram=parse_size(options.dram)) as store:
            began = time.perf_counter()
            model = from_pretrained(
                transformers.AutoModelForCausalLM, Path(made) / "weights", store, dtype=torch.float32,
                prepare=adapted(options.rank), policy=zero.Policy(quantize=options.quantize),
            )  # fmt: skip
            packing = time.perf_counter() - began
            shapes = [one.shape for name, one in model.named_parameters() if not one.requires_grad and one.dim() == 2]
            optimizer = zero.AdamW([one for one in model.parameters() if one.requires_grad], RATE)

            def alone() -> tuple[float, float]:
                return tuple(in_memory(config, layers, options.rank, tokens, 2) for layers in (1, 2))  # type: ignore[return-value]

            before = alone()
            for _ in range(LEARNED):
                step(model, optimizer, tokens)
            meter, taken = Meter(store), list[float]()
            for _ in range(options.steps):
                taken.append(step(model, optimizer, tokens))
            used, after = meter.lap(), alone()
            divided = zero.statistics(model).divided
    unpacked, packed = unpacking(shapes, options.quantize)
    one, two = (statistics.fmean(several) for several in zip(before, after, strict=True))
    computing, read = one + (options.layers - 1) * (two - one), used.disk_read / options.steps
    seconds, reading = statistics.median(taken), read / rates.read
    longest = max(computing + 2 * unpacked, reading)
    cut = f"; {len(divided)} linear layers are used some rows at a time" if divided else ""
    rows = [
        ("layers", f"{options.layers} of {options.width} and {options.inner}, {options.tokens} tokens, rank {options.rank}"),
        ("weights", f"{format_size(weights)} in bf16, {format_size(packed)} as {options.quantize}; packed in {packing:.0f} s"),
        ("budget", f"{options.dram}{cut}"),
        ("step", f"**{seconds:.2f} s** ({', '.join(f'{one:.2f}' for one in taken)})"),
        ("computing", f"{computing:.2f} s: one layer {_each(before[0], after[0])}, two {_each(before[1], after[1])}"),
        ("unpacking", f"{unpacked:.2f} s for each of two passes"),
        ("drive", f"{reading:.2f} s: {read / 1e9:.3f} GB a step ({used.counted_by}), at {rates.read / 1e9:.2f} GB/s"),
        ("written", f"{used.disk_written / options.steps / 1e9:.3f} GB a step: adapters"),
        ("step, of the longer of computing with unpacking, and the drive", f"**{seconds / longest:.2f}**"),
        ("a pass reads, of the packed weights", f"{read / 2 / packed:.2f}"),
        ("other programs", f"{noise.seen()['others']:.0%} of the processor"),
    ]
    print("| | |\n|---|---|\n" + "\n".join(f"| {name} | {what} |" for name, what in rows))


def _each(before: float, after: float) -> str:
    return f"{before:.2f} and {after:.2f}"


if __name__ == "__main__":
    main()
