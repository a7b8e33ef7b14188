"""Trains the GPT of ``tiered train``: an ordinary PyTorch loop, on a store or in memory."""

from __future__ import annotations

import os
import resource
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, NoReturn, TextIO

import psutil
import torch
from torch import nn

from tiered import CapacityError, MisuseError, RankError, TieredStore, zero
from tiered.cli.arguments import Launched, launched
from tiered.cli.measure import measure
from tiered.cli.output import Gauge, Progress, Silent, refuse_unwritable, write_report
from tiered.cli.stop import StopNoted, Stopped, StopRequest
from tiered.cli.train import resume as places
from tiered.cli.train import resume as resuming
from tiered.cli.train.command import Options
from tiered.cli.train.loop import Course, Saving, Schedule
from tiered.cli.train.model import GPT, Shape, Text, build, initialiser, open_text
from tiered.cli.train.ranks import Peers, joined
from tiered.cli.train.report import Recording, Summary, describe
from tiered.cli.train.resume import Earlier, Opening, Place
from tiered.store.at_rest import StoreAtRest
from tiered.types import format_size

__all__ = [
    "GRADIENT_BYTES",
    "STATE_BYTES",
    "decayed",
    "describe_model",
    "groups",
    "opened",
    "page",
    "refuse_endless",
    "refuse_existing",
    "refuse_full_disk",
    "resume",
    "shape_of",
    "train",
]

DEFAULT_FOLDER = "tiered-store"
NAME = "model"
STATE_BYTES = 12
"""Per parameter: fp32 value and the two moments of Adam."""
GRADIENT_BYTES = 4
LAYER_BYTES = 24 << 10
"""Of host memory, for a layer's modules without their parameters; measured over thousands of them."""
RESERVE = 1.05
"""Of the disk space that is asked for, for padding."""


def shape_of(options: Options) -> Shape:
    return Shape(options.layers, options.width, options.heads, options.context, options.recompute)


def groups(model: nn.Module, options: Options) -> list[dict[str, Any]]:
    """Parameter groups, with the decay of the options."""
    return decayed(model, options.weight_decay)


def decayed(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: decay is for matrices."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
    ]


def page(
    model: GPT,
    store: TieredStore,
    options: Options,
    existing: str,
    tell: Callable[[int], None],
    stop: StopRequest,
    peers: Peers | None = None,
    source: str | None = None,
) -> None:
    """Put the model, which is on the meta device, into the store. ``tell`` is given the parameters done so far."""
    staged = {} if peers is None else peers.staged(options.stage)
    torch.manual_seed(options.seed)
    initialise = initialiser(shape_of(options))
    done = 0

    def initialise_one(module: nn.Module) -> None:
        nonlocal done
        stop.check()
        initialise(module)
        done += sum(parameter.numel() for parameter in module.parameters(recurse=False))
        tell(done)

    def pass_by(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """A block is about to compute; the hook on its input runs when backward comes by."""
        stop.check()
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: stop.check())  # type: ignore[no-untyped-call]

    # else a backward that is left has updated some units and not others, or other ranks wait in theirs
    if options.update == "on_fetch" and not staged:
        for block in model.blocks:
            block.register_forward_pre_hook(pass_by)
    zero.page(
        model, store, name=NAME, existing=existing, prefetch=options.prefetch, micro_batch=options.micro_batch,
        param_init_fn=initialise_one, source=source, update_tier=options.update_tier, **staged,
    )


def opened(options: Options | Opening, launched: Launched) -> dict[str, Any]:
    """How ``TieredStore.open`` is called. Each rank of a node has a device of its own."""
    device = options.device
    if device == "cuda" and launched.ranks > 1:
        device = f"cuda:{launched.local}"
    return {"dram": options.dram, "hbm": options.hbm or None, "device": device, "backend": options.backend}


def describe_model(options: Options, parameters: int) -> str:
    return f"GPT of {parameters:,} parameters: {options.layers} layers of {options.width}, context {options.context}"


