"""Serve a mixture of experts from a disk: only the experts that tokens are routed to are read.

    python docs/examples/expert_weights.py --experts 64 --dram 8MiB

The experts of a batch are known before they are needed, so the store is asked for all of them at once.
"""

import argparse

import torch
from torch.nn.functional import gelu

from tiered import TieredStore

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--experts", type=int, default=64, help="of 512 KiB each (default: %(default)s)")
parser.add_argument("--dram", default="8MiB", help="host memory for experts (default: %(default)s)")
parser.add_argument("--batches", type=int, default=40, help="of 8 tokens (default: %(default)s)")
options = parser.parse_args()

WIDTH, HIDDEN = 128, 512


def expert(store, number, x):
    with store.lease(f"expert/{number}") as w:  # (2, HIDDEN, WIDTH)
        return gelu(x @ w[0].t()) @ w[1]  # a new tensor; w and its views go when this returns


def layer(store, router, x):
    """Send each token, a row of x, to its best expert."""
    chosen = (x @ router).argmax(dim=1)
    used = chosen.unique().tolist()
    store.prefetch([f"expert/{number}" for number in used])  # a hint, in the order of use
    y = torch.empty_like(x)
    for number in used:
        y[chosen == number] = expert(store, number, x[chosen == number])
    return y


torch.manual_seed(0)
router = torch.randn(WIDTH, options.experts)
with TieredStore.open("expert-store", dram=options.dram, existing="may") as store:
    if len(store) != options.experts:
        for number in range(options.experts):
            store.put(f"expert/{number}", torch.randn(2, HIDDEN, WIDTH) / WIDTH**0.5)
topic = torch.randn(8, WIDTH)
with TieredStore.open("expert-store", dram=options.dram, access="read") as store:
    for _ in range(options.batches):
        topic += 0.1 * torch.randn_like(topic)  # batches resemble each other, as text does
        layer(store, router, topic)
    now = store.statistics()
    print(f"{now.hits} of {now.leases} experts waited for nothing, {now.links[0].up.bytes >> 20} MiB read")
    print(f"{options.batches * options.experts * 512 >> 10} MiB would have been read with all experts each time")
