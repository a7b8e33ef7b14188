"""One training of a Llama in bf16 on a device, with its parameters and states in one of five places.

    .venv/bin/python -m bench.gpu_train --place nvme --dir /mnt/nvme --json nvme.json

``--place``:

- ``device``: model, fp32 masters and moments in device memory; torch's fused AdamW.
- ``states``: model in device memory, what the optimizer keeps in a store's DRAM, where it is updated
  (``zero.AdamW(..., store=store)``).
- ``dram``: model and states in a store's DRAM, a quarter of them in HBM at a time, updated on the device (``zero.page``).
- ``nvme``: the same, with a quarter of them in DRAM as well, and all on the drive, read and written with O_DIRECT.
- ``fsdp2``: torch's ``fully_shard`` with ``CPUOffloadPolicy``, one process: masters and moments in pinned memory, updated
  there.

Layers are checkpointed. Values, tokens and the order of steps are the same in every place: three steps that are not counted,
then in turn one of ``--sequences`` sequences and one of a single sequence. Without ``--sequences`` the program first measures
how fast pinned memory is copied and how long forward and backward take, and takes the fewest with which computing takes at
least twice as long as moving the state (12 bytes a parameter) once. What was measured is written to ``--json`` after each step.

torch's deterministic algorithms are on, so that losses can be compared bit for bit. ``device``, ``dram`` and ``nvme`` update by
the same kernels; ``states`` and ``fsdp2`` update on the CPU, where on a GPU last bits are others, and FSDP2 rounds masters that
lie halfway between two bf16 values to the even one, the store upwards.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of products that are the same each time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.gpu_paths import DOWN, GIB, MIB, UP, Device, Plain
from tests.zero.narrow import MasterAdamW
from tiered import TieredStore, zero
from tiered.measuring.meters import peak_memory, scratch_folder

PLACES = ("device", "states", "dram", "nvme", "fsdp2")
STATE = 12
"""Bytes per parameter: the fp32 master, of which the bf16 value is the upper half, and two moments."""
WHOLE = 17
"""Bytes per parameter of a store that has to hold all of it in DRAM: state, gradient, and room for fragmentation."""
SHARE = 4
"""HBM, and DRAM above a drive, hold the state divided by this."""
SMALLEST = MIB
WARM_UP = 3
"""Steps that are not counted: in the first one states are made, in the next two a store learns the order."""
TWICE = 2.0
"""How many times as long computing has to take as moving the state once."""
RATE = 1e-4


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama; ``context`` in tokens. The defaults make 1.34 billion parameters."""

    width: int = 2048
    inner: int = 5504
    layers: int = 24
    heads: int = 16
    vocabulary: int = 32000
    context: int = 2048

    @property
    def parameters(self) -> int:
        """Count the parameters of a model of this shape without building it."""
        layer = 4 * self.width**2 + 3 * self.width * self.inner + 2 * self.width
        return self.layers * layer + 2 * self.vocabulary * self.width + self.width

    @property
    def state(self) -> int:
        """Bytes of masters and moments."""
        return STATE * self.parameters


class Norm(nn.Module):
    """The root mean square norm of each position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


class Layer(nn.Module):
    """Attention with rotary positions and a gated MLP (Touvron et al., 2023). (batch, time, width) -> the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner
        self.heads = shape.heads
        self.norm_attention, self.norm_mlp = Norm(width), Norm(width)
        self.query, self.key, self.value, self.project = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        y = self.norm_attention(x)
        query, key, value = (
            linear(y).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        query, key = turned(query, cosine, sine), turned(key, cosine, sine)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(x.shape))
        y = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head by its position."""
    left, right = x.chunk(2, -1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), -1)


class Llama(nn.Module):
    """Tokens, shape (batch, time), int64 -> logits, shape (batch, time, vocabulary)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        half = self.shape.width // self.shape.heads // 2
        speeds = 10_000 ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(tokens.shape[1], device=x.device, dtype=torch.float32), speeds)
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, cosine, sine, use_reentrant=False, preserve_rng_state=False)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def build(shape: Shape) -> Llama:
    """Build a model in bf16 on the meta device."""
    with torch.device("meta"):
        return Llama(shape).to(torch.bfloat16)


def initialiser(model: Llama, device: torch.device) -> Callable[[nn.Module], None]:
    """Make what gives values to a module's own parameters: the same wherever they are, drawn on ``device`` if that is CUDA."""
    numbers = {module: number for number, module in enumerate(model.modules())}
    where = device if device.type == "cuda" else torch.device("cpu")

    def initialise(module: nn.Module) -> None:
        generator = torch.Generator(where).manual_seed(numbers[module])
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                if parameter.dim() > 1:
                    drawn = torch.randn(parameter.shape, generator=generator, device=where).mul_(0.02).to(torch.bfloat16)
                    parameter.copy_(drawn)
                else:
                    parameter.fill_(1)

    return initialise


