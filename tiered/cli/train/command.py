"""``tiered train``: its options. torch is imported only when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from tiered.cli.arguments import BACKENDS, command, count, fraction, launched, positive, seconds, seed, size, size_or_none
from tiered.types import BackendName

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands

__all__ = ["Options", "add_parser"]

DESCRIPTION = """\
Train a byte-level GPT on a text file. Parameters, gradients and Adam states live in a store on disk; of
them, only what the memory budget (--dram) allows is in memory at any time. Without options: 113 million
parameters on ten plays of Shakespeare, about 3 minutes on 2 cores.
"""

RESUMING = """\
resuming:
  Ctrl-C and SIGTERM commit the last whole step and stop; a second one leaves at once, without a commit. With
  --resume training goes on from the newest commit in --dir, bit for bit as if it had never stopped. It has
  the options that it began with. Given anew may be --steps or --minutes, --dram, --backend, --commit-every,
  --checkpoint, --text (the same text elsewhere), --no-prefetch and those of the outcome.
  --steps and --minutes count from the very beginning. The learning rate follows them: given others, it goes
  on at the place on the new curve that so many steps or minutes have reached. So after a training that has
  come to its end, --steps with a larger number lifts it again.

several ranks:
  torchrun --nproc-per-node 2 -m tiered train ... trains in as many processes, on as many nodes, as torchrun
  starts. Rank R of N has a store of its own in DIR/rank-R-of-N, and of the model what --stage says. --batch
  and --dram are each rank's: one step sees batch x accumulate x ranks texts. Rank 0 prints, and losses are
  means over ranks. Commits are waited for by all. --resume goes on from the newest commit in DIR, bit for bit
  with as many ranks as made it; another number of ranks, or one process, takes it over into stores of its
  own. With torchrun --max-restarts, which starts the same command again when a rank is lost, give --resume:
  it begins anew where nothing is committed yet.

"""

EXAMPLES = """\
examples:
  tiered train --dir my-store --dram 256MiB            the model that the defaults describe
  tiered train --text book.txt --minutes 10 --checkpoint --layers 32 --dir other-store
  tiered train --dir my-store --commit-every 10        a crash costs ten steps at most
  tiered train --resume --dir my-store                 go on after a crash, Ctrl-C or SIGTERM
  tiered train --resume --dir my-store --steps 100     more steps than were said at first
  torchrun --nproc-per-node 2 --max-restarts 3 -m tiered train --resume --dir many --commit-every 10
  tiered train --hbm 8GiB --dram 32GiB                 compute on a GPU
  tiered train --check                                 prove it: the same numbers as in memory, bit by bit
  tiered train --timeline run.json --plot run.png      what happened when, in three of its steps
