"""``tiered train``: the parser and the checks of option combinations. torch is imported only when a training runs, so that
``--help`` is quick."""

from __future__ import annotations

import argparse
import functools
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from tiered.cli.arguments import add_backend, command, count, fraction, launched, positive, seconds, seed, size, size_or_none
from tiered.cli.spelling import Spelling
from tiered.cli.train.options import (
    ACTIVATIONS,
    DEFAULT_FOLDER,
    MODEL_HELP,
    OPTIMIZERS,
    UPDATES,
    Options,
    default_of,
)
from tiered.types import format_size

if TYPE_CHECKING:
    from tiered.cli.arguments import Commands

__all__ = ["add_parser"]

DESCRIPTION = """\
Train a byte-level GPT on a text file. Parameters, gradients and optimizer states are kept in a store on disk. Only as
much of them as the memory limit (--dram) allows is in memory at any time. Without options: 113 million parameters
on ten plays of Shakespeare, about 3 minutes on 2 cores.
"""

RESUMING = """\
resuming:
  Ctrl-C or SIGTERM commits the last complete step and stops; a second signal stops at once, without a commit.
  --existing resume continues from the newest commit in STORE, bit for bit as if the training had never stopped, with
  the options of its beginning; --existing continue does so where STORE has a training, and begins one where it has
  none, so that the same command can be run again after any end. These options may be given again with other values:
  --steps, --minutes, --dram, --hbm, --device, --update-tier, --backend, --commit-every, --checkpoint, --activations,
  --auto, --activation-memory, --no-prefetch, --text (a copy of the same text), --stage (with another number of ranks)
  and all options of the group "outcome".
  --steps and --minutes count from the beginning of the training. The learning rate follows them: with a larger
  number it continues at the place on the new curve that the steps or minutes so far have reached. After a
  training that had completed its curve, the learning rate therefore rises again.

several ranks:
  torchrun --nproc-per-node 2 -m tiered train ... trains in as many processes, on as many nodes, as torchrun
  starts. Rank R of N has its own store in STORE/rank-R-of-N; --stage says which part of the model is in it.
  --batch and --dram are per rank: one step uses batch x accumulate x ranks texts. Rank 0 prints; losses are means
  over all ranks. Training waits for each commit. --existing resume continues from the newest commit in STORE, bit
  for bit with the same number of ranks. Another number of ranks, or a single process, copies that commit into stores of
  its own first. With torchrun --max-restarts, which runs the same command again after a rank was lost, give
  --existing continue.

"""

EXAMPLES = """\
examples:
  tiered train my-store --dram 256MiB                  the model of the defaults
  tiered train other-store --text book.txt --minutes 10 --checkpoint --layers 32
  tiered train my-store --commit-every 10              a crash loses ten steps at most
  tiered train my-store --existing resume              go on after a crash, Ctrl-C or SIGTERM
  tiered train my-store --existing resume --steps 100  train more steps than planned at first
  tiered train my-store --existing continue            go on where there is a training, else begin
  torchrun --nproc-per-node 2 --max-restarts 3 -m tiered train many --existing continue --commit-every 10
  tiered train --hbm 8GiB --dram 32GiB                 compute on a GPU
  tiered train --optimizer lion --lr 3e-5              one state for each parameter, and not two
  tiered train --auto --activation-memory 256MiB       measure, and choose where activations are
  tiered train --check                                 compare with training in memory, bit by bit
  tiered train --report run.html                       a page to look at when the training has ended
  tiered train --timeline run.json --plot run.png      record what happens when in three steps

A model and data of your own: docs/training.md
"""

TIMEOUT = 60.0
"""Seconds that a rank waits for the others without --timeout."""


