"""``tiered plan``: the parser. What the command computes is in ``run.py``, which imports torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tiered.cli.arguments import add_drive, add_json, command, count, counts, positive, size
from tiered.cli.spelling import Spelling
from tiered.cli.train.options import MODEL_HELP, OPTIMIZERS, UPDATES, default_of

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands

__all__ = ["add_parser"]

DESCRIPTION = """\
Say before a training whether it fits, how many bytes each step moves, how long it takes and what would make it
better. The model runs once without memory, and its steps are played in a store that has no memory either. Without
options the model is that of tiered train. The machine is measured for some seconds, or read from a file.

With --generate: what a token takes of MODEL, a model of transformers, in a store that tiered import makes. --context
is then the tokens of a conversation, and --batch how many go on at a time.

That a model does not fit is an answer, too: the exit code is 0, and --json says "fits".
"""

EXAMPLES = """\
examples:
  tiered plan --dram 256MiB                                 the model of tiered train, on this machine
  tiered plan --layers 24 --width 1024 --heads 16 --batch 8 --plot plan.svg
  tiered plan my-llama --context 2048 --dram 16GiB --machine server.json
  tiered plan meta-llama/Llama-3.1-8B --dtype bfloat16           of the hub: its config.json alone is fetched
  tiered plan my-llama --lora 16 --quantize nf4 --batch 1 --context 512 --machine laptop.json
  tiered plan Qwen/Qwen3-30B-A3B --generate --dram 12GiB --machine laptop.json
  tiered plan --layers 80 --width 8192 --heads 64 --vocabulary 128256 --machine server.json --ranks 1,8,64,1024
"""


EARLIER = Spelling({"--model": "MODEL", "--dir": "--drive"})


MACHINE = """\
a machine file by hand:
  {"read": "3.5GB", "write": "3GB", "dram": "16GiB", "flops": 4e11, "memory": "40GB"}

  read, write     the drive, bytes a second, one way at a time: the only ones that are needed; of several drives the sum
  transfer        seconds of a tensor beside its bytes (1e-4)
  dram            host memory (what is not known does not limit)
  flops           operations a second of fp32 products (1e11); flops_half: of bf16 ones (as fp32), flops_half_backward: of
                  those of backward (as flops_half)
  memory          bytes a second that the processor reads (1e10); operation: seconds of its smallest operation (5e-6)
  lease, gradient seconds of a lease (1.5e-4), and of storing a gradient beside its bytes (1e-4)
  update          elements a second that Adam updates (5e8)
  hashing         bytes a second of checksums (8e9); handling: seconds of a transfer in the store's thread (2.5e-4)
  cores, threads  of the machine (2), and those that torch computes with (1)
  hbm             memory of a device that computes (0: none); link: bytes a second to it (2e10), each way
  device_flops    its operations a second (3e13); device_memory: bytes a second of its memory (5e11)
  base            bytes of a process after its imports (240MiB)
  network         bytes a second between nodes (1.25e9); latency: seconds (5e-5)
  ranks_per_node  ranks that share a node's drive, network and memory (1); where one node has all of them, they exchange
                  through its memory
  rated_life      bytes that the drive may be written (not known); name: what the plan calls it
Sizes are numbers, or texts such as "16GiB". tiered info --machine FILE measures all but the devices and
the last four lines.

"""


def add_parser(commands: Commands) -> None:
    """Add ``plan`` to the commands."""
    summary = "what fits, how many bytes, how long, before a run"
    parser = command(commands, "plan", summary, DESCRIPTION, MACHINE + EXAMPLES, EARLIER)
    model = parser.add_argument_group("model")
    model.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a folder with a transformers config.json, or org/name on the Hugging Face hub (default: that of tiered train)",
    )
    for name in ("layers", "width", "heads", "context", "batch"):
        model.add_argument(f"--{name}", type=count, metavar="N", help=f"{MODEL_HELP[name]} (default: {default_of(name)})")
    model.add_argument("--vocabulary", type=count, metavar="N", help="tokens that there are (default: 256, bytes)")
    model.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"),
        help="of the parameters (default: what the config.json says, else float32)",
    )
    model.add_argument("--generate", action="store_true", help="plan tokens that it generates, and no training")
    how = parser.add_argument_group("training")
    how.add_argument("--dram", type=size, metavar="SIZE", help="budget of host memory (default: half of the machine's)")
    how.add_argument("--optimizer", choices=OPTIMIZERS, help="default: adamw")
    how.add_argument(
        "--lora", type=count, metavar="RANK", help="train adapters of peft of this rank, on all linear layers, and nothing else"
    )
    how.add_argument("--quantize", choices=("int8", "int4", "nf4"), help="with --lora: pack the weights that adapters are for")
    how.add_argument("--update", choices=UPDATES, help="when units are updated (default: the faster one)")
    how.add_argument(
        "--update-tier", choices=("dram", "hbm"),
        help="dram: plans are of updates on the host, and hbm is refused (default: dram)",
    )
    how.add_argument("--activations", choices=("memory", "recompute", "store"), help="default: the fastest that fits")
    how.add_argument(
        "--micro-batch", type=counts, metavar="N,N", help="parts of the batch inside units; of several the fastest that fits"
    )
    how.add_argument("--accumulate", type=count, metavar="N", help=f"{MODEL_HELP['accumulate']} (default: 1)")
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--machine", metavar="FILE", help="of tiered info --machine, or by hand, see below (default: measured here)"
    )
    add_drive(machine)
    machine.add_argument("--no-measure", dest="measure", action="store_false", help="measure nothing: bytes, and no seconds")
    machine.add_argument("--hbm", type=size, metavar="SIZE", help="memory of a device that computes (default: the file's)")
    machine.add_argument("--rated-life", type=size, metavar="SIZE", help="what the drive may be written, like 600TB")
    machine.add_argument("--network", type=positive, metavar="GB/S", help="network of a node (default: the file's, or 1.25)")
    outcome = parser.add_argument_group("results")
    outcome.add_argument(
        "--ranks", type=counts, metavar="N,N", default=(), help="simulate so many ranks, each with --dram, like 1,8,64,1024"
    )
    outcome.add_argument(
        "--optimum", action="store_true", help="also say how few bytes any plan could move (pip install '.[plan]')"
    )
    outcome.add_argument("--plot", metavar="FILE", help="draw seconds by budget, as .svg or .png (pip install '.[plot]')")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace, given: list[str]) -> int:
    from tiered.cli.plan.run import planned

    return planned(parsed)
