"""``tiered train`` from its options to its summary: open the store, page the model, train, commit, report; and resume."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn, TextIO

import psutil
import torch
from torch import nn

from tiered import CapacityError, MemoryWatch, MisuseError, Owner, RankError, TieredStore, __version__, zero
from tiered.cli.arguments import Launched, launched
from tiered.cli.output import MADE_BY, UNPRINTABLE, Progress, Silent, counted, refuse_unwritable, write_report
from tiered.cli.stop import StopNoted, Stopped, StopRequest
from tiered.cli.train import resume as resuming
from tiered.cli.train.loop import Checkpointer, Schedule, TrainingLoop
from tiered.cli.train.model import GPT, Shape, Text, build, go_on, initialiser, open_text
from tiered.cli.train.optimizers import OptimizerKind, kind_of
from tiered.cli.train.options import DEFAULT_FOLDER, NAME, Options, StoreOptions
from tiered.cli.train.ranks import Peers, joined
from tiered.cli.train.report import TEMPERATURE, TOP_P, StepRecording, Summary, describe, predicted
from tiered.cli.train.resume import Earlier, ResumePlace
from tiered.measuring.meters import Meter, measure, peak_memory
from tiered.reporting.page import page as page_of
from tiered.reporting.page import refuse_foreign, write_page
from tiered.reporting.record import RunRecord
from tiered.store.at_rest import StoreAtRest
from tiered.types import format_size

__all__ = [
    "describe_model",
    "opened",
    "page",
    "refuse_endless",
    "refuse_existing",
    "refuse_full_disk",
    "resume",
    "train",
]

MODEL = Owner("model", NAME)
"""Whose tensors those of the model are."""
LAYER_BYTES = 24 << 10
"""Bytes of host memory for the modules of a layer without its parameters; measured over thousands of layers."""
SAMPLE, SHARE, LEAST_SECONDS = 240, 0.05, 3.0
"""A training ends with so many bytes that its model writes, or fewer: those that it writes in this share of the training's
time, and in so many seconds at least."""
RESERVE = 1.05
"""Factor on the disk space that the model needs, for padding."""


def page(
    model: GPT,
    store: TieredStore,
    options: Options,
    existing: str,
    tell: Callable[[int], None],
    stop: StopRequest,
    peers: Peers,
    source: str | None = None,
) -> None:
    """Move the model from the meta device into the store. ``tell`` is called with the number of initialised parameters."""
    staged = peers.staged(options.stage)
    torch.manual_seed(options.seed)
    initialise = initialiser(Shape.of(options))
    done = 0

    def initialise_one(module: nn.Module) -> None:
        nonlocal done
        stop.check()
        initialise(module)
        done += sum(parameter.numel() for parameter in module.parameters(recurse=False))
        tell(done)

    def pass_by(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """Check for a stop request before a block computes, and in backward by a hook on the block's input."""
        stop.check()
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: stop.check())  # type: ignore[no-untyped-call]

    # Otherwise a backward pass that stops halfway has updated some units and not others, or other ranks wait in theirs.
    if options.update == "on_fetch" and not staged:
        for block in model.blocks:
            block.register_forward_pre_hook(pass_by)
    chosen = zero.AutoPlan(memory=options.activation_memory) if options.activations == "auto" else options.activations
    zero.page(
        model, store, name=NAME, existing=existing, source=source, param_init_fn=initialise_one,
        micro_batch=options.micro_batch, activations=chosen, paging=zero.Paging(options.prefetch, options.update_tier),
        **staged,
    )


def opened(options: StoreOptions, launched: Launched) -> dict[str, Any]:
    """Return the arguments of ``TieredStore.open``. Each rank of a node has a device of its own."""
    device = options.device
    if device == "cuda" and launched.ranks > 1:
        device = f"cuda:{launched.local}"
    placed = {"hbm": options.hbm, "device": device} if options.hbm else {}
    return {"dram": options.dram, "backend": options.backend, **placed}