def add_parser(commands: Commands) -> None:
    """Add ``train`` to the commands."""
    summary = "train a GPT that is larger than its memory limit"
    parser = command(commands, "train", summary, DESCRIPTION, RESUMING + EXAMPLES, _earlier())
    parser.usage = "%(prog)s [STORE] [options]"
    store = parser.add_argument_group("data and store")
    store.add_argument("--text", metavar="FILE", help="text to learn, any bytes (default: the Shakespeare of this package)")
    store.add_argument(
        "folder", metavar="STORE", nargs="?", help=f"the store's folder, made where absent (default: ./{DEFAULT_FOLDER})"
    )
    store.add_argument(
        "--existing",
        choices=("refuse", "overwrite", "resume", "continue"),
        help="what to do where STORE has a model already: refuse, begin anew in its place, or go on from its newest commit; "
        f"where it has none, resume refuses and continue begins {_default('existing')}",
    )
    store.add_argument(
        "--commit-every", metavar="N", type=count, help="commit every Nth step in the background (default: the last step only)"
    )
    store.add_argument(
        "--dram", metavar="SIZE", type=size, help=f"host memory for parameters, gradients and states {_default('dram')}"
    )
    store.add_argument(
        "--hbm",
        metavar="SIZE",
        type=size_or_none,
        help="device memory for parameters; --device computes then (default: none, the CPU computes)",
    )
    store.add_argument(
        "--device", metavar="NAME", help=f"the device for --hbm; 'cpu' is a stand-in for tests {_default('device')}"
    )
    store.add_argument(
        "--update-tier",
        choices=("dram", "hbm"),
        help=f"with --hbm: the tier in which the optimizer updates {_default('update_tier')}",
    )
    add_backend(store, None)
    store.add_argument(
        "--no-prefetch",
        dest="prefetch",
        action="store_const",
        const="off",
        help="fetch parameters only when they are needed, to measure what prefetching brings",
    )
    model = parser.add_argument_group("model")
    for name in "layers", "width", "heads", "context":
        model.add_argument(f"--{name}", metavar="N", type=count, help=f"{MODEL_HELP[name]} {_default(name)}")
    model.add_argument(
        "--checkpoint",
        dest="recompute",
        action="store_const",
        const=True,
        help="recompute the activations of each block in backward instead of keeping them in memory",
    )
    model.add_argument(
        "--activations",
        choices=ACTIVATIONS,
        help="where backward has the activations of units from: memory, computed again from inputs that wait in the store, the "
        f"store, or for each unit what is fastest; the numbers are the same {_default('activations')}",
    )
    model.add_argument(
        "--auto",
        dest="activations",
        action="store_const",
        const="auto",
        help="as --activations auto: measure some steps, and choose for each module where its activations are",
    )
    model.add_argument(
        "--activation-memory",
        metavar="SIZE",
        type=size_or_none,
        help="with --auto: memory that activations may take beside --dram (default: half of what is left)",
    )
    training = parser.add_argument_group("training")
    for name in "batch", "accumulate", "micro_batch":
        option = "--" + name.replace("_", "-")
        training.add_argument(option, metavar="N", type=count, help=f"{MODEL_HELP[name]} {_default(name)}")
    training.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help="what updates the parameters, bit for bit as torch's class of that name (torch has no lion, and none of the "
        "inexact adamw_bf16, adamw8bit and adamw4bit, which keep moments in 16, 8 and 4 bits); sgd has a momentum of 0.9. "
        "sgd, adagrad, rmsprop and lion keep one state and not two, adafactor one for each row and column; they need another "
        "--lr "
        f"{_default('optimizer')}",
    )
    training.add_argument(
        "--update",
        choices=UPDATES,
        help=f"when parameters are updated; in_backward works without clipping and accumulation {_default('update')}",
    )
    training.add_argument("--steps", metavar="N", type=count, help=f"stop after this many steps {_default('steps')}")
    training.add_argument(
        "--minutes", metavar="M", type=positive, help="stop after this time, or after --steps where both are given"
    )
    training.add_argument("--lr", metavar="R", type=positive, help=f"highest learning rate {_default('lr')}")
    training.add_argument(
        "--warmup", metavar="N", type=count, help=f"steps to the highest learning rate; a cosine follows {_default('warmup')}"
    )
    training.add_argument(
        "--weight-decay", metavar="R", type=fraction, help=f"of matrices; vectors have none {_default('weight_decay')}"
    )
    training.add_argument(
        "--clip",
        metavar="NORM",
        type=fraction,
        help="largest norm of the gradients, 0 for no limit (default: 1.0; with --update in_backward 0)",
    )
    training.add_argument(
        "--seed", metavar="N", type=seed, help=f"seed of initial values and of the order of the data {_default('seed')}"
    )
    ranks = parser.add_argument_group("several ranks (torchrun)")
    ranks.add_argument(
        "--stage",
        metavar="S",
        type=int,
        choices=(1, 2, 3),
        help="what is divided among the ranks: 1 optimizer states, 2 gradients too, 3 parameters too "
        f"{_default('stage')}",
    )
    ranks.add_argument(
        "--timeout", metavar="TIME", type=seconds, help="how long a rank waits for the others, like 60s or 5min (default: 60s)"
    )
    outcome = parser.add_argument_group("outcome")
    outcome.add_argument(
        "--check",
        action="store_true",
        help="train twice, in the store and in memory, and compare every number bit by bit; small sizes unless given",
    )
    outcome.add_argument("--json", metavar="FILE", help="write the summary as JSON to FILE; '-' is stdout")
    outcome.add_argument(
        "--timeline", metavar="FILE", help="write a trace of some steps for ui.perfetto.dev or chrome://tracing"
    )
    outcome.add_argument(
        "--report",
        metavar="FILE.html",
        help="write a page with all of it: loss, memory, drive, timeline, and what tiered plan predicts; one file, no network",
    )
    outcome.add_argument("--plot", metavar="FILE.png", help="draw the same trace (pip install '.[plot]')")
    outcome.add_argument(
        "--timeline-steps",
        metavar="N",
        type=count,
        help=f"number of steps to record, after the first five or at the end {_default('timeline_steps')}",
    )
    parser.set_defaults(
        run=lambda parsed, given: _run(parser, parsed, given),
        memory_mend="lower --batch, --context or --dram, or add --activations store or --checkpoint",
    )


