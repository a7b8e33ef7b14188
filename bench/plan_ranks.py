"""What a plan simulates of several ranks, beside what they do: bytes sent, read and written by a rank, and seconds of a step.

    .venv/bin/python -m bench.plan_ranks --dir /mnt/nvme > bench/results/plan_ranks_<hardware>_<date>.md

Ranks of one machine share its cores, its drive and its loopback device. So the machine is measured with the threads that a rank
has, what computes is divided where there are more ranks than cores, and the network is what gloo gathers between so many ranks
here. The model, the batch and the pool of all ranks together are those of ``bench/ranks.py``, stage 3.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from bench.ranks import TOKENS, Way, train
from bench.step import Model
from tiered.cli.output import told_environment
from tiered.measuring.meters import environment
from tiered.measuring.probes import measured_machine
from tiered.planning.machine import Machine
from tiered.planning.plan import Choice, PlannedRanks, Planner
from tiered.planning.sources import Workload, subject_of
from tiered.types import parse_size
from tiered.zero import Policy
from tiered.zero.rules.exact import AdamWRule

LAYERS, WIDTH, BATCH, STEPS = 12, 384, 12, 5
GATHERED = 4 << 20
"""Bytes of each rank that are gathered to measure the network."""


def gathers(rank: int, ranks: int, meet: str) -> None:
    """Print the bytes that a rank receives in a second while all gather."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    mine, all_of_them = torch.ones(GATHERED // 4), [torch.empty(GATHERED // 4) for _ in range(ranks)]
    taken = []
    for _ in range(9):
        dist.barrier()
        began = time.perf_counter()
        dist.all_gather(all_of_them, mine)
        taken.append(time.perf_counter() - began)
    if rank == 0:
        print((ranks - 1) * GATHERED / statistics.median(taken[2:]))
    dist.destroy_process_group()


def network(ranks: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.plan_ranks", "--gathers", f"{ranks},{folder}/meet"]
        children = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(ranks)
        ]
        said = [child.communicate(timeout=300)[0] for child in children]
        return float(said[0])


def simulated(ranks: int, machine: Machine, pool: int) -> PlannedRanks:
    with torch.device("meta"):
        model = Model(LAYERS, WIDTH)
    subject = subject_of(model, Workload(BATCH // ranks, TOKENS))
    rule = AdamWRule(1e-3, (0.9, 0.999), 1e-8, 0.01, False)
    planner = Planner(subject, machine, rule, Policy(), 1, measure=ranks <= (os.cpu_count() or 1))
    return planner.with_ranks(Choice("on_fetch", "memory", pool // ranks), ranks, BATCH // ranks * TOKENS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a folder on the drive")
    parser.add_argument("--ranks", default="1,2,3,4")
    parser.add_argument("--pool", default="82MiB", help="of all ranks together")
    parser.add_argument("--gathers", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gathers:
        ranks, _, meet = options.gathers.partition(",")
        gathers(options.rank, int(ranks), meet)
        return 0
    cores, pool = os.cpu_count() or 1, parse_size(options.pool)
    print(told_environment(environment()))
    print(f"\nStage 3, {LAYERS} layers of width {WIDTH}, {BATCH} x {TOKENS} tokens a step, ", end="")
    print(f"pools of {pool / 2**20:.0f} MiB together\n")
    print("| ranks | s simulated | s measured [least, most] | error | MB sent | measured | error | MB read | measured | error "
          "| MB written | measured | error | network, MB/s |\n|---:|---:|---:|" + "---:|" * 11)
    for ranks in map(int, options.ranks.split(",")):
        torch.set_num_threads(max(1, cores // ranks))
        crowd = max(1.0, ranks / cores)
        found = measured_machine(options.dir)
        rate = network(ranks) if ranks > 1 else 1e9
        machine = found.but(
            flops=found.flops / crowd, memory=found.memory / crowd, update=found.update / crowd, lease=found.lease * crowd,
            gradient=found.gradient * crowd, operation=found.operation * crowd, network=rate,
            read=found.read / ranks, write=found.write / ranks,  # each rank is as a node by itself: what it sends was measured
            threads=max(1, cores // ranks), cores=max(1, cores // ranks),
        )  # fmt: skip
        plan = simulated(ranks, machine, pool)
        answers = train(Way("3", ranks, LAYERS, WIDTH, pool // ranks, BATCH // ranks, STEPS, options.dir))
        taken = [max(times) for times in zip(*(one["seconds"] for one in answers), strict=True)]
        mean = {name: statistics.fmean(one[name] for one in answers) for name in ("sent", "read", "written")}
        middle = statistics.median(taken)
        cells = [f"{plan.seconds:.3f}", f"{middle:.3f} [{min(taken):.3f}, {max(taken):.3f}]"]
        cells.append(f"{plan.seconds / middle - 1:+.0%}")
        for name, planned in (("sent", plan.sent), ("read", plan.read), ("written", plan.written)):
            error = f"{planned / mean[name] - 1:+.1%}" if mean[name] > 1e5 else "-"
            cells += [f"{planned / 1e6:.1f}", f"{mean[name] / 1e6:.1f}", error]
        print(f"| {ranks} | {' | '.join(cells)} | {rate / 1e6 if ranks > 1 else 0:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