def describe_model(options: Options, parameters: int) -> str:
    """Describe the model in one line."""
    layers = counted(options.layers, "layer")
    return f"GPT of {parameters:,} parameters: {layers} of width {options.width}, context {options.context}"


def refuse_endless(options: Options) -> None:
    """Raise CapacityError where the layers, even without their parameters, do not fit in memory."""
    needed, available = LAYER_BYTES * options.layers, psutil.virtual_memory().available
    if needed > available:
        raise CapacityError(
            f"{options.layers:,} layers need {format_size(needed)} of memory before their parameters, {format_size(available)} "
            "is available: lower --layers"
        )


def refuse_full_disk(
    store: TieredStore, kind: OptimizerKind, parameters: int, states: int = 1, held: int = 0, share: float = 1.0
) -> None:
    """Raise CapacityError where the store's drive has no room for ``states`` versions of the model, one per kept commit.

    ``held`` bytes of them are on the drive already. ``share``: the part of the model that the ranks of this node keep."""
    needed = max(0, RESERVE * kind.bytes_in_memory * parameters * states * share - held)
    disk = store.statistics().tiers[-1]
    free = disk.capacity - disk.used
    if free < needed:
        fewer = ", or leave --commit-every out" if states > 2 else ""
        raise CapacityError(
            f"training {parameters:,} parameters needs {format_size(needed)} of disk, {store.folder} has {format_size(free)} "
            f"free: make room, name a STORE on another device, or lower --layers or --width{fewer}"
        )


def refuse_existing(store: TieredStore, options: Options) -> None:
    """Raise MisuseError where the store has a model and ``--existing`` does not allow to overwrite it."""
    held = store.owned(MODEL)
    if held and options.existing == "refuse":
        at = f", step {store.meta['step']}" if "step" in store.meta else ""
        raise MisuseError(
            f"{store.folder} has a model already (generation {store.generation}{at}): continue it with --existing resume, "
            "name another STORE, or replace it with --existing overwrite"
        )


def train(options: Options, given: Sequence[str], timeout: float) -> int:
    """Train and print the summary; returns the exit code.

    ``given`` is the command line, from which the summary suggests another. ``timeout``: seconds that a rank waits for the
    others."""
    with joined(launched(), timeout) as peers:
        return _begin(options, given, peers)


def _begin(options: Options, given: Sequence[str], peers: Peers) -> int:
    baseline = peak_memory()
    options = _of_first(options, peers)
    with ExitStack() as stack:
        with peers.together():
            recording = _refuse_unwritable(options, 0)
            text = open_text(options.text, options.context, stack)
            refuse_endless(options)
            folder = options.folder or DEFAULT_FOLDER
            kept = resuming.keep(options.commit_every, peers.launched.ranks)
            resuming.refuse_others(folder, peers.launched.ranks)
        with peers.together():
            store = peers.open(folder, keep=kept, **opened(options, peers.launched))
            stack.enter_context(closing(store))  # uncommitted changes are dropped: every commit has all that resuming needs
            refuse_existing(store, options)
        return _run(_Session(options, store, text, recording, peers, baseline, given))


def resume(
    wishes: Mapping[str, Any], given: Sequence[str], timeout: float, anew: Callable[[], Options] | None = None
) -> int:
    """Resume the training in a store and print as ``train`` does; ``wishes`` are fields of Options, None where absent.

    With ``anew``, a training with these options starts where nothing is committed yet, and one that is complete is a success.
    """
    with joined(launched(), timeout) as peers:
        folder = wishes["folder"] or DEFAULT_FOLDER
        place = resuming.find(folder, peers)
        if place is None and anew is not None:
            return _begin(anew(), given, peers)
        try:
            return _continue(ResumePlace(folder, folder) if place is None else place, wishes, given, peers)
        except resuming.Over as over:
            if anew is None:
                raise
            if peers.launched.rank == 0:
                print(f"tiered: {over}", file=sys.stderr)
            return 0


