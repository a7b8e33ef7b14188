"""Generate with a mixture of experts larger than memory: bytes and hits beside the bounds, and what speculation does. Markdown.

    .venv/bin/python -m bench.generate_experts --dir /mnt/nvme                         a Qwen3-MoE of 4.5 GB, half an hour
    .venv/bin/python -m bench.generate_experts --dir /mnt/nvme --layers 8 --width 512 --rounds 3

The model has random weights in fp32, and routers that prefer some experts: expert r of a layer is chosen as if drawn by Zipf's
law, 1 / r ** 1.1, anew for each token (a common part of all hidden states, which each router maps to the logarithm of that law,
and random weights of the spread that a draw without replacement has). It is imported, and opened with each share of its bytes
as memory. After a warm-up, tokens are made with and without speculation, in turn; the first of each prompt is not counted.

- "read" is what the store read a token; "missed" is what of the chosen experts was not in memory when the router chose it,
  which is (1 - hit rate) x the bytes of all chosen experts; "ratio" is read / missed.
- "hits" is the share of chosen experts that were in memory. LRU and optimum: the same choices in as much memory as is left
  beside the units that each token uses, with the least recently used expert leaving first, and the one that is needed last
  (Belady 1966, "A study of replacement algorithms for a virtual-storage computer").
- "p99": of the time from a decision to read to the end of a read that somebody waits for.
- "speculative": experts that were fetched before the router had chosen, and of these the share that was used.

The tokens are compared with those of the model in memory; the program exits with 1 where they differ.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.llama import generated, quiet
from tiered.cli.arguments import count, size
from tiered.cli.output import told_environment
from tiered.measuring.meters import environment, scratch_folder
from tiered.types import Direction, Urgency

__all__ = ["belady", "lru", "main"]

ZIPF = 1.1
SPREAD = 1.28
"""Standard deviation of what a draw adds to the logarithm of a probability (Gumbel's law)."""
COMMON = 30.0
"""Length of the common part of hidden states, where the length of the rest is the square root of the width."""
PROMPT = b"The sea is"
MB = 1e6

Choices = Sequence[tuple[int, tuple[int, ...]]]
"""Layer and experts of each choice, in order."""


def lru(choices: Choices, room: int, counted: Sequence[range]) -> float:
    """Return the hit rate of the choices that are ``counted``, by number, in room for so many experts."""
    numbers = {number for span in counted for number in span}
    kept: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = asked = 0
    for number, (layer, experts) in enumerate(choices):
        mine = [(layer, expert) for expert in experts]
        if number in numbers:
            hits, asked = hits + sum(one in kept for one in mine), asked + len(mine)
        for one in mine:
            kept[one] = None
            kept.move_to_end(one)
        while len(kept) > max(room, len(mine)):
            kept.popitem(last=False)
    return hits / asked if asked else 1.0


def belady(choices: Choices, room: int, counted: Sequence[range]) -> float:
    """Return the same for who knows all choices, and has the fewest misses of them."""
    numbers = {number for span in counted for number in span}
    following: list[list[float]] = [[] for _ in choices]
    seen: dict[tuple[int, int], int] = {}
    for number in range(len(choices) - 1, -1, -1):
        layer, experts = choices[number]
        following[number] = [seen.get((layer, expert), math.inf) for expert in experts]
        seen.update(((layer, expert), number) for expert in experts)
    kept: dict[tuple[int, int], float] = {}
    hits = asked = 0
    for number, (layer, experts) in enumerate(choices):
        mine = [(layer, expert) for expert in experts]
        if number in numbers:
            hits, asked = hits + sum(one in kept for one in mine), asked + len(mine)
        kept.update(zip(mine, following[number], strict=True))
        for one in sorted(kept, key=lambda one: -kept[one])[: max(0, len(kept) - max(room, len(mine)))]:
            del kept[one]
    return hits / asked if asked else 1.0


def make(options: argparse.Namespace) -> Any:
    """Return the model, in memory."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    width = options.width
    config = Qwen3MoeConfig(
        hidden_size=width,
        intermediate_size=width,
        moe_intermediate_size=options.inner or 3 * width // 8,
        num_hidden_layers=options.layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        head_dim=64,
        num_experts=options.experts,
        num_experts_per_tok=options.used,
        vocab_size=4096,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        norm_topk_prob=True,
        eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    wanted = 1 / torch.arange(1, options.experts + 1).float() ** ZIPF
    wanted = (wanted / wanted.sum()).log()
    length = math.sqrt(COMMON**2 + width)  # of an embedding
    with torch.no_grad():
        common = torch.randn(width)
        common /= common.norm()
        model.model.embed_tokens.weight.normal_().add_(common * COMMON)
        for layer in model.model.layers:  # which adds little: a router sees the embedding, made as long as sqrt(width)
            router = layer.mlp.gate.weight
            router.normal_(std=SPREAD * length / width)
            router -= (router @ common)[:, None] * common
            chosen = wanted[torch.randperm(options.experts)]
            router += (chosen * length / (math.sqrt(width) * COMMON))[:, None] * common
    return model


@dataclass
class Side:
    """What was counted with speculation, or without."""

    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    read: int = 0
    hits: int = 0
    chosen: int = 0
    missed: int = 0
    routed: int = 0
    speculated: int = 0
    used: int = 0
    waits: list[float] = field(default_factory=list)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def generate(model: Any, tokens: int, seed: int, look: Callable[[], Any] = time.perf_counter) -> tuple[list[int], list[Any]]:
    """Draw tokens; return them, and what ``look`` returned for the prompt and for each."""
    import torch

    torch.manual_seed(seed)
    return generated(model, torch.tensor([list(PROMPT)]), tokens, look, do_sample=True, top_k=0)


def measured(options: argparse.Namespace, folder: Path, memory: int, expected: dict[int, list[int]]) -> dict[str, Any]:
    """Generate with so much memory; return what was counted by "off" and "on", and the hit rates."""
    from tiered import TieredStore
    from tiered.integrations.transformers import open_model, routed_experts
    from tiered.zero.paging.pager import pager_of

    with TieredStore.open(folder / "store", dram=memory, access="read") as store:
        model = open_model(store)
        experts = routed_experts(model)
        experts.likely = options.likely
        always = sum(unit.plan.stored_nbytes for unit in pager_of(model).units if not unit.plan.of_expert)
        each = experts.sizes[0][0]
        choices = experts.recorded = []
        wrong = generate(model, options.warm, 0)[0] != expected[0]
        counted: list[range] = []
        sides = {"off": Side(), "on": Side()}
        for number in range(options.rounds):
            for kind in ("off", "on") if number % 2 == 0 else ("on", "off"):
                side = sides[kind]
                experts.speculate = kind
                turn, first = itertools.count(), list[Any]()

                def look(turn: Iterator[int] = turn, first: list[Any] = first) -> float:
                    if next(turn) == 1:  # the first token: its prompt uses nearly all experts
                        first += experts.statistics(), store.statistics(), len(choices), time.monotonic()
                    return time.perf_counter()

                with store.timeline() as timeline:
                    # the same tokens in both, with others in between: what was read for the one does not serve the other
                    found, times = generate(model, options.tokens, 1 + number, look)
                wrong |= found != expected[1 + number]
                before, then, begin, since = first
                after, now = experts.statistics(), store.statistics()
                counted.append(range(begin, len(choices)))
                side.tokens += options.tokens - 1
                side.seconds += [b - a for a, b in itertools.pairwise(times[1:])]
                side.read += now.links[-1].up.bytes - then.links[-1].up.bytes
                side.hits += after.hits - before.hits
                side.chosen += after.hits + after.misses - before.hits - before.misses
                side.missed += after.missed_bytes - before.missed_bytes
                side.routed += after.hit_bytes + after.missed_bytes - before.hit_bytes - before.missed_bytes
                side.speculated += after.speculated - before.speculated
                side.used += after.speculated_used - before.speculated_used
                side.waits += [
                    one.ended - one.queued
                    for one in timeline.transfers
                    if one.direction is Direction.UP and one.urgency is Urgency.DEMAND and one.queued >= since
                ]
                experts.speculate = "off"
                generate(model, options.between, 1000 + number)
        room = (store.statistics().tiers[0].capacity - always) // each
        counts = {"sides": sides, "wrong": wrong, "room": room, "always": always, "each": each}
        counts |= {"lru": lru(choices, room, counted), "belady": belady(choices, room, counted), "slope": slope(choices)}
        return counts


def slope(choices: Choices) -> float:
    """Return the exponent of the law by which experts were chosen: the slope of log frequency over log rank, of all layers
    together, and of the ranks that together have 90 % of the choices."""
    counts: dict[tuple[int, int], int] = {}
    for layer, experts in choices:
        for expert in experts:
            counts[layer, expert] = counts.get((layer, expert), 0) + 1
    layers = {layer for layer, _ in counts}
    ranked = [sorted((number for (one, _), number in counts.items() if one == layer), reverse=True) for layer in layers]
    mean = [statistics.mean(row) for row in zip(*ranked, strict=False)]
    total, some = sum(mean), 0.0
    points = []
    for rank, number in enumerate(mean, 1):
        points.append((math.log(rank), math.log(number)))
        some += number
        if some > 0.9 * total:
            break
    x, y = (statistics.mean(axis) for axis in zip(*points, strict=True))
    return -sum((a - x) * (b - y) for a, b in points) / max(1e-9, sum((a - x) ** 2 for a, _ in points))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive, with room for twice the model")
    parser.add_argument("--layers", type=count, default=15)
    parser.add_argument("--width", type=count, default=1024, help="of hidden states, a multiple of 128 (default: %(default)s)")
    parser.add_argument("--inner", type=count, help="width of an expert (default: 3/8 of --width)")
    parser.add_argument("--experts", type=count, default=64, help="of a layer (default: %(default)s)")
    parser.add_argument("--used", type=count, default=8, help="experts that a token uses in a layer (default: %(default)s)")
    parser.add_argument("--share", type=float, action="append", help="of the bytes in memory (default: 0.25, 0.5, 0.75)")
    parser.add_argument("--tokens", type=count, default=24, help="of a segment (default: %(default)s)")
    parser.add_argument("--warm", type=count, default=60, help="tokens before anything counts (default: %(default)s)")
    parser.add_argument("--between", type=count, default=8, help="other tokens between segments (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=4, help="segments with and without speculation (default: %(default)s)")
    parser.add_argument("--likely", type=float, default=0.5, help="speculate on experts of that share (default: %(default)s)")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--import-dram", type=size, default=2 << 30, help="memory of the import (default: 2 GiB)")
    options = parser.parse_args()

    import torch

    from tiered import TieredStore
    from tiered.integrations.transformers import import_model

    quiet()
    torch.set_num_threads(options.threads)
    wrong = False
    with scratch_folder(options.dir) as place:
        folder = Path(place)
        model = make(options)
        weights = sum(parameter.nbytes for parameter in model.parameters())
        expected = {0: generate(model, options.warm, 0)[0]}
        expected |= {1 + number: generate(model, options.tokens, 1 + number)[0] for number in range(options.rounds)}
        model.save_pretrained(folder / "weights")
        del model
        with TieredStore.open(folder / "store", dram=options.import_dram) as store:
            import_model(folder / "weights", store)
        for path in (folder / "weights").iterdir():
            path.unlink()
        print(told_environment(environment()))
        head = True
        for share in options.share or (0.25, 0.5, 0.75):
            found = measured(options, folder, int(share * weights), expected)
            wrong |= found["wrong"]
            if head:
                print(
                    f"\n{weights / 1e9:.2f} GB of weights in fp32, {found['always'] / MB:.0f} MB of them used by each token; "
                    f"{options.layers} layers of {options.experts} experts of {found['each'] / MB:.2f} MB, {options.used} used "
                    f"a token; choices fall off by rank with exponent {found['slope']:.2f}\n"
                )
                print(
                    "| memory | speculation | ms a token | read MB a token | missed MB | ratio | routed MB | hits | LRU "
                    "| optimum | demand reads | p99 ms | speculative | used |"
                )
                print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
                head = False
            for kind, side in found["sides"].items():
                used = f"{side.used / side.speculated:.0%}" if side.speculated else ""
                read, missed, routed = (value / side.tokens / MB for value in (side.read, side.missed, side.routed))
                print(
                    f"| {share:.0%} | {kind} | {1e3 * statistics.median(side.seconds):.0f} | {read:.1f} | {missed:.1f} | "
                    f"{read / missed if missed else 0:.2f} | {routed:.1f} | {side.hits / side.chosen:.3f} | "
                    f"{found['lru']:.3f} | {found['belady']:.3f} | {len(side.waits)} | "
                    f"{1e3 * percentile(side.waits, 0.99):.1f} | {side.speculated} | {used} |",
                    flush=True,
                )
    print(f"\n{'the tokens differ from those in memory' if wrong else 'all tokens are those of the model in memory'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