def _run(parser: argparse.ArgumentParser, parsed: argparse.Namespace, given: list[str]) -> int:
    in_backward = parsed.update == "in_backward"
    if parsed.check and parsed.minutes is not None:
        parser.error("--check compares a fixed number of steps: give --steps, not --minutes")
    if parsed.check and (parsed.timeline or parsed.plot or parsed.report):
        parser.error("--check records no timeline: leave out --timeline, --plot and --report")
    if parsed.report and (parsed.timeline or parsed.plot):
        parser.error("--report records a timeline of its own: leave out --timeline and --plot")
    resumes = parsed.existing in ("resume", "continue")
    if parsed.check and (resumes or parsed.commit_every):
        parser.error("--check commits nothing: leave out --existing and --commit-every")
    if parsed.check and parsed.hbm and parsed.device != "cpu":
        parser.error("--check compares bit by bit with the CPU: --hbm needs --device cpu")
    if (parsed.device or parsed.update_tier) and not (parsed.hbm or resumes):
        parser.error("--device and --update-tier need --hbm SIZE")
    if parsed.timeline_steps and not (parsed.timeline or parsed.plot):
        parser.error("--timeline-steps needs --timeline or --plot")
    if parsed.recompute and (parsed.micro_batch or 1) > 1:
        parser.error("--micro-batch recomputes activations already: leave out --checkpoint")
    if parsed.activations in ("store", "auto") and (parsed.micro_batch or 1) > 1:
        parser.error(
            "--micro-batch recomputes activations, so that none are left for the store: leave out --activations "
            f"{parsed.activations}"
        )
    if parsed.activation_memory is not None and parsed.activations != "auto" and not resumes:
        parser.error("--activation-memory needs --auto")
    if parsed.recompute and (parsed.activations or "memory") != "memory":
        parser.error(f"--checkpoint recomputes activations: leave it out, or --activations {parsed.activations}")
    if in_backward and (parsed.clip or (parsed.accumulate or 1) > 1):
        parser.error("--update in_backward uses each gradient as soon as it exists: leave out --clip and --accumulate")
    here = launched()
    if here.ranks == 1 and (parsed.stage or parsed.timeout):
        parser.error("--stage and --timeout need several ranks: torchrun --nproc-per-node 2 -m tiered train ...")
    if here.ranks > 1 and parsed.check:
        parser.error("--check compares one process with memory: run it without torchrun")
    if here.may_restart and parsed.existing == "overwrite":
        parser.error("--existing overwrite would overwrite after each of --max-restarts: --existing continue, in a new STORE")
    values = {field.name: getattr(parsed, field.name) for field in fields(Options)}
    if resumes:
        from tiered.cli.train.run import resume

        values["existing"] = None
        anew = functools.partial(_options, parser, parsed, values) if parsed.existing == "continue" else None
        return resume(values, given, parsed.timeout or TIMEOUT, anew)
    options = _options(parser, parsed, values)
    if parsed.check:
        from tiered.cli.train.check import check
        from tiered.cli.train.optimizers import kind_of

        if kind_of(options).known.in_torch is None:
            parser.error(
                f"--check compares with an optimizer of torch's, and torch has no {options.optimizer}: give another --optimizer"
            )

        return check(options)
    from tiered.cli.train.run import train

    return train(options, given, parsed.timeout or TIMEOUT)


def _earlier() -> Spelling:
    """The options that the command had before. Under torchrun's --max-restarts, --resume began where nothing was committed."""
    return Spelling({"--dir": "STORE", "--resume": f"--existing {'continue' if launched().may_restart else 'resume'}"})


def _options(parser: argparse.ArgumentParser, parsed: argparse.Namespace, given: dict[str, Any]) -> Options:
    """Complete the ``given`` options with defaults, for a training that starts at the beginning."""
    options = Options.of(given, check=parsed.check)
    if parsed.minutes is not None and parsed.steps is None:
        options = replace(options, steps=None)
    if parsed.update == "in_backward":
        options = replace(options, accumulate=1, clip=0.0)
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    return options


def _default(name: str) -> str:
    def told(value: Any) -> str:
        return format_size(value).replace(".0 ", "") if name == "dram" else str(value)

    usual, with_check = told(default_of(name)), told(default_of(name, check=True))
    return f"(default: {usual}{'' if usual == with_check else f'; with --check {with_check}'})"
