"""Training on several ranks of one machine, stage by stage, beside one rank and beside torch's FSDP2 with CPU offload.

    .venv/bin/python -m bench.ranks --ranks 2 --stage 1,2,3
    .venv/bin/python -m bench.ranks --ranks 2 --dir /mnt/nvme --layers 24 --dram 200MiB > bench/results/ranks_MACHINE_DATE.md
    .venv/bin/python -m bench.ranks --ranks 2 --stage 3 --rate 1gbit     two hosts with a cable of that rate, as root

The model is a stack of residual MLPs (``bench/step.py``). All ways have the same batch, memory and cores together: a rank has
its share of each. Rounds are interleaved, each with processes of its own: some steps to warm up, some that are timed. Bytes
sent are counted at the sockets of each rank, over gloo on the loopback device, and compared with the volume of the way:
2Φ(N-1)/N parameters a step for stages 1 and 2, 3Φ(N-1)/N for stage 3 and FSDP2. FSDP2 keeps everything in memory.

With ``--rate`` each rank is in a network namespace of its own, and what leaves it goes through a token bucket (tc-tbf): that
shows what gathering and reducing beside the compute bring, by ways that do one thing after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.step import TOKENS, Block, Model
from bench.wire import traffic
from tiered import zero
from tiered.cli.output import Progress, told_environment, told_noise
from tiered.measuring.meters import Meter, Noise, Spread, environment, peak_memory, scratch_folder, scratch_store
from tiered.types import format_size, parse_size
from tiered.zero.paging import reduction

STAGES: dict[str, zero.Stage] = {"1": zero.Stage1(), "2": zero.Stage2(), "3": zero.Stage3()}
GATHERED = {"1": 2, "2": 2, "3": 3, "FSDP2": 3}
"""Times that all parameters or all gradients pass, in a step."""
PATIENCE = 1800.0
WARM_UP = 3
CABLE = "cable"


@dataclass(frozen=True)
class Way:
    """``kind``: a stage, or FSDP2. ``dram`` and ``batch`` are one rank's. ``hosts``: the namespace of each."""

    kind: str
    ranks: int
    layers: int
    width: int
    dram: int
    batch: int
    steps: int
    folder: str
    hosts: tuple[str, ...] = ()
    overlapped: bool = True

    @property
    def name(self) -> str:
        what = "FSDP2, CPU offload" if self.kind == "FSDP2" else f"tiered, stage {self.kind}" if self.ranks > 1 else "tiered"
        turn = "" if self.overlapped else ", one thing after the other"
        return f"{what}, {self.ranks} rank{'s' * (self.ranks > 1)}{turn}"


# -- one rank --------------------------------------------------------------------------------------------------------------


def run_rank(way: Way, rank: int, meet: str) -> dict[str, Any]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // way.ranks))
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=way.ranks)
    torch.manual_seed(0)
    model = Model(way.layers, way.width)
    found = _offloaded(model, way, rank) if way.kind == "FSDP2" else _tiered(model, way, rank)
    dist.destroy_process_group()
    return found | {"peak_memory": peak_memory()}


def _tiered(model: nn.Module, way: Way, rank: int) -> dict[str, Any]:
    if not way.overlapped:
        reduction.ROOMY = 1 << 40  # no pool is
    with scratch_store(way.folder, dram=way.dram) as store:
        zero.page(model, store, stage=STAGES[way.kind] if way.ranks > 1 else None)
        found = _steps(model, zero.AdamW(model.parameters(), lr=1e-4), way, rank, Meter(store))
        return found | {"pool_peak": store.statistics().tiers[0].peak}


def _offloaded(model: Model, way: Way, rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh = init_device_mesh("cpu", (way.ranks,))
    policy = CPUOffloadPolicy(pin_memory=False)
    for module in (*(module for module in model.modules() if isinstance(module, Block)), model):
        fully_shard(module, mesh=mesh, offload_policy=policy)
    return _steps(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), way, rank, Meter(None))


def _steps(model: nn.Module, optimizer: Any, way: Way, rank: int, meter: Meter) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    seconds = []
    for number in range(WARM_UP + way.steps):
        if number == WARM_UP:
            meter.lap()
            before = traffic()
        began = time.perf_counter()
        tokens = torch.randint(0, 256, (way.batch, TOKENS), generator=generator)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    used, sent = meter.lap(), (traffic() - before).sent
    per = {"sent": sent / way.steps, "read": used.read / way.steps, "written": used.written / way.steps}
    return {"seconds": seconds[WARM_UP:], **per}


# -- all of them -----------------------------------------------------------------------------------------------------------


