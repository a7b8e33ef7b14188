"""Generate with a model larger than memory: a store, accelerate's disk offload and mapped safetensors files, in turn.

    .venv/bin/python -m bench.generate --dir /mnt/nvme                    a Llama of 1 GB; needs root (a memory cgroup)
    .venv/bin/python -m bench.generate --dir /mnt/nvme --layers 16 --width 2048 --shares 0.5 --rounds 5

A Llama with random weights (fp32) is written as safetensors files and imported once. Then, for each share of its weights that
may be in memory and in each round, every way generates the same tokens, each in a process of its own in a memory cgroup with
the same limit: the largest process after its imports + 1.1 x that share + 128 MiB + activations and KV cache. The page cache
counts within the limit, and the files are dropped from the page cache before each process. The ways:

- ``tiered``: ``open_model`` in a store with ``dram=`` that share.
- ``accelerate``: ``device_map="auto"`` with ``max_memory={"cpu": share}``: what fits stays in memory, the rest is read for each
  token. Where the limit kills it, a tenth less, and so on.
- ``accelerate, all on disk``: as before, with nothing that stays.
- ``mapped``: parameters are the mapped files; the kernel decides what stays.
- ``in memory``: without a limit. Its seconds are the compute of the bound, its tokens the right ones.
- ``in memory, reading beside``: the same, while threads read and check, for each token, the bytes that a token of a store
  reads, and all weights for the first one. It has nothing to do with a store, and shows how much computing and reading at the
  same time slow each other down, which the bound leaves out.

The bound of a token is max(compute, (W - C + window) / read rate): W bytes of weights, C of memory, and the window, in which
one unit computes while others arrive (the largest unit, and what the plan leaves to read-ahead). The read rate is that of the
drive in the same round, which reads the store's own data with O_DIRECT, without the store. That of the first token is
1.2 x max(W / read rate, compute of the prompt) + 1 s. Prints Markdown; exits 1 where tokens differ.

Each process finds memory of its limit ready (``ready_memory``); ``--fresh`` leaves that out. Prints the rate at which the
system hands out memory: below a few GB/s a hypervisor has to find it first, and the first token would wait for that.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.drive import Reading
from bench.limited import Ended, drop, say, under
from bench.llama import PROMPT, VOCABULARY, config_of, generated, quiet, write_weights
from tiered.measuring.drive import read_rate
from tiered.measuring.meters import Spread, environment, turns
from tiered.types import format_size, parse_size

MIB = 1 << 20
SAID = 128 * MIB
WAYS = ("tiered", "accelerate", "accelerate, all on disk", "mapped")
MEMORY = "in memory"
BESIDE = "in memory, reading beside"


# -- the child, in the cgroup -------------------------------------------------------------------------------------------------


def child(way: str, folder: Path, share: int, tokens: int) -> None:
    """Generate. The first line on standard output ends the imports, and waits for one on standard input."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

    import tiered.integrations.transformers.pretrained
    from tiered import TieredStore
    from tiered.integrations.transformers import open_model

    if way.startswith("accelerate"):
        import accelerate.hooks  # noqa: F401
    assert LlamaForCausalLM is not None
    assert tiered.integrations.transformers.pretrained is not None
    torch.set_num_threads(2)
    quiet()
    say("imports")
    began = time.perf_counter()
    weights, store = folder / "weights", None
    if way == "tiered":
        store = TieredStore.open(folder / "store", dram=share, access="read")
        model = open_model(store)
    elif way.startswith("accelerate"):
        kept = share if way == "accelerate" else 0
        model = AutoModelForCausalLM.from_pretrained(
            weights,
            dtype=torch.float32,
            device_map="auto",
            max_memory={"cpu": kept},
            offload_folder=str(folder / "offload"),
        )
    elif way == "mapped":
        from safetensors.torch import load_file

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(weights), dtype=torch.float32)
        files = sorted(weights.glob("*.safetensors"))
        state = {name: tensor for file in files for name, tensor in load_file(file).items()}
        model.load_state_dict(state, assign=True)
        model = _with_buffers(model)
    else:
        model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    opened = time.perf_counter() - began
    reading = Reading(_data_of(folder)) if way == BESIDE else None  # ``share`` bytes a token

    def look() -> tuple[float, int]:
        if reading is not None:
            reading.wait()
        now = time.perf_counter(), read_bytes()
        if reading is not None:
            reading.begin(share if begun else sum(p.nbytes for p in model.parameters()))
        begun.append(now)
        return now

    begun: list[tuple[float, int]] = []
    found, marks = generated(model.eval(), torch.tensor([list(PROMPT.encode())]), tokens, look)
    if reading is not None:
        reading.close()
    seconds = [after[0] - before[0] for before, after in itertools.pairwise(marks)]
    read = [after[1] - before[1] for before, after in itertools.pairwise(marks)]
    answer = {"opened": opened, "first": seconds[0], "seconds": seconds[1:], "read": read[1:]}
    if store is not None:
        seen = store.statistics()
        answer |= {"window": _window(model, seen.tiers[0].capacity)}
        store.close()
    say("end", tokens=found, **answer)