def refuse_endless(options: Options) -> None:
    """Raises CapacityError when the layers, without their parameters, will not fit into memory."""
    needed, available = LAYER_BYTES * options.layers, psutil.virtual_memory().available
    if needed > available:
        raise CapacityError(
            f"{options.layers:,} layers need {format_size(needed)} of memory before their parameters, {format_size(available)} "
            "is available: lower --layers"
        )


def refuse_full_disk(store: TieredStore, parameters: int, states: int = 1, held: int = 0, share: float = 1.0) -> None:
    """Raises CapacityError when the model will not fit on the store's device, ``states`` times with commits that differ.

    ``held`` bytes of these are there already. ``share``: what is there of a model of which several ranks have parts."""
    needed = max(0, RESERVE * (STATE_BYTES + GRADIENT_BYTES) * parameters * states * share - held)
    disk = store.statistics().tiers[-1]
    free = disk.capacity - disk.used
    if free < needed:
        fewer = ", or leave --commit-every out" if states > 2 else ""
        raise CapacityError(
            f"training {parameters:,} parameters needs {format_size(needed)} of disk, {store.folder} has {format_size(free)} "
            f"free: make room, name a --dir on another device, or lower --layers or --width{fewer}"
        )


def refuse_existing(store: TieredStore, options: Options) -> None:
    held = [key for key in store if key.startswith(f"{NAME}/")]
    if held and options.existing == "refuse":
        at = f", step {store.meta['step']}" if "step" in store.meta else ""
        raise MisuseError(
            f"{store.folder} holds a model already (generation {store.generation}{at}): go on with it with --resume, name "
            "another --dir, or replace it with --existing overwrite"
        )


def train(options: Options, given: Sequence[str], timeout: float) -> int:
    """Train and print; returns the exit code. ``given`` is the command line, to be shown with a change. ``timeout``: seconds
    that a rank waits for the others."""
    with joined(launched(), timeout) as peers:
        return _begin(options, given, peers)


def _begin(options: Options, given: Sequence[str], peers: Peers) -> int:
    baseline = _peak_memory()
    options = _of_first(options, peers)
    with ExitStack() as stack:
        with peers.together():
            recording = _refuse_unwritable(options, 0)
            text = open_text(options.text, options.context, stack)
            refuse_endless(options)
            folder = options.folder or DEFAULT_FOLDER
            kept = resuming.keep(options.commit_every, peers.launched.ranks)
            places.refuse_others(folder, peers.launched.ranks)
        with peers.together():
            store = peers.open(folder, keep=kept, **opened(options, peers.launched))
            stack.enter_context(closing(store))  # what is committed, is so together with all that resuming needs
            refuse_existing(store, options)
        return _run(options, store, text, recording, None, None, baseline, given, peers)


def resume(
    wishes: Mapping[str, Any], given: Sequence[str], timeout: float, anew: Callable[[], Options] | None = None
) -> int:
    """Go on with the training in a store. ``wishes`` are fields of Options, None where nothing was given. As ``train``.

    ``anew``: where nothing is committed yet, a training with these options begins; and it has ended well where it is over.
    """
    with joined(launched(), timeout) as peers:
        folder = wishes["folder"] or DEFAULT_FOLDER
        place = places.find(folder, peers)
        if place is None and anew is not None:
            return _begin(anew(), given, peers)
        try:
            return _go_on(Place(folder, folder) if place is None else place, wishes, given, peers)
        except resuming.Over as over:
            if anew is None or not peers.launched.restarts:
                raise
            if peers.launched.rank == 0:
                print(f"tiered: {over}", file=sys.stderr)
            return 0


