"""Train a model that does not fit into the memory that it is given, on a CPU or a GPU, stop at any time, and go on.

    python docs/examples/train.py --steps 20
    python docs/examples/train.py --store gpu-store --hbm 4MiB

Run it again with more ``--steps``: it goes on from its last commit, bit for bit as if it had never stopped.
"""

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: idle threads of its leave the cores to others

import torch

from tiered import TieredStore, zero

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--store", default="train-store", help="folder of the store (default: %(default)s)")
parser.add_argument("--dram", default="8MiB", help="host memory for parameters, gradients and states (default: %(default)s)")
parser.add_argument("--hbm", help="memory of a GPU for parameters; the GPU computes then (default: none, the CPU computes)")
parser.add_argument("--device", help="the GPU, such as cuda:1; with cpu host memory stands in (default, with --hbm: cuda)")
parser.add_argument("--layers", type=int, default=12, help="hidden layers of 1 MiB each (default: %(default)s)")
parser.add_argument("--steps", type=int, default=20, help="steps in all (default: %(default)s)")
options = parser.parse_args()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = torch.nn.Linear(512, 512)

    def forward(self, x):
        return x + torch.nn.functional.gelu(self.inside(x))


torch.manual_seed(0)
target = torch.randn(512, 512) / 512**0.5  # what the model shall learn
data = torch.Generator().manual_seed(1)
with TieredStore.open(options.store, dram=options.dram, hbm=options.hbm, device=options.device) as store:
    target = target.to(store.device)  # the GPU, if there is one
    with zero.init(store):  # the model is never whole in memory
        model = torch.nn.Sequential(*[Block() for _ in range(options.layers)])
    zero.page(model, store, existing="continue")
    optimizer = zero.AdamW(model.parameters(), lr=1e-3)
    begun = zero.resume(model, optimizer, data=data) or {"done": 0}  # None in the first run
    for step in range(begun["done"], options.steps):
        x = torch.randn(64, 512, generator=data).to(store.device)
        optimizer.zero_grad()
        loss = (model(x) - x @ target).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")
        if step % 10 == 9 or step + 1 == options.steps:
            zero.commit(model, optimizer, data=data, extra={"done": step + 1})  # durable from here on
    state, tiers = sum(store.spec(key).nbytes for key in store), store.statistics().tiers
    peaks = ", ".join(f"{tier.peak:,} in {tier.name}" for tier in tiers)
    print(f"{state:,} bytes of parameters and states, at most {peaks}")