def _continue(place: ResumePlace, wishes: Mapping[str, Any], given: Sequence[str], peers: Peers) -> int:
    baseline = peak_memory()
    with ExitStack() as stack:
        with peers.together():
            opening = resuming.opening(place.newest, wishes)
        with peers.together(but=resuming.Over):
            kept = resuming.keep(opening.commit_every, peers.launched.ranks)
            store = peers.open(place.opened, keep=kept, **opened(opening, peers.launched))
            stack.enter_context(closing(store))
            if place.source is None:
                earlier = resuming.earlier(store, place.opened, NAME, wishes)  # the message is the same on all ranks
                resuming.refuse_other_stage(store, NAME, earlier.options.stage)
            else:
                with StoreAtRest(place.newest, generation=place.generation) as other:
                    earlier = resuming.earlier(other, place.newest, NAME, wishes)
                store.delete_owned(MODEL)  # an older model; the next commit drops it
            options = _of_first(earlier.options, peers)
            recording = _refuse_unwritable(options, earlier.step)
            text = open_text(options.text, options.context, stack)
            resuming.refuse_other_text(text, earlier.text_bytes)
        return _run(_Session(options, store, text, recording, peers, baseline, given, earlier, place.source))


@dataclass(frozen=True)
class _Session:
    """Everything that one process needs to train: the open store and text, and where it starts.

    ``given`` is the command line. ``baseline``: bytes of memory before training. ``earlier`` and ``source``: the progress that
    was resumed, and the folder of another number of ranks that it is copied from."""

    options: Options
    store: TieredStore
    text: Text
    recording: StepRecording
    peers: Peers
    baseline: int
    given: Sequence[str]
    earlier: Earlier | None = None
    source: str | None = None

    @cached_property
    def record(self) -> RunRecord | None:
        """What is recorded of each step for --json and --report."""
        if not self.first or (self.options.json is None and self.options.report is None):
            return None
        return RunRecord(self.store, done=len(self.losses), steps=3 if self.options.report is not None else 0)

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints."""
        return self.peers.launched.rank == 0

    @cached_property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return Shape.of(self.options).parameters

    @cached_property
    def stream(self) -> TextIO:
        """Where progress and summary are printed."""
        if not self.first:
            return Silent()
        return sys.stderr if self.options.json == "-" else sys.stdout

    @cached_property
    def losses(self) -> list[float]:
        """The losses of all steps since the beginning of the training; training appends to it."""
        return [] if self.earlier is None else [*self.earlier.losses]


def _run(session: _Session) -> int:
    options, store, peers, earlier = session.options, session.store, session.peers, session.earlier
    ranks = peers.launched.ranks
    kind, kept = kind_of(options), resuming.keep(options.commit_every, ranks)
    share = peers.disk_share(options.stage)
    with peers.together():
        if earlier is not None:
            held = store.statistics().tiers[-1].used * peers.launched.here
            refuse_full_disk(store, kind, session.parameters, kept + 1, held, share)
        else:
            states = 1 if options.commit_every is None else kept + 1
            refuse_full_disk(store, kind, session.parameters, states, share=share)
    again = resuming.go_on_command(options.folder or DEFAULT_FOLDER, peers.launched)
    if options.folder is None and earlier is None and session.first:
        print(_unnamed(session, again), file=sys.stderr, flush=True)
    model = build(Shape.of(options))
    print(_heading(session), file=session.stream, flush=True)
    try:
        with StopRequest() as stop:
            summary = _train(session, model, stop)
    except Stopped as stopped:
        store.close()
        if session.first:
            where = _whereabouts(store, session.losses, again)
            print(f"tiered: stopped at step {len(session.losses)}; {where}", file=sys.stderr)
            for path in (options.json, options.report):
                if path not in (None, "-"):
                    print(f"tiered: {path} is written at the end of a training alone", file=sys.stderr)
        return stopped.exit_code
    if not session.first:
        return 0
    other_way = _other_way(options, session.given) if earlier is None and ranks == 1 else None
    print(describe(summary, other_way, again), file=session.stream)
    told = session.recording.write(describe_model(options, session.parameters))
    if told is not None:
        print(f"\n{told}", file=session.stream)
    report = summary.as_json() | {"model": describe_model(options, session.parameters)}
    if session.record is not None:
        report |= session.record.as_json()
        if options.report is not None:
            report["predicted"] = predicted(summary)
            write_page(options.report, page_of({MADE_BY: __version__, **report}))
            print(f"\nreport    {options.report}", file=session.stream)
    write_report(options.json, report)
    return 0


def _unnamed(session: _Session, again: str) -> str:
    """Say what begins where no STORE was named, which may not be what was meant."""
    nbytes = round(kind_of(session.options).bytes_in_memory * session.parameters)
    return (
        f"tiered: no STORE was named: a GPT of {session.parameters:,} parameters is trained in ./{DEFAULT_FOLDER}, which takes "
        f"about {format_size(nbytes)} of disk; Ctrl-C ends it with a commit, and this goes on from there: {again}"
    )


def _heading(session: _Session) -> str:
    options, earlier, ranks = session.options, session.earlier, session.peers.launched.ranks
    device = f"{format_size(options.hbm)} on {options.device} and " if options.hbm else ""
    state = format_size(round(kind_of(options).bytes_kept * session.parameters))
    lines = [
        f"model     {describe_model(options, session.parameters)}",
        f"budget    {device}{format_size(options.dram)} of memory for {state} of parameters and states of {options.optimizer}",
        f"text      {session.text.path} ({format_size(session.text.nbytes)})",
        f"store     {session.store.folder}",
    ]
    if ranks > 1:
        lines.append(f"ranks     {ranks}, stage {options.stage}; budget, memory, disk and time are rank 0's")
    if earlier is not None:
        copied = f"the commit of another number of ranks in {session.source}"
        whence = f"generation {session.store.generation}" if session.source is None else copied
        lines.append(f"resumed   after step {earlier.step}, {whence}")
    return "\n".join(lines)


def _whereabouts(store: TieredStore, losses: list[float], again: str) -> str:
    """Say which commit a training can be resumed from, and with which command."""
    if losses and store.generation:
        return f"generation {store.generation} has step {store.meta['step']}; continue with: {again}"
    last = f"the last commit is generation {store.generation}" if store.generation else "nothing was committed"
    return f"{last}; the store in {store.folder} reopens"


def _train(session: _Session, model: GPT, stop: StopRequest) -> Summary:
    """Train, and commit the last step. Raises Stopped where somebody asked to stop, after a commit of the completed steps."""
    options, store, peers, earlier = session.options, session.store, session.peers, session.earlier
    losses, stream = session.losses, session.stream

    def leave(exit_code: int) -> NoReturn:
        """End the process at once, which leaves a store that opens as of its last commit."""
        if stream.isatty():
            os.write(stream.fileno(), b"\x1b[?25h\n")  # shows the cursor, which the live display hides
        if session.first:
            os.write(2, f"tiered: left at step {len(losses)} without a commit; the store in {store.folder} reopens\n".encode())
        os._exit(exit_code)

    begun = len(losses)
    with Progress(stream) as progress:
        existing = options.existing if earlier is None else "resume"
        peers.watch(stop)
        MemoryWatch(store, lambda notice: progress.note(f"memory    {notice}"))
        try:
            page(
                model, store, options, existing, lambda done: progress.preparing(done, session.parameters), stop, peers,
                session.source,
            )  # fmt: skip
        except RankError:
            if stop.signum:  # the other ranks were asked to stop as well, and have left
                raise Stopped(stop.signum) from None
            raise
        optimizer = kind_of(options).in_store(model, options)
        peers.start()
        schedule = Schedule(options, earlier.seconds if earlier is not None else 0.0, peers.clock)
        loop = TrainingLoop(model, optimizer, session.text, options, schedule, peers)
        if earlier is not None:
            zero.resume(model, optimizer, scheduler=loop.scheduler, data=loop.data)
            loop.continue_after(earlier.step)
        record = session.record
        if record is not None:
            record.updating = lambda: zero.statistics(model).update_seconds
        checkpointer = Checkpointer(model, optimizer, loop, options, session.text, losses, peers)
        tokens = options.batch * options.context * options.accumulate * peers.launched.ranks
        whole, step = Meter(store), Meter(store)
        progress.begin(schedule.share(loop.done))
        stopped: Stopped | None = None
        told = ""
        try:
            stop.interrupt_nothing(leave)
            peers.check()
            if record is not None:
                record.begin()
            for result in session.recording.of(loop.steps(), store):
                losses.append(result.loss)
                if record is not None:
                    record.stepped(result.step, result.loss, tokens)
                share, seen = schedule.share(result.step), store.statistics()
                used = seen.tier("dram").used / seen.tier("dram").capacity
                paging = zero.statistics(model)
                offloaded = paging.activations
                if paging.plan is not None and paging.plan.why != told:
                    told = paging.plan.why
                    progress.note(f"plan      {told}" if paging.plan.choices else f"plan      {told} for some steps")
                progress.stepped(
                    result.step, options.steps, share, result.loss, tokens, step.lap(), used, offloaded, seen.memory
                )
                checkpointer.stepped()
                peers.check()
        except StopNoted as noted:
            stopped = Stopped(noted.signum)  # without the traceback, which keeps the graph of the interrupted step alive
        finally:
            if record is not None:
                record.close()
        if stopped is not None:
            loop.give_up_step()
            checkpointer.finish()
            raise stopped
        optimizer.flush()  # the update of the last step
        moved = whole.lap()
    seen, peak = store.statistics(), peak_memory()  # before the measurement of the disk, which fills the pool
    generation = checkpointer.commit()
    try:
        peers.check_together()
    except StopNoted as noted:
        raise Stopped(noted.signum) from None
    sample = None if peers.launched.ranks > 1 else _sample(model, options.seed, max(LEAST_SECONDS, SHARE * moved.seconds), stop)
    return Summary(
        options=options,
        steps=len(losses) - begun,
        losses=tuple(losses[begun:]),
        earlier_losses=tuple(losses[:begun]),
        tokens=tokens * (len(losses) - begun),
        parameters=session.parameters,
        moved=moved,
        paging=zero.statistics(model),
        rates=measure(store) if session.first else None,
        seen=seen,
        peak_rss=peak,
        baseline_rss=session.baseline,
        generation=generation,
        sample=sample,
        folder=store.folder,
        ranks=peers.launched.ranks,
    )


def _sample(model: GPT, seed: int, seconds: float, stop: StopRequest) -> str:
    """Return text that the model writes after a line has ended, until ``seconds`` have passed or somebody asks to stop."""
    text, ends = bytearray(), time.monotonic() + seconds
    with suppress(StopNoted):  # a block of the model asks, too
        for byte in itertools.islice(go_on(model.eval(), b"\n", TEMPERATURE, TOP_P, seed), SAMPLE):
            text.append(byte)
            if time.monotonic() >= ends:
                break
            stop.check()
    return text.decode(errors="replace").translate(UNPRINTABLE)


def _of_first(options: Options, peers: Peers) -> Options:
    """Return the options without output files, except on rank 0."""
    return options if peers.launched.rank == 0 else replace(options, json=None, timeline=None, plot=None, report=None)


def _refuse_unwritable(options: Options, done: int) -> StepRecording:
    recording = StepRecording(options, done)
    refuse_unwritable(options.json)
    if options.report is not None:
        refuse_foreign(options.report)
    recording.refuse_unwritable()
    return recording


def _other_way(options: Options, given: Sequence[str]) -> str:
    """Return the command line with prefetching switched on instead of off, or off instead of on."""
    changed = [argument for argument in given if argument != "--no-prefetch" and not argument.startswith("--existing=")]
    if options.prefetch == "on":
        changed.append("--no-prefetch")
    if "--existing" in changed:
        changed[changed.index("--existing") + 1] = "overwrite"
    else:
        changed += ["--existing", "overwrite"]
    return shlex.join(["tiered", *changed])