def _go_on(place: Place, wishes: Mapping[str, Any], given: Sequence[str], peers: Peers) -> int:
    baseline = _peak_memory()
    with ExitStack() as stack:
        with peers.together():
            opening = resuming.opening(place.newest, wishes)
        with peers.together(but=resuming.Over):
            kept = resuming.keep(opening.commit_every, peers.launched.ranks)
            store = peers.open(place.opened, keep=kept, **opened(opening, peers.launched))
            stack.enter_context(closing(store))
            if place.source is None:
                earlier = resuming.earlier(store, place.opened, NAME, wishes)  # in the same words on all
                resuming.refuse_other_stage(store, NAME, earlier.options.stage)
            else:
                with StoreAtRest(place.newest, generation=place.generation) as other:
                    earlier = resuming.earlier(other, place.newest, NAME, wishes)
                for key in [key for key in store if key.startswith(f"{NAME}/")]:  # older; the next commit gives it up
                    store.delete(key)
            options = _of_first(earlier.options, peers)
            recording = _refuse_unwritable(options, earlier.step)
            text = open_text(options.text, options.context, stack)
            resuming.refuse_other_text(text, earlier.text_bytes)
        return _run(options, store, text, recording, earlier, place.source, baseline, given, peers)


def _of_first(options: Options, peers: Peers) -> Options:
    """Files are rank 0's to write."""
    return options if peers.launched.rank == 0 else replace(options, json=None, timeline=None, plot=None)


def _refuse_unwritable(options: Options, done: int) -> Recording:
    recording = Recording(options, done)
    refuse_unwritable(options.json)
    recording.refuse_unwritable()
    return recording


def _run(
    options: Options,
    store: TieredStore,
    text: Text,
    recording: Recording,
    earlier: Earlier | None,
    source: str | None,
    baseline: int,
    given: Sequence[str],
    peers: Peers,
) -> int:
    first, ranks = peers.launched.rank == 0, peers.launched.ranks
    stream = (sys.stderr if options.json == "-" else sys.stdout) if first else Silent()
    parameters = shape_of(options).parameters
    kept = resuming.keep(options.commit_every, ranks)
    share = peers.disk_share(options.stage)
    with peers.together():
        if earlier is not None:
            held = store.statistics().tiers[-1].used * peers.launched.here
            refuse_full_disk(store, parameters, kept + 1, held, share)
        else:
            refuse_full_disk(store, parameters, 1 if options.commit_every is None else kept + 1, share=share)
    model = build(shape_of(options))
    among = f"\nranks     {ranks}, stage {options.stage}; budget, memory, disk and time are rank 0's" if ranks > 1 else ""
    print(
        f"model     {describe_model(options, parameters)}\n"
        f"budget    {_budget(options)} for {format_size(STATE_BYTES * parameters)} of parameters and "
        f"Adam states\ntext      {text.path} ({format_size(text.nbytes)})\nstore     {store.folder}{among}",
        file=stream,
        flush=True,
    )
    if earlier is not None:
        whence = f"generation {store.generation}" if source is None else f"what other ranks committed in {source}"
        print(f"resumed   after step {earlier.step}, {whence}", file=stream, flush=True)
    losses = [] if earlier is None else [*earlier.losses]
    again = resuming.go_on_command(options.folder or DEFAULT_FOLDER, peers.launched)
    try:
        with StopRequest() as stop:
            summary = _train(
                model, store, text, options, stop, stream, parameters, baseline, losses, recording, earlier, source, peers
            )
    except Stopped as stopped:
        store.close()
        if first:
            print(f"tiered: stopped at step {len(losses)}; {_whereabouts(store, losses, again)}", file=sys.stderr)
        return stopped.exit_code
    if not first:
        return 0
    print(describe(summary, _other_way(options, given) if earlier is None and ranks == 1 else None, again), file=stream)
    told = recording.write(describe_model(options, parameters))
    if told is not None:
        print(f"\n{told}", file=stream)
    write_report(options.json, summary.as_json())
    return 0


def _budget(options: Options) -> str:
    device = f"{format_size(options.hbm)} on {options.device} and " if options.hbm else ""
    return f"{device}{format_size(options.dram)} of memory"


def _whereabouts(store: TieredStore, losses: list[float], again: str) -> str:
    """What there is to go on from, and how."""
    if losses and store.generation:
        return f"generation {store.generation} has step {store.meta['step']}; go on with: {again}"
    last = f"the last commit is generation {store.generation}" if store.generation else "nothing was committed"
    return f"{last}; the store in {store.folder} reopens"