"""

DEMO: dict[str, Any] = {
    "dram": 256 << 20,
    "layers": 16,
    "width": 768,
    "heads": 12,
    "context": 128,
    "batch": 4,
    "accumulate": 1,
    "steps": 50,
    "warmup": 5,
}
"""What is meant where an option is not given: at least 100 million parameters, about 3 minutes on 2 cores."""

USUAL: dict[str, Any] = {
    "existing": "refuse",
    "backend": "auto",
    "device": "cuda",
    "update_tier": "dram",
    "prefetch": "on",
    "recompute": False,
    "micro_batch": 1,
    "update": "on_fetch",
    "lr": 1e-4,
    "weight_decay": 0.1,
    "seed": 0,
    "stage": 3,
}
"""The same, of any size."""

CHECK = DEMO | {
    "dram": 4 << 20,
    "layers": 6,
    "width": 192,
    "heads": 6,
    "context": 64,
    "batch": 2,
    "accumulate": 2,
    "steps": 20,
}
"""The same with ``--check``: seconds, and a budget that evicts every unit between its uses."""


TIMEOUT = 60.0
"""Seconds that a rank waits for the others, where nothing is given."""


@dataclass(frozen=True)
class Options:
    """``dram`` and ``hbm`` in bytes (None or 0: all is computed on the CPU). ``steps`` None: until ``minutes`` are over.
    ``folder`` None: a temporary one."""

    text: str | None
    folder: str | None
    existing: Literal["refuse", "overwrite"]
    dram: int
    hbm: int | None
    device: str
    update_tier: Literal["dram", "hbm"]
    backend: BackendName
    prefetch: Literal["on", "off"]
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    accumulate: int
    micro_batch: int
    update: Literal["on_fetch", "in_backward"]
    recompute: bool
    steps: int | None
    minutes: float | None
    lr: float
    warmup: int
    weight_decay: float
    clip: float
    seed: int
    json: str | None
    timeline: str | None
    plot: str | None
    timeline_steps: int
    commit_every: int | None
    stage: int


def add_parser(commands: Commands) -> None:
    """Add ``train`` to the commands."""
    parser = command(commands, "train", "train a GPT that is larger than its memory budget", DESCRIPTION, RESUMING + EXAMPLES)
    where = parser.add_argument_group("data and store")
    where.add_argument(
        "--text", metavar="FILE", help="text to learn, any bytes (default: the Shakespeare that ships with this)"
    )
    where.add_argument(
        "--dir", metavar="DIR", dest="folder", help="the store's folder, made when absent (default: ./tiered-store)"
    )
    where.add_argument(
        "--existing",
        choices=("refuse", "overwrite"),
        help="what to do when DIR holds a model already (default: refuse)",
    )
    where.add_argument("--resume", action="store_true", help="go on with the training in DIR, from its newest commit")
    where.add_argument(
        "--commit-every", metavar="N", type=count, help="make every Nth step durable, in the background (default: the last one)"
    )
    where.add_argument(
        "--dram", metavar="SIZE", type=size, help=f"memory for parameters, gradients and states {_default('dram')}"
    )
    where.add_argument(
        "--hbm",
        metavar="SIZE",
        type=size_or_none,
        help="memory for parameters on --device, where they are computed with then (default: none, on the CPU)",
    )
    where.add_argument("--device", metavar="NAME", help="with --hbm; cpu stands in for one (default: cuda)")
    where.add_argument(
        "--update-tier", choices=("dram", "hbm"), help="with --hbm: where optimizer states come to be updated (default: dram)"
    )
    where.add_argument("--backend", choices=BACKENDS, help="how to do I/O (default: auto)")
    where.add_argument(
        "--no-prefetch",
        dest="prefetch",
        action="store_const",
        const="off",
        help="fetch only what is asked for, to see what fetching ahead brings",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--layers", metavar="N", type=count, help=f"transformer blocks {_default('layers')}")
    model.add_argument("--width", metavar="N", type=count, help=f"a multiple of --heads {_default('width')}")
    model.add_argument("--heads", metavar="N", type=count, help=f"attention heads {_default('heads')}")
    model.add_argument("--context", metavar="N", type=count, help=f"bytes of text that are seen at once {_default('context')}")
    model.add_argument(
        "--checkpoint",
        dest="recompute",
        action="store_const",
        const=True,
        help="compute each block again in backward instead of keeping its activations",
    )
    training = parser.add_argument_group("training")
    training.add_argument("--batch", metavar="N", type=count, help=f"texts at once {_default('batch')}")
    training.add_argument("--accumulate", metavar="N", type=count, help=f"batches per step {_default('accumulate')}")
    training.add_argument(
        "--micro-batch",
        metavar="K",
        type=count,
        help="parts of a batch inside units: parameters are read once for all of them (default: 1)",
    )
    training.add_argument(
        "--update",
        choices=("on_fetch", "in_backward"),
        help="when units are updated; in_backward goes without clipping and accumulating (default: on_fetch)",
    )
    training.add_argument("--steps", metavar="N", type=count, help=f"stop after so many {_default('steps')}")
    training.add_argument(
        "--minutes", metavar="M", type=positive, help="stop after so long, or after --steps where both are given"
    )
    training.add_argument("--lr", metavar="R", type=positive, help=f"highest learning rate (default: {USUAL['lr']})")
    training.add_argument("--warmup", metavar="N", type=count, help=f"steps until then; a cosine follows {_default('warmup')}")
    training.add_argument(
        "--weight-decay",
        metavar="R",
        type=fraction,
        help=f"of matrices; vectors have none (default: {USUAL['weight_decay']})",
    )
    training.add_argument(
        "--clip",
        metavar="NORM",
        type=fraction,
        help="largest gradient norm, 0 for any (default: 1.0; with --update in_backward 0)",
    )
    training.add_argument("--seed", metavar="N", type=seed, help="of initial values and data order (default: 0)")
    several = parser.add_argument_group("several ranks (torchrun)")
    several.add_argument(
        "--stage",
        metavar="S",
        type=int,
        choices=(1, 2, 3),
        help="each rank has its share of: 1 optimizer states, 2 and of gradients, 3 and of parameters (default: 3)",
    )
    several.add_argument(
        "--timeout", metavar="T", type=seconds, help="how long a rank waits for the others, such as 60s or 5min (default: 60s)"
    )
    outcome = parser.add_argument_group("outcome")
    outcome.add_argument(
        "--check",
        action="store_true",
        help="train twice, on the store and in memory, and compare every number bit by bit; small sizes unless given",
    )
    outcome.add_argument("--json", metavar="FILE", help="write the summary there as JSON; '-' is stdout")
    outcome.add_argument(
        "--timeline", metavar="FILE", help="write what happened when as a trace for ui.perfetto.dev or chrome://tracing"
    )
    outcome.add_argument("--plot", metavar="FILE.png", help="draw the same (pip install '.[plot]')")
    outcome.add_argument(
        "--timeline-steps", metavar="N", type=count, help="of so many steps, after the first five or at the end (default: 3)"
    )
    parser.set_defaults(
        run=lambda parsed, given: _run(parser, parsed, given),
        memory_mend="lower --batch, --context or --dram, or add --checkpoint",
    )


def _run(parser: argparse.ArgumentParser, parsed: argparse.Namespace, given: list[str]) -> int:
    if parsed.check and parsed.minutes is not None:
        parser.error("--check compares a number of steps: give --steps, not --minutes")
    if parsed.check and (parsed.timeline or parsed.plot):
        parser.error("--check compares numbers: without --timeline and --plot")
    if parsed.check and (parsed.resume or parsed.commit_every):
        parser.error("--check compares numbers, and commits nothing: without --resume and --commit-every")
    if parsed.resume and parsed.existing:
        parser.error("--resume goes on with what is there: without --existing")
    if parsed.check and parsed.hbm and parsed.device != "cpu":
        parser.error("--check compares with the CPU, bit by bit: --hbm with --device cpu")
    if (parsed.device or parsed.update_tier) and not (parsed.hbm or parsed.resume):
        parser.error("--device and --update-tier are for --hbm SIZE")
    if parsed.timeline_steps and not (parsed.timeline or parsed.plot):
        parser.error("--timeline-steps is for --timeline and --plot")
    if parsed.recompute and (parsed.micro_batch or 1) > 1:
        parser.error("--micro-batch computes units again in backward: without --checkpoint")
    here = launched()
    if here.ranks == 1 and (parsed.stage or parsed.timeout):
        parser.error("--stage and --timeout are for several ranks: torchrun --nproc-per-node 2 -m tiered train ...")
    if here.ranks > 1 and parsed.check:
        parser.error("--check compares one process with memory: without torchrun")
    if here.may_restart and parsed.existing == "overwrite":
        parser.error("--existing overwrite would do so again after each of --max-restarts: name a new --dir, with --resume")
    values = {field.name: getattr(parsed, field.name) for field in fields(Options)}
    values["timeline_steps"] = parsed.timeline_steps or 3
    at_once = parsed.update == "in_backward"
    if at_once and (parsed.clip or (parsed.accumulate or 1) > 1):
        parser.error("--update in_backward uses gradients up as they come: without --clip and --accumulate")
    if parsed.resume:
        from tiered.cli.train.run import resume

        anew = functools.partial(_options, parser, parsed, values) if here.may_restart else None
        return resume(values, given, parsed.timeout or TIMEOUT, anew)
    options = _options(parser, parsed, values)
    if parsed.check:
        from tiered.cli.train.check import check

        return check(options)
    from tiered.cli.train.run import train

    return train(options, given, parsed.timeout or TIMEOUT)


def _options(parser: argparse.ArgumentParser, parsed: argparse.Namespace, given: dict[str, Any]) -> Options:
    """Of a training that begins."""
    values, at_once = dict(given), parsed.update == "in_backward"
    if values["clip"] is None:
        values["clip"] = 0.0 if at_once else 1.0
    if at_once:
        values["accumulate"] = 1
    for name, value in {**USUAL, **(CHECK if parsed.check else DEMO)}.items():
        if values[name] is None and not (name == "steps" and values["minutes"] is not None):
            values[name] = value
    options = Options(**values)
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    return options


def _default(name: str) -> str:
    shown = {"dram": "256MiB; with --check 4MiB"}.get(name, str(DEMO[name]))
    if name != "dram" and DEMO[name] != CHECK[name]:
        shown += f"; with --check {CHECK[name]}"
    return f"(default: {shown})"
