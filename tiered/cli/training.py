"""Trains the GPT of ``tiered train``: an ordinary PyTorch loop, on a store or in memory."""

from __future__ import annotations

import math
import os
import resource
import shlex
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn

from tiered import CapacityError, MisuseError, TieredStore, zero
from tiered.cli.gpt import GPT, Shape, build, initialiser
from tiered.cli.progress import Gauge, Progress
from tiered.cli.rates import measure
from tiered.cli.recording import Recording
from tiered.cli.report import refuse_unwritable, write_report
from tiered.cli.stop import Stopped, StopRequest
from tiered.cli.summary import Summary, describe
from tiered.cli.train import Options
from tiered.sizes import format_size

__all__ = [
    "GRADIENT_BYTES",
    "STATE_BYTES",
    "Result",
    "Text",
    "decayed",
    "describe_model",
    "groups",
    "open_text",
    "page",
    "refuse_endless",
    "refuse_existing",
    "refuse_full_disk",
    "shape_of",
    "train",
    "training_steps",
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


class Text:
    """A file of bytes to learn, read as needed."""

    def __init__(self, path: str, context: int) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise MisuseError(f"cannot read the text {path}: {error.strerror}; name a file with --text") from error
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise MisuseError(f"the text {path} is not a file; name one with --text")
            if found.st_size <= context:
                what = f"has {found.st_size:,} bytes" if found.st_size else "is empty"
                raise MisuseError(
                    f"the text {path} {what}, a context of {context} needs {context + 1:,}: name a longer one, or "
                    "lower --context"
                )
        except BaseException:
            os.close(self._fd)
            raise
        self.path, self.nbytes, self._context = path, found.st_size, context

    def batch(self, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes at random places and those that follow them: two int64 tensors of shape (size, context)."""
        starts = torch.randint(0, self.nbytes - self._context, (size,), generator=generator)
        rows = []
        for start in starts.tolist():
            row = os.pread(self._fd, self._context + 1, start)
            if len(row) <= self._context:
                raise MisuseError(f"the text {self.path} became shorter while it was read; leave it alone until the end")
            rows.append(torch.frombuffer(bytearray(row), dtype=torch.uint8))
        whole = torch.stack(rows).long()
        return whole[:, :-1], whole[:, 1:]

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True)
class Result:
    """One step. ``losses``: of each batch; ``norm``: of the gradients before clipping, None without clipping."""

    step: int
    losses: tuple[float, ...]
    norm: float | None

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


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


def open_text(path: str | None, context: int, stack: ExitStack) -> Text:
    """The text in file ``path``, or that which ships with this; closed with ``stack``. Raises MisuseError."""
    if path is None:
        path = str(stack.enter_context(as_file(files("tiered.data") / "shakespeare.txt")))
    text = Text(path, context)
    stack.callback(text.close)
    return text


class Schedule:
    """How far training is, and from that the learning rate: a linear warm-up, then a cosine down to a tenth."""

    def __init__(self, options: Options) -> None:
        self._steps, self._warmup = options.steps, options.warmup
        self._seconds = None if options.minutes is None else options.minutes * 60
        self._began = time.monotonic()

    def share(self, step: int) -> float:
        """Of the training, after ``step`` steps; 1 at its end."""
        by_steps = step / self._steps if self._steps else 0.0
        by_time = (time.monotonic() - self._began) / self._seconds if self._seconds else 0.0
        return min(1.0, max(by_steps, by_time))

    def factor(self, step: int) -> float:
        """Of the learning rate, for the step after ``step`` steps."""
        return min(1.0, (step + 1) / self._warmup) * (0.55 + 0.45 * math.cos(math.pi * self.share(step)))


def training_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[float], torch.Tensor],
    text: Text,
    options: Options,
    schedule: Schedule,
) -> Iterator[Result]:
    """Train until the schedule is over. The order of the data depends on the seed alone."""
    generator = torch.Generator().manual_seed(options.seed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)
    step = 0
    while schedule.share(step) < 1:
        optimizer.zero_grad()
        losses = []
        for _ in range(options.accumulate):
            inputs, targets = text.batch(options.batch, generator)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            (loss / options.accumulate).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        norm = clip(options.clip).item() if options.clip else None
        optimizer.step()
        scheduler.step()
        step += 1
        yield Result(step, tuple(losses), norm)


def page(
    model: GPT, store: TieredStore, options: Options, existing: str, tell: Callable[[int], None], stop: StopRequest
) -> None:
    """Put the model, which is on the meta device, into the store. ``tell`` is given the parameters done so far."""
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

    for block in model.blocks:
        block.register_forward_pre_hook(pass_by)
    zero.page(
        model, store, name=NAME, existing=existing, prefetch=options.prefetch, micro_batch=options.micro_batch,
        param_init_fn=initialise_one,
    )


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


def refuse_full_disk(store: TieredStore, parameters: int) -> None:
    """Raises CapacityError when the model will not fit on the store's device."""
    needed = RESERVE * (STATE_BYTES + GRADIENT_BYTES) * parameters
    disk = store.statistics().tiers[-1]
    free = disk.capacity - disk.used
    if free < needed:
        raise CapacityError(
            f"training {parameters:,} parameters needs {format_size(needed)} of disk, {store.folder} has {format_size(free)} "
            "free: make room, name a --dir on another device, or lower --layers or --width"
        )


def refuse_existing(store: TieredStore, options: Options) -> None:
    held = [key for key in store if key.startswith(f"{NAME}/")]
    if held and options.existing == "refuse":
        at = f", step {store.meta['step']}" if "step" in store.meta else ""
        raise MisuseError(
            f"{store.folder} holds a model already (generation {store.generation}{at}): name another --dir, "
            "or replace it with --existing overwrite"
        )


def train(options: Options, given: Sequence[str]) -> int:
    """Train and print; returns the exit code. ``given`` is the command line, to be shown with a change."""
    stream = sys.stderr if options.json == "-" else sys.stdout
    folder = options.folder or DEFAULT_FOLDER
    baseline = _peak_memory()
    recording = Recording(options)
    refuse_unwritable(options.json)
    recording.refuse_unwritable()
    with ExitStack() as stack:
        text = open_text(options.text, options.context, stack)
        parameters = shape_of(options).parameters
        refuse_endless(options)
        store = stack.enter_context(TieredStore.open(folder, dram=options.dram, backend=options.backend, keep=1))
        refuse_existing(store, options)
        refuse_full_disk(store, parameters)
        model = build(shape_of(options))
        print(
            f"model     {describe_model(options, parameters)}\n"
            f"budget    {format_size(options.dram)} of memory for {format_size(STATE_BYTES * parameters)} of parameters and "
            f"Adam states\ntext      {text.path} ({format_size(text.nbytes)})\nstore     {store.folder}",
            file=stream,
            flush=True,
        )
        results: list[Result] = []
        try:
            with StopRequest() as stop:
                summary = _train(model, store, text, options, stop, Progress(stream), parameters, baseline, results, recording)
        except Stopped as stopped:
            store.close()
            last = f"the last commit is generation {store.generation}" if store.generation else "nothing was committed"
            print(f"tiered: stopped at step {len(results)}; {last}; the store in {store.folder} reopens", file=sys.stderr)
            return stopped.exit_code
        print(describe(summary, _other_way(options, given)), file=stream)
        told = recording.write(describe_model(options, parameters))
        if told is not None:
            print(f"\n{told}", file=stream)
        write_report(options.json, summary.as_json())
    return 0


def _train(
    model: GPT,
    store: TieredStore,
    text: Text,
    options: Options,
    stop: StopRequest,
    progress: Progress,
    parameters: int,
    baseline: int,
    results: list[Result],
    recording: Recording,
) -> Summary:
    with progress:
        page(model, store, options, options.existing, lambda done: progress.preparing(done, parameters), stop)
        optimizer = zero.AdamW(groups(model, options), lr=options.lr, betas=(0.9, 0.95), update=options.update)
        gauge, schedule = Gauge(store), Schedule(options)
        tokens = options.batch * options.context * options.accumulate
        begin = before = gauge.read()
        progress.begin()
        steps = training_steps(model, optimizer, optimizer.clip_grad_norm_, text, options, schedule)
        for result in recording.of(steps, store):
            results.append(result)
            now = gauge.read()
            share = schedule.share(result.step)
            progress.stepped(result.step, options.steps, share, result.loss, tokens, now - before, gauge.pool())
            stop.check()
            before = now
        optimizer.flush()  # the last step's update
        moved = gauge.read() - begin
    seen = store.statistics()
    last = results[-1].loss
    told = last if math.isfinite(last) else str(last)  # JSON has no NaN, and a run that diverged is worth keeping, too
    generation = store.commit(meta={"command": "train", "step": len(results), "loss": told, "seed": options.seed})
    return Summary(
        steps=len(results),
        losses=tuple(result.loss for result in results),
        tokens=tokens * len(results),
        parameters=parameters,
        moved=moved,
        update_seconds=zero.statistics(model).update_seconds,
        rates=measure(store),
        seen=seen,
        counted_by=gauge.counted_by,
        peak_rss=_peak_memory(),
        baseline_rss=baseline,
        generation=generation,
        folder=store.folder,
        prefetch=options.prefetch,
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
