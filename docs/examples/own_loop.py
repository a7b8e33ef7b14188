"""A loop of your own: power iteration with a matrix that is larger than memory, in blocks of rows.

    python docs/examples/own_loop.py --size 2048 --dram 4MiB

Each round uses the blocks in the same order, so the store is told the order once. It then fetches blocks ahead, and keeps the
part of them that pays.
"""

import argparse

import torch

from tiered import TieredStore

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--size", type=int, default=2048, help="rows and columns (default: %(default)s)")
parser.add_argument("--dram", default="4MiB", help="host memory for blocks (default: %(default)s)")
parser.add_argument("--rounds", type=int, default=6, help="products of matrix and vector (default: %(default)s)")
options = parser.parse_args()

ROWS = 128  # of a block
blocks = options.size // ROWS


def product(store, vector):
    """Return matrix @ vector, one block at a time."""
    found = torch.empty(options.size)
    for number in range(blocks):
        with store.lease(f"block/{number}") as part:  # the store's own memory, no copy
            found[number * ROWS : (number + 1) * ROWS] = part @ vector
        del part  # a tensor that is still referred to takes room from the next one
    return torch.nn.functional.normalize(found, dim=0)


torch.manual_seed(0)
known = torch.nn.functional.normalize(torch.randn(options.size), dim=0)  # the matrix is known * known.T, and some noise
with TieredStore.open("own-loop-store", dram=options.dram, durability="none") as store:  # scratch: removed at the end
    for number, part in enumerate(known.split(ROWS)):
        store.put(f"block/{number}", torch.outer(part, known) + 1e-4 * torch.randn(ROWS, options.size))
    with store.trace() as order:  # which blocks a round uses, in order
        vector = product(store, torch.randn(options.size))
    store.follow(order)
    for _ in range(options.rounds):
        vector = product(store, vector)
    now = store.statistics()
    print(f"{now.hits} of {now.leases} leases waited for nothing, {now.links[0].up.bytes >> 20} MiB read")
print(f"cosine with the known vector: {(vector @ known).abs().item():.4f}")