def filled(shape: Shape, where: torch.device, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Llama:
    """Build a model that is whole on ``where``."""
    model = build(shape).to_empty(device=where).to(dtype)
    initialise = initialiser(model, device)
    for module in model.modules():
        initialise(module)
    return model


@dataclass
class Training:
    """A model and its optimizer, in one of the places."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    store: TieredStore | None = None

    def losses(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute forward and backward; return the loss."""
        found = self.model(tokens[:, :-1])
        loss = F.cross_entropy(found.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


@contextmanager
def placed(place: str, shape: Shape, device: torch.device, folder: Path) -> Iterator[Training]:
    """Have a training in ``place``."""
    part = max(SMALLEST, shape.state // SHARE)
    whole = WHOLE * shape.parameters + SMALLEST
    with ExitStack() as stack:
        if place == "device":
            model = filled(shape, device, device)
            yield Training(model, MasterAdamW([{"params": list(model.parameters())}], lr=RATE))
        elif place == "states":
            model = filled(shape, device, device)
            store = stack.enter_context(TieredStore.open(None, dram=whole))
            yield Training(model, zero.AdamW(model.parameters(), lr=RATE, store=store), store)
        elif place == "fsdp2":
            stack.enter_context(one_rank(folder))
            yield sharded(shape, device)
        else:
            at = (None, whole) if place == "dram" else (folder / "store", part)
            store = stack.enter_context(TieredStore.open(at[0], hbm=part, dram=at[1], device=str(device), durability="none"))
            paged = build(shape)
            zero.page(paged, store, param_init_fn=initialiser(paged, device), paging=zero.Paging(update_tier="hbm"))
            yield Training(paged, zero.AdamW(paged.parameters(), lr=RATE), store)
            store.close()


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """Have a process group of this process alone."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder / 'meeting'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(shape: Shape, device: torch.device) -> Training:
    """Shard each layer with FSDP2: fp32 masters in pinned memory, bf16 on the device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model = filled(shape, torch.device("cpu"), device, torch.float32)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=RATE, fused=True))


# -- how many sequences -------------------------------------------------------------------------------------------------------


def pinned_rate(device: Device, total: int) -> float:
    """Return bytes per second from pinned memory to the device and back, the slower of both ways, a median of five."""
    plain = Plain(device, total)
    block = min(64 * MIB, total)
    for way in (UP, DOWN):
        plain.run((way,), block, total)
    return min(statistics.median(plain.run((way,), block, total) for _ in range(5)) for way in (UP, DOWN))


def enough(measure: Callable[[int], float | None], needed: float, most: int) -> tuple[int, list[tuple[int, float]]]:
    """Return the fewest sequences for which ``measure`` finds at least ``needed`` seconds, ``most`` at the highest, and what
    was measured. None: so many do not fit, and then it is at most one less."""
    found: list[tuple[int, float]] = []
    too_few, fit, number, each = 0, 0, 1, needed
    while True:
        seconds = measure(number)
        if seconds is None:
            most = number - 1
        else:
            found.append((number, seconds))
            each = seconds / number
            too_few, fit = (too_few, number) if seconds >= needed else (number, fit)
        if too_few + 1 >= (fit or most + 1):
            return fit or max(most, 1), found
        number = min(max(math.ceil(needed / each), too_few + 1), fit - 1 if fit else most)


def calibrated(training: Training, shape: Shape, device: Device, most: int, moved: int) -> dict[str, Any]:
    """Measure the pinned rate and forward and backward, and choose the number of sequences."""
    rate = pinned_rate(device, moved)

    def measure(number: int) -> float | None:
        seconds = []
        try:
            for count in range(3):
                device.sync()
                began = time.perf_counter()
                training.losses(tokens_of(shape, number, count).to(device.device)).item()
                device.sync()
                seconds.append(time.perf_counter() - began)
        except torch.OutOfMemoryError:
            return None
        finally:
            training.optimizer.zero_grad()
            if device.cuda:
                torch.cuda.empty_cache()
        return statistics.median(seconds[1:])

    needed = TWICE * shape.state / rate
    sequences, found = enough(measure, needed, most)
    return {"rate": rate, "state": shape.state, "needed": needed, "most": most, "measured": found, "sequences": sequences}


def tokens_of(shape: Shape, sequences: int, number: int) -> torch.Tensor:
    """Return the tokens of step ``number``, and one more of each sequence."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(shape.vocabulary, (sequences, shape.context + 1), generator=generator)


# -- steps --------------------------------------------------------------------------------------------------------------------


class Counters:
    """What a store has counted, and since when."""

    def __init__(self, store: TieredStore | None) -> None:
        self._store = store
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        if self._store is None:
            return {}
        seen = self._store.statistics()
        found: dict[str, float] = {"waited_for_reads": seen.stalled_for_reads, "waited_for_room": seen.stalled_for_room}
        for upper, lower, link in zip(seen.tiers, seen.tiers[1:], seen.links, strict=False):
            found[f"{lower.name} to {upper.name}"] = link.up.bytes
            found[f"{upper.name} to {lower.name}"] = link.down.bytes
        return found

    def lap(self) -> dict[str, float]:
        """Return the differences since the last lap."""
        before, self._before = self._before, self._now()
        return {name: value - before[name] for name, value in self._before.items()}


class Result:
    """What is written to ``--json``, whole at any time."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        self.data: dict[str, Any] = {}

    def keep(self, **more: Any) -> None:
        self.data |= more
        if self._file is not None:
            part = Path(f"{self._file}.part")
            part.write_text(json.dumps(self.data, indent=1) + "\n")
            part.replace(self._file)


def steps(
    training: Training, shape: Shape, device: Device, sequences: int, rounds: int, ends: float, result: Result
) -> None:
    """Make steps, of ``sequences`` and of one in turn, until the clock of ``time.monotonic`` shows ``ends``."""
    counters = Counters(training.store)
    made: list[dict[str, Any]] = []
    for number in range(WARM_UP + 2 * rounds):
        count = 1 if number % 2 == 0 and number else sequences
        if number > WARM_UP and number % 2 and time.monotonic() + sum(step["seconds"] for step in made[-2:]) > ends:
            break
        tokens = tokens_of(shape, count, number).to(device.device)
        device.sync()
        counters.lap()
        began = time.perf_counter()
        loss = training.losses(tokens)
        training.optimizer.step()
        training.optimizer.zero_grad()
        shown = loss.item()
        device.sync()
        seconds = time.perf_counter() - began
        step = {"sequences": count, "seconds": seconds, "loss": shown.hex(), "counts": number >= WARM_UP}
        made.append(step | counters.lap())
        if number == 0 and device.cuda:
            torch.cuda.reset_peak_memory_stats(device.device)
        memory = {"host": peak_memory()}
        if device.cuda and number:
            memory["device"] = torch.cuda.max_memory_allocated(device.device)
        if training.store is not None:
            memory |= {tier.name: tier.peak for tier in training.store.statistics().tiers if tier.name != "nvme"}
        result.keep(steps=made, peak=memory)
        print(f"step {number}: {count} sequences, {made[-1]['seconds']:.3f} s, loss {shown:.4f}", flush=True)


def run(options: argparse.Namespace) -> None:
    """Train in one place, and write what was measured."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # which would fill every new tensor
    shape = Shape(*(getattr(options, name) for name in ("width", "inner", "layers", "heads", "vocabulary", "context")))
    device, result = Device(options.device), Result(options.json)
    began = time.monotonic()
    budgets = {"parameters": shape.parameters, "state": shape.state, "context": shape.context}
    result.keep(place=options.place, **budgets)
    with scratch_folder(options.dir) as folder, placed(options.place, shape, device.device, Path(folder)) as training:
        device.sync()
        result.keep(ready=time.monotonic() - began)
        if training.store is not None:
            seen = training.store.statistics()
            result.keep(
                budgets={tier.name: tier.capacity for tier in seen.tiers if tier.name != "nvme"},
                backend=seen.backend,
                direct=seen.direct,
            )
        sequences = options.sequences
        if sequences is None:
            chosen = calibrated(training, shape, device, options.most, options.moved)
            result.keep(chosen=chosen)
            sequences = chosen["sequences"]
            print(f"{sequences} sequences a step: {chosen}", flush=True)
        steps(training, shape, device, sequences, options.rounds, began + options.seconds, result)
    result.keep(whole=time.monotonic() - began)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--place", choices=PLACES, required=True, help="where parameters and states are")
    parser.add_argument("--sequences", type=int, help="of a step (default: as many as computing needs)")
    parser.add_argument("--most", type=int, default=48, help="sequences, at the most (default: 48)")
    parser.add_argument("--rounds", type=int, default=5, help="of two steps, at the most (default: 5)")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long it may take, about (default: 90)")
    parser.add_argument("--moved", type=int, default=GIB, help="bytes that are copied to measure the rate (default: 1 GiB)")
    parser.add_argument("--dir", default=".", help="folder on the drive (default: .)")
    parser.add_argument("--json", help="write what was measured there")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...; cpu, or the tests' fake device, rehearse")
    for name, value in vars(Shape()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"(default: {value})")
    run(parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
