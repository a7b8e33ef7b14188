"""Tokens of four large models on three machines, as ``tiered plan --generate`` says them, and their training: the tables of
docs/plan.md.

    .venv/bin/python -m bench.plan_tokens                    prints the table, and the processor's seconds of the slowest plan
    .venv/bin/python -m bench.plan_tokens --out shapes       keeps the configurations and machine files, and the commands
    .venv/bin/python -m bench.plan_tokens --training --model Llama-3-8B
    .venv/bin/python -m bench.plan_tokens --lora             adapters, in a quarter of the bytes that the weights have

The models are their published configurations, without weights. The machines are numbers by hand, and none was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tiered.cli.main import main as tiered
from tiered.planning.generation import FORMS
from tiered.types import format_size

__all__ = ["MACHINES", "main", "write_shapes"]

MACHINES: dict[str, tuple[dict[str, Any], str]] = {
    "laptop": ({"read": "3.5GB", "write": "3GB", "dram": "16GiB", "flops": 4e11, "memory": "50GB", "update": 1.5e9}, "12GiB"),
    "desktop": (
        {
            "read": "7GB", "write": "6GB", "dram": "64GiB", "flops": 1e12, "memory": "60GB", "update": 2e9,
            "hbm": "24GiB", "device_flops": 1e14, "device_memory": 1e12, "link": "25GB",
        },
        "56GiB",
    ),
    "server": (
        {
            "read": "28GB", "write": "24GB", "dram": "512GiB", "flops": 4e12, "memory": "300GB", "update": 8e9,
            "hbm": "80GiB", "device_flops": 5e14, "device_memory": 3e12, "link": "50GB",
        },
        "448GiB",
    ),
}
"""Numbers of a machine file, and the budget: the rest is for the system and the process. An update of an element reads and
writes 28 bytes, so the memory's bytes a second bound how many are updated."""


QUARTERS = {"Llama-3-8B": "4GiB", "Llama-3-70B": "33GiB"}
"""Budgets of a quarter of the bytes that the weights have in bf16."""


def write_shapes(folder: Path) -> list[str]:
    """Write a folder with a config.json for each model. Returns their names."""
    from transformers import DeepseekV3Config, LlamaConfig, Qwen3MoeConfig

    common: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    common |= {"dtype": "bfloat16"}
    small = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    qwen: dict[str, Any] = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
    qwen |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768}
    qwen |= {"num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 40960, "dtype": "bfloat16"}
    made = {
        "Llama-3-8B": LlamaConfig(**common, **small),
        "Llama-3-70B": LlamaConfig(**common, **large),
        "Qwen3-30B-A3B": Qwen3MoeConfig(**qwen),
        "DeepSeek-V3": DeepseekV3Config(dtype="bfloat16"),  # whose defaults are that model
    }
    for name, config in made.items():
        config.save_pretrained(folder / name)
    return list(made)


def _plans(
    folder: Path, wanted: list[str] | None, asked: list[str], budgets: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[str, str, float, dict[str, Any]]]:
    """Yield model, machine, the processor's seconds, and what ``tiered plan`` says; ``budgets``: other ones, by model."""
    names = write_shapes(folder)
    for machine, (numbers, _) in MACHINES.items():
        (folder / f"{machine}.json").write_text(json.dumps(numbers | {"name": machine}, indent=1))
    for name in wanted or names:
        for machine, (_, dram) in MACHINES.items():
            budget = ["--dram", budgets.get(name, dram), "--machine", str(folder / f"{machine}.json")]
            words = ["plan", str(folder / name), *asked, *budget, "--json"]
            began = time.process_time()
            with contextlib.redirect_stdout(io.StringIO()) as told:
                code = tiered(words)
            assert code == 0, shlex.join(["tiered", *words])
            yield name, machine, time.process_time() - began, json.loads(told.getvalue())


def _tokens(folder: Path, wanted: list[str] | None) -> Iterator[str]:
    yield f"| model | machine | bf16 | {' | '.join(list(FORMS)[1:])} | first token, bf16 |"
    yield f"|---|---|{'---:|' * len(FORMS)}---:|"
    slowest = 0.0
    for name, machine, took, plan in _plans(folder, wanted, ["--generate"]):
        slowest, forms = max(slowest, took), plan["forms"]
        cells = [f"{_two(1 / one['seconds'])} ({one['limit']}, {format_size(round(one['read']))})" for one in forms]
        yield f"| {name} | {machine} | {' | '.join(cells)} | {_two(forms[0]['first'])} s |"
    yield f"\nThe slowest plan took {slowest:.1f} s of the processor."


def _training(folder: Path, wanted: list[str] | None) -> Iterator[str]:
    yield "| model, machine | chosen | s a step | waiting | GiB read | GiB written | GiB process | s of plan |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for name, machine, took, plan in _plans(folder, wanted, ["--context", "1024", "--batch", "1"]):
        one = plan["chosen"]
        if one is None or not plan["fits"]:
            yield f"| {name}, {machine} | {plan['refused']} | | | | | | {took:.0f} |"
            continue
        gib = (one["read"], one["written"], one["memory"]["process"])
        cells = [_two(one["seconds"]), _two(one["waiting"]), *(f"{nbytes / 2**30:.1f}" if nbytes else "0" for nbytes in gib)]
        chosen = f"{one['choice']['update']}, {one['choice']['activations']}"
        yield f"| {name}, {machine} | {chosen} | {' | '.join(cells)} | {took:.0f} |"


def _lora(folder: Path, wanted: list[str] | None) -> Iterator[str]:
    yield "| model, machine | weights | s a step | waiting | GiB read | GiB process | s of plan |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for form in ("bf16", "nf4"):
        asked = ["--lora", "16", "--context", "512", "--batch", "1", *([] if form == "bf16" else ["--quantize", form])]
        for name, machine, took, plan in _plans(folder, wanted or list(QUARTERS), asked, QUARTERS):
            one = plan["chosen"]
            if one is None or not plan["fits"]:
                yield f"| {name}, {machine} | {form} | {plan['refused']} | | | | {took:.0f} |"
                continue
            cells = [_two(one["seconds"]), _two(one["waiting"]), f"{one['read'] / 2**30:.1f}"]
            cells.append(f"{one['memory']['process'] / 2**30:.1f}")
            yield f"| {name}, {machine} | {form} | {' | '.join(cells)} | {took:.0f} |"


def _two(number: float) -> str:
    """Format a number with two digits."""
    return f"{number:.2g}" if number < 99.5 else f"{float(f'{number:.2g}'):,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="keep configurations and machine files there")
    parser.add_argument("--training", action="store_true", help="a step of training, of one sequence of 1,024 tokens")
    parser.add_argument("--lora", action="store_true", help="a step of training of adapters, of one sequence of 512 tokens")
    parser.add_argument("--model", action="append", metavar="NAME", help="this model, instead of all")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for line in (_training if given.training else _lora if given.lora else _tokens)(folder, given.model):
            print(line, flush=True)


if __name__ == "__main__":
    main()