def _data_of(folder: Path) -> Path:
    """Return the file that has the weights of the store."""
    return max((folder / "store").rglob("data.*"), key=lambda path: path.stat().st_size)


def _with_buffers(model: Any) -> Any:
    """Compute the buffers that are in no file: the frequencies of rotary embeddings."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    return model


def _window(model: Any, capacity: int) -> int:
    """Return the memory that cannot hold weights from token to token: the largest unit computes, others arrive."""
    from tiered.engine.retention import room_for
    from tiered.zero.paging.pager import pager_of

    sizes = [unit.plan.stored_nbytes for unit in pager_of(model).units]
    return max(sizes) + room_for(capacity, max(0, sum(sizes) - capacity), max(sizes))


def read_bytes() -> int:
    """Bytes that the kernel read from drives for this process, faults of mapped files included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


# -- the parent ---------------------------------------------------------------------------------------------------------------


def seconds_of(ended: Ended) -> float:
    """The median of the tokens after the second: in the second one a store still learns the order."""
    found: float = statistics.median(ended.last["seconds"][1:])
    return found


def read_of(ended: Ended) -> float:
    found: float = statistics.mean(ended.last["read"][1:])
    return found


def make(folder: Path, options: argparse.Namespace) -> int:
    """Write the weights, and import them. Returns the bytes of weights."""
    from tiered import TieredStore
    from tiered.integrations.transformers import import_model

    weights = write_weights(folder / "weights", config_of(options.layers, options.width))
    with TieredStore.open(folder / "store", dram=max(weights // 2, 256 * MIB)) as store:
        import_model(folder / "weights", store)
        store.close()
    return weights


def beside(options: argparse.Namespace) -> int:
    """Return the bytes of activations and KV cache: the logits of the prompt and some of its widest activations."""
    positions = len(PROMPT) + options.tokens
    caches = 2 * options.layers * positions * options.width * 4
    return caches + 8 * positions * (VOCABULARY + 4 * options.width) * 4


def compared(folder: Path, options: argparse.Namespace, weights: int, say: Callable[[str], None]) -> bool:
    file = _data_of(folder)
    extra, right = beside(options), True
    imports, less = 0, dict.fromkeys(WAYS, 0)
    titles = ["C / W", "way", "seconds a token", "bytes a token", "seconds by the bound", "bytes by W - C + window"]
    titles += ["seconds by tiered's", "first token", "first token by its bound", "opening", "peak of limit"]
    print(f"| {' | '.join(titles)} |\n|---|---|{'---:|' * (len(titles) - 2)}")
    for part in options.shares:
        share = int(weights * part)
        found: dict[str, list[Ended]] = {way: [] for way in (*WAYS, MEMORY, BESIDE)}
        rates, window = [], 0
        for number, order in turns(WAYS, options.rounds):
            rates.append(read_rate([file]))
            for way in (MEMORY, *order, BESIDE):
                say(f"{part:g} of the weights in memory, round {number + 1} of {options.rounds}: {way}")
                limit = None if way in (MEMORY, BESIDE) else share + share // 10 + SAID + extra
                ready = 0 if options.fresh else weights + SAID if limit is None else limit
                while True:
                    given = share - less.get(way, 0) if way != BESIDE else max(0, weights - share) + window
                    drop(folder)
                    words = ["bench.generate", "--child", way, str(folder), str(given), str(options.tokens)]
                    ended = under(words, limit, imports=imports, ready=ready)
                    window = ended.last.get("window", window)
                    imports = max(imports, ended.imports)
                    if ended.right or way != "accelerate" or given < share // 2:
                        break
                    less[way] += share // 10
                found[way].append(ended)
        tokens = found[MEMORY][0].last["tokens"]
        compute = [seconds_of(ended) for ended in found[MEMORY]]
        moved = max(0, weights - share) + window if share < weights else 0
        bounds = [max(c, moved / rate) for c, rate in zip(compute, rates, strict=True)]
        print(f"| {part:g} | {MEMORY}, no limit | {Spread.of(compute).shown(digits=3)} |{' |' * (len(titles) - 3)}")
        for way in (BESIDE, *WAYS):
            ends = found[way]
            if not all(ended.right for ended in ends):
                cells = [f"killed by the limit in {sum(not e.right for e in ends)} of {len(ends)} rounds", *[""] * 7]
                print(f"| {part:g} | {way} | {' | '.join(cells)} | {format_size(ends[0].limit)} |")
                right = right and way != "tiered"
                continue
            if any(ended.last["tokens"] != tokens for ended in ends):
                right = False
                print(f"{way}: OTHER TOKENS")
            ours = [seconds_of(ended) for ended in found["tiered"]] if all(e.right for e in found["tiered"]) else None
            seconds = [seconds_of(ended) for ended in ends]
            cells = [Spread.of(seconds).shown(digits=3), format_size(int(statistics.median(read_of(ended) for ended in ends)))]
            cells += [Spread.by(seconds, bounds).shown(digits=3)]
            cells += [f"{statistics.median(read_of(ended) for ended in ends) / moved:.3f}"]
            cells += [Spread.by(seconds, ours).shown(digits=3) if ours else ""]
            first = [ended.last["first"] + ended.last["opened"] for ended in ends]
            prompt = min(ended.last["first"] for ended in found[MEMORY])
            allowed = [1.2 * max(weights / rate, prompt) + 1 for rate in rates]
            cells += [Spread.of(first).shown(digits=3), Spread.by(first, allowed).shown(digits=3)]
            if way == BESIDE:  # its process is not measured while it loads
                first = [ended.last["first"] for ended in ends]
                cells[-2:] = [Spread.of(first).shown(digits=3), Spread.by(first, allowed).shown(digits=3)]
                print(f"| {part:g} | {way} | " + " | ".join(cells) + " | | |", flush=True)
                continue
            cells += [Spread.of([ended.last["opened"] for ended in ends]).shown(digits=3)]
            cells += [f"{max(e.peak for e in ends) / ends[0].limit:.2f} of {format_size(ends[0].limit)}"]
            print(f"| {part:g} | {way} | " + " | ".join(cells) + " |", flush=True)
        fresh = [ended.fresh / 1e9 for ends in found.values() for ended in ends]
        drive = f"read rate {Spread.of(rates).shown(1e-9, 3)} GB/s; window {format_size(window)}"
        drive += "" if options.fresh else f"; memory was handed out at {Spread.of(fresh).shown(digits=3)} GB/s"
        print(f"| {part:g} | {drive} |{' |' * (len(titles) - 2)}", flush=True)
    print(f"\nAfter the imports: {format_size(imports)}; activations and KV cache: {format_size(extra)}.")
    if less["accelerate"]:
        print(f"accelerate's `max_memory` is {format_size(less['accelerate'])} less than C: the limit killed it with more.")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default=".", help="where the files are made, and removed (default: .)")
    parser.add_argument("--layers", type=int, default=15, help="(default: 15)")
    parser.add_argument("--width", type=int, default=1152, help="of the hidden layers (default: 1152)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75, 0.9], help="of the weights in memory")
    parser.add_argument("--rounds", type=int, default=3, help="of all ways in turn (default: 3)")
    parser.add_argument("--tokens", type=int, default=8, help="to generate (default: 8)")
    parser.add_argument("--fresh", action="store_true", help="have no memory ready for the processes")
    parser.add_argument("--child", nargs=4, metavar=("WAY", "FOLDER", "BYTES", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        way, folder, share, tokens = options.child
        child(way, Path(folder), parse_size(share), int(tokens))
        return 0
    if options.tokens < 4 or options.rounds < 1:
        parser.error("give at least 4 tokens and one round")

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    folder = Path(tempfile.mkdtemp(dir=options.dir, prefix="bench-generate-")).resolve()
    try:
        say("making the weights, and importing them")
        weights = make(folder, options)
        seen = environment()
        command = " ".join(["python -m bench.generate", *sys.argv[1:]])
        print(f"`{command}` at {seen.get('commit')}: {format_size(weights)} of weights.\n")
        return int(not compared(folder, options, weights, say))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
