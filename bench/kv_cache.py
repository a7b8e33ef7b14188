"""A context whose keys and values are larger than the memory for them: ``TieredCache`` beside caches in memory. Markdown.

    .venv/bin/python -m bench.kv_cache --dir /mnt/nvme --context 8192 --pool 64MiB --tokens 32

A Llama of random weights, in memory, is given a prompt of so many tokens, in chunks of 512, and goes on for some more. Each
cache runs in a process of its own: "tiered"; "memory" (``DynamicCache``); "offloaded" (``DynamicCache(offloading=True)``, which
keeps layers in host memory and needs a GPU). With ``--restart`` another process opens the kept cache and makes as many again.

- "memory" is the highest resident set after the model was made, less that before, and its limit: pool x 1.1 + 128 MiB + one
  layer's keys and values.
- "read" is what the store read a token, beside what a token has to read at least: keys and values less the pool.

The tokens of all caches are compared; the program exits with 1 where they differ, or the memory is above its limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.llama import generated, quiet
from tiered.cli.arguments import count, size
from tiered.cli.output import told_environment
from tiered.measuring.meters import environment, peak_memory, scratch_folder

__all__ = ["main"]

MIB = 1 << 20
HEADS, HEAD, CHUNK = 8, 64, 512


def resident() -> int:
    """Return the bytes that are resident now, and have the highest resident set counted anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def sizes(layers: int, context: int, tokens: int) -> tuple[int, int]:
    """Return the bytes of keys and values of one layer, and of all."""
    layer = 2 * HEADS * HEAD * 4 * (context + tokens)
    return layer, layers * layer


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Generate with one kind of cache, in this process."""
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from tiered import TieredStore
    from tiered.integrations.transformers import TieredCache
    from tiered.integrations.transformers.kv_model import ARGUMENT

    quiet()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    wide = {"hidden_size": HEADS * HEAD, "intermediate_size": 2 * HEADS * HEAD, "max_position_embeddings": 1 << 20}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": options.layers}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, initializer_range=0.1, **wide, **heads)).eval()
    ids = torch.randint(0, 1000, (1, options.context))
    with torch.no_grad():
        model(ids[:, :CHUNK])  # kernels, and what they keep
    if options.kind == "again":
        ids = torch.tensor([json.loads(Path(options.folder, "tokens").read_text())])
    before = resident()
    store = None
    if options.kind in ("tiered", "again"):
        store = TieredStore.open(Path(options.folder, "store"), dram=options.pool)
        make: Any = TieredCache.open if options.kind == "again" else TieredCache
        began = time.perf_counter()
        cache: Any = make(model, store)
        opened = time.perf_counter() - began
        cache.reuse(ids)
    else:
        opened, cache = 0.0, DynamicCache(config=model.config, offloading=options.kind == "offloaded")

    def look() -> tuple[float, int, int]:
        links = () if store is None else store.statistics().links
        return time.perf_counter(), sum(link.up.bytes for link in links), sum(link.down.bytes for link in links)

    given = {ARGUMENT: cache, "eos_token_id": None, "prefill_chunk_size": CHUNK}
    made, marks = generated(model, ids, options.tokens, look, **given)
    marks.append(look())
    peak = peak_memory() - before
    began = time.perf_counter()
    if store is not None:
        cache.commit()
        Path(options.folder, "tokens").write_text(json.dumps(ids[0].tolist() + made))
    committed = time.perf_counter() - began
    first, later = marks[1], marks[-1]
    steps = options.tokens - 1
    if store is not None:
        store.close()
    return {
        "tokens": made,
        "prompt": first[0] - marks[0][0],
        "seconds": (later[0] - first[0]) / steps,
        "read": (later[1] - first[1]) / steps,
        "written": later[2],
        "memory": peak,
        "opened": opened,
        "committed": committed,
    }


def run(options: argparse.Namespace, kind: str, folder: str) -> dict[str, Any] | str:
    """Generate in a process of its own; what it measured, or the last line of its error."""
    command = [sys.executable, "-m", "bench.kv_cache", "--child", kind, "--folder", folder]
    for name in ("context", "tokens", "layers", "pool", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    """Run the processes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="folder for the store (default: here)")
    parser.add_argument("--context", type=count, default=8192, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=count, default=32, help="tokens to make (default: %(default)s)")
    parser.add_argument("--layers", type=count, default=8, help="of the model (default: %(default)s)")
    parser.add_argument("--pool", type=size, default=64 * MIB, help="memory of the store (default: 64MiB)")
    parser.add_argument("--threads", type=count, default=2, help="torch's (default: %(default)s)")
    parser.add_argument("--restart", action="store_true", help="also open the kept cache in another process, and go on")
    parser.add_argument("--child", dest="kind", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(measured(options)))
        return 0
    layer, whole = sizes(options.layers, options.context, options.tokens)
    limit = int(1.1 * options.pool) + 128 * MIB + layer
    least = max(0, whole - options.pool)
    with scratch_folder(options.dir) as folder:
        found = {kind: run(options, kind, folder) for kind in ("tiered", "memory", "offloaded")}
        if options.restart:
            found["again"] = run(options, "again", folder)
    print(told_environment(environment()))
    print(
        f"\n{options.layers} layers, {options.context:,} + {options.tokens} tokens: {whole / MIB:.0f} MiB of keys and values, ",
        end="",
    )
    print(f"one layer's {layer / MIB:.0f} MiB; pool {options.pool / MIB:.0f} MiB, so at least {least / MIB:.0f} MiB a token")
    print(f"memory may be {limit / MIB:.0f} MiB above what it was\n")
    print("| cache | ms a token | prompt s | read MiB a token | by least | memory MiB | written MiB | open ms | commit ms |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    wrong = []
    for kind, one in found.items():
        if isinstance(one, str):
            print(f"| {kind} | {one} | | | | | | | |")
            continue
        ours = kind in ("tiered", "again")
        told = f"{one['read'] / MIB:.1f} | {one['read'] / least if least else 0:.3f}" if ours else "| "
        rest = f"{one['written'] / MIB:.0f} | {1e3 * one['opened']:.0f} | {1e3 * one['committed']:.0f}" if ours else "| | "
        print(f"| {kind} | {1e3 * one['seconds']:.1f} | {one['prompt']:.1f} | {told} | {one['memory'] / MIB:.0f} | {rest} |")
        if ours and one["memory"] > limit:
            wrong.append(f"{kind}: {one['memory'] / MIB:.0f} MiB are more than {limit / MIB:.0f}")
        reference = found["memory"]
        if kind == "tiered" and not isinstance(reference, str) and one["tokens"] != reference["tokens"]:
            wrong.append("the tokens differ from those of a cache in memory")
    print(f"\n{'; '.join(wrong) or 'all tokens are those of the cache in memory, and the memory is within its limit'}")
    return 1 if wrong or isinstance(found["tiered"], str) else 0


if __name__ == "__main__":
    sys.exit(main())