def train(way: Way) -> list[dict[str, Any]]:
    """Each rank's answer."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.ranks", "--way", json.dumps(asdict(way)), "--meet", f"{folder}/meet"]
        inside = [["ip", "netns", "exec", host] for host in way.hosts] or [[]] * way.ranks
        environment = os.environ | ({"GLOO_SOCKET_IFNAME": CABLE} if way.hosts else {})
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
        ranks = [subprocess.Popen([*inside[rank], *command, "--rank", str(rank)], **pipes) for rank in range(way.ranks)]
        try:
            said = [process.communicate(timeout=PATIENCE) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    codes = [process.returncode for process in ranks]
    failed = [f"({code}) {error.strip()[-2000:]}" for code, (_, error) in zip(codes, said, strict=True) if code]
    if failed:
        sys.exit(f"{way.name} failed: " + "\n".join(failed))
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@contextmanager
def two_hosts(rate: str) -> Iterator[tuple[str, str]]:
    """Network namespaces with a cable between them."""
    names = f"tiered-a-{os.getpid()}", f"tiered-b-{os.getpid()}"

    def run(*words: str) -> None:
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"--rate needs root, ip, tc and network namespaces: {' '.join(words)}: {done.stderr.strip()}")

    try:
        for name in names:
            run("ip", "netns", "add", name)
        run(*f"ip link add {CABLE} netns {names[0]} type veth peer name {CABLE} netns {names[1]}".split())
        for number, name in enumerate(names, 1):
            run(*f"ip -n {name} addr add 192.0.2.{number}/24 dev {CABLE}".split())
            for device in (CABLE, "lo"):
                run(*f"ip -n {name} link set {device} up".split())
            run(*f"ip netns exec {name} tc qdisc add dev {CABLE} root tbf rate {rate} burst 256kb latency 50ms".split())
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def ways(options: argparse.Namespace, folder: str, hosts: tuple[str, ...]) -> Iterator[Way]:
    def way(kind: str, ranks: int, overlapped: bool = True) -> Way:
        dram, batch = options.dram // ranks, options.batch // ranks
        here = hosts if ranks > 1 else ()
        return Way(kind, ranks, options.layers, options.width, dram, batch, options.steps, folder, here, overlapped)

    yield way("1", 1)
    for stage in options.stage.split(","):
        yield way(stage, options.ranks)
        if hosts:
            yield way(stage, options.ranks, overlapped=False)
    yield way("FSDP2", 1)
    yield way("FSDP2", options.ranks)


def row(way: Way, answers: Sequence[Sequence[dict[str, Any]]], parameters: int) -> list[str]:
    """Of all rounds: times are the slowest rank's, bytes the mean of the ranks', peaks the largest."""
    seconds = [max(times) for found in answers for times in zip(*(rank["seconds"] for rank in found), strict=True)]
    ranks = [rank for found in answers for rank in found]
    mean = {name: sum(rank[name] for rank in ranks) / len(ranks) for name in ("sent", "read", "written")}
    volume = GATHERED[way.kind] * 4 * parameters * (way.ranks - 1) / way.ranks
    peak = max((rank.get("pool_peak") or 0 for rank in ranks), default=0)
    memory = [rank["peak_memory"] for rank in ranks]
    return [
        way.name,
        Spread.of(seconds).shown(1, 3),
        format_size(round(mean["sent"])),
        f"{mean['sent'] / volume:.3f}" if volume else "-",
        format_size(peak) if peak else "-",
        "?" if None in memory else format_size(max(memory)),
        format_size(round(mean["read"])),
        format_size(round(mean["written"])),
    ]


HEAD = ["way", "s a step", "sent", "by volume", "pool's peak", "peak memory", "read", "written"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", default="1,2,3", help="one or more, like 2,3 (default: 1,2,3)")
    for name, default in (("layers", 12), ("width", 384), ("batch", 8), ("steps", 5), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dram", type=parse_size, metavar="SIZE", help="of all ranks together (default: half of the state)")
    parser.add_argument("--rate", help="of a cable between two hosts, as tc has it, like 1gbit (root; 2 ranks)")
    for name in ("way", "rank", "meet"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(run_rank(Way(**json.loads(options.way)), int(options.rank), options.meet)))
        return 0
    if options.ranks < 2 or options.batch % options.ranks or set(options.stage.split(",")) - set(STAGES):
        parser.error("--ranks is 2 or more and divides --batch; --stage is of 1, 2 and 3")
    if options.rate and options.ranks != 2:
        parser.error("--rate is for --ranks 2")
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Model(options.layers, options.width).parameters())
    options.dram = options.dram or 6 * parameters
    noise = Noise()
    with ExitStack() as stack:
        folder, progress = stack.enter_context(scratch_folder(options.dir)), stack.enter_context(Progress(sys.stderr))
        hosts = stack.enter_context(two_hosts(options.rate)) if options.rate else ()
        found: dict[Way, list[list[dict[str, Any]]]] = {way: [] for way in ways(options, str(Path(folder)), hosts)}
        for turn in range(options.rounds):
            for number, (way, answers) in enumerate(found.items()):
                done = (turn * len(found) + number) / (options.rounds * len(found))
                progress.working(f"round {turn + 1} of {options.rounds}: {way.name}", done)
                answers.append(train(way))
        progress.working("done", 1.0)
    print(told_environment(environment()))
    pools = f"pools of {format_size(options.dram)} together"
    print(f"{parameters:,} parameters, fp32; {options.batch} x {TOKENS} tokens a step; {pools}")
    print(f"{options.rounds} rounds of {options.steps} steps, interleaved: median [least - most]; {told_noise(noise.seen())}")
    if hosts:
        print(f"Each rank is a host; the cable between them carries {options.rate} each way")
    print("Bytes are per rank and step; peaks are those of the rank that has most\n")
    print("| " + " | ".join(HEAD) + " |\n|---|" + "---:|" * (len(HEAD) - 1))
    for way, answers in found.items():
        print("| " + " | ".join(row(way, answers, parameters)) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
