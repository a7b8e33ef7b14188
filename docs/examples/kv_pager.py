"""Keys and values of many conversations in blocks that page: attention over contexts that are larger than memory.

    python docs/examples/kv_pager.py --conversations 8 --tokens 512 --dram 2MiB

Each conversation is a coroutine. While one waits for a block, another one computes.
"""

import argparse
import asyncio

import torch
from torch.nn.functional import scaled_dot_product_attention

from tiered import TieredStore

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--conversations", type=int, default=8, help="at the same time (default: %(default)s)")
parser.add_argument("--tokens", type=int, default=256, help="context of each (default: %(default)s)")
parser.add_argument("--dram", default="2MiB", help="host memory for blocks (default: %(default)s)")
options = parser.parse_args()

HEADS, WIDTH, BLOCK = 8, 64, 64  # a block: keys and values of 64 tokens, float32, (2, HEADS, BLOCK, WIDTH), 256 KiB


async def fill(store, name, context):
    for number, part in enumerate(context.split(BLOCK, dim=2)):
        await asyncio.to_thread(store.put, f"{name}/{number}", part)  # put may wait for room


async def attend(store, name, query):
    """Return the attention of query, (HEADS, 1, WIDTH), over all blocks, with one block in use at a time."""
    top, total, out = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros(HEADS, 1, WIDTH)
    for number in range(len(store.keys(f"{name}/*"))):
        async with store.lease(f"{name}/{number}") as block:
            k, v = block
            scores = query @ k.transpose(1, 2) / WIDTH**0.5
            higher = torch.maximum(top, scores.amax(2, keepdim=True))
            weights, shrink = (scores - higher).exp(), (top - higher).exp()
            top, total, out = higher, total * shrink + weights.sum(2, keepdim=True), out * shrink + weights @ v
            del block, k, v  # views pin a block as the block itself does
    return out / total


async def converse(store, name, seed):
    context = torch.randn(2, HEADS, options.tokens, WIDTH, generator=torch.Generator().manual_seed(seed))
    query = torch.randn(HEADS, 1, WIDTH, generator=torch.Generator().manual_seed(seed + 1000))
    await fill(store, name, context)
    torch.testing.assert_close(await attend(store, name, query), scaled_dot_product_attention(query, *context))


async def main(store):
    await asyncio.gather(*(converse(store, f"conversation{i}", i) for i in range(options.conversations)))
    now = store.statistics()
    nbytes = sum(store.spec(key).nbytes for key in store)
    print(f"{nbytes >> 10} KiB of blocks, at most {now.tier('dram').peak >> 10} KiB in memory")


with TieredStore.open("kv-store", dram=options.dram, durability="none") as store:
    asyncio.run(main(store))