def _train(
    model: GPT,
    store: TieredStore,
    text: Text,
    options: Options,
    stop: StopRequest,
    stream: TextIO,
    parameters: int,
    baseline: int,
    losses: list[float],
    recording: Recording,
    earlier: Earlier | None,
    source: str | None,
    peers: Peers,
) -> Summary:
    """Raises Stopped when somebody asked for it; what was trained is committed then. ``losses`` gets every step's."""
    first = peers.launched.rank == 0

    def leave(exit_code: int) -> NoReturn:
        """At once: what a killed process leaves is whole."""
        if stream.isatty():
            os.write(stream.fileno(), b"\x1b[?25h\n")  # the cursor that the live display hides
        if first:
            os.write(2, f"tiered: left at step {len(losses)} without a commit; the store in {store.folder} reopens\n".encode())
        os._exit(exit_code)

    begun = len(losses)
    with Progress(stream) as progress:
        existing = options.existing if earlier is None else "resume"
        peers.watch(stop)
        try:
            page(model, store, options, existing, lambda done: progress.preparing(done, parameters), stop, peers, source)
        except RankError:
            if stop.signum:  # the others were asked to stop, too, and have left
                raise Stopped(stop.signum) from None
            raise
        optimizer = zero.AdamW(groups(model, options), lr=options.lr, betas=(0.9, 0.95), update=options.update)
        peers.start()
        gauge, schedule = Gauge(store), Schedule(options, earlier.seconds if earlier is not None else 0.0, peers.clock)
        course = Course(model, optimizer, optimizer.clip_grad_norm_, text, options, schedule, peers)
        if earlier is not None:
            zero.resume(model, optimizer, scheduler=course.scheduler, data=course.data)
            course.go_on(earlier.step)
        saving = Saving(model, optimizer, course, options, text, losses, peers)
        tokens = options.batch * options.context * options.accumulate * peers.launched.ranks
        begin = before = gauge.read()
        progress.begin(schedule.share(course.done))
        stopped: Stopped | None = None
        try:
            stop.interrupt_nothing(leave)
            peers.check()
            for result in recording.of(course.steps(), store):
                losses.append(result.loss)
                now = gauge.read()
                share = schedule.share(result.step)
                progress.stepped(result.step, options.steps, share, result.loss, tokens, now - before, gauge.pool())
                saving.stepped()
                peers.check()
                before = now
        except StopNoted as noted:
            stopped = Stopped(noted.signum)  # without the traceback, which has the graph of the step that it struck
        if stopped is not None:
            course.give_up_step()
            saving.finish()
            raise stopped
        optimizer.flush()  # the last step's update
        moved = gauge.read() - begin
    seen = store.statistics()
    generation = saving.commit()
    try:
        peers.check_together()
    except StopNoted as noted:
        raise Stopped(noted.signum) from None
    return Summary(
        steps=len(losses) - begun,
        losses=tuple(losses[begun:]),
        earlier_losses=tuple(losses[:begun]),
        tokens=tokens * (len(losses) - begun),
        parameters=parameters,
        moved=moved,
        update_seconds=zero.statistics(model).update_seconds,
        rates=measure(store) if first else None,
        seen=seen,
        counted_by=gauge.counted_by,
        peak_rss=_peak_memory(),
        baseline_rss=baseline,
        generation=generation,
        folder=store.folder,
        prefetch=options.prefetch,
        ranks=peers.launched.ranks,
        stage=options.stage,
    )


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _other_way(options: Options, given: Sequence[str]) -> str:
    """The command that does the same with prefetch switched."""
    changed = [argument for argument in given if argument != "--no-prefetch"]
    if options.prefetch == "on":
        changed.append("--no-prefetch")
    if options.existing == "refuse":
        changed += ["--existing", "overwrite"]
    return shlex.join(["tiered", *changed])
