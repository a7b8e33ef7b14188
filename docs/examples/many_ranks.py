"""Train one model with several processes, each with a store and a share of the model of its own (ZeRO stage 3).

    torchrun --nproc-per-node 2 docs/examples/many_ranks.py --steps 8

Run it again with more ``--steps``, with the same number of processes: it goes on from the last commit of all of them.
"""

import argparse
import os

import torch
import torch.distributed as dist

from tiered import zero

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--store", default="ranks-store", help="folder of the stores (default: %(default)s)")
parser.add_argument("--dram", default="8MiB", help="host memory of each process (default: %(default)s)")
parser.add_argument("--width", type=int, default=256, help="of the hidden layers (default: %(default)s)")
parser.add_argument("--steps", type=int, default=8, help="steps in all (default: %(default)s)")
options = parser.parse_args()
if "RANK" not in os.environ:
    parser.error("torchrun starts the processes, as above")

addresses, rank, ranks = next(dist.rendezvous("env://"))
addresses = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), addresses)  # a restart has its own
dist.init_process_group("gloo", store=addresses, rank=rank, world_size=ranks)
torch.manual_seed(0)
with zero.open_store(options.store, dram=options.dram) as store:  # rank R of N: ranks-store/rank-R-of-N
    layers = [torch.nn.Sequential(torch.nn.Linear(options.width, options.width), torch.nn.GELU()) for _ in range(6)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(options.width, options.width))
    zero.page(model, store, stage=zero.Stage3(), existing="continue")
    optimizer = zero.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1)  # all draw the same batch ...
    begun = zero.resume(model, optimizer, data=data) or {"done": 0}  # None in the first run
    for step in range(begun["done"], options.steps):
        optimizer.zero_grad()
        x = torch.randn(8 * ranks, options.width, generator=data)[8 * rank : 8 * (rank + 1)]  # ... each learns from its part
        loss = (model(x) - x).square().mean()
        loss.backward()  # gradients are averaged over the ranks
        optimizer.clip_grad_norm_(1.0)  # the norm of all of them together
        optimizer.step()
        zero.commit(model, optimizer, data=data, extra={"done": step + 1})
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    store.close()
dist.destroy_process_group()
