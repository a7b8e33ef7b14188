"""Spread the tensors of a store over several drives, without a RAID.

    python docs/examples/several_drives.py --drives /mnt/a /mnt/b

Each tensor lies whole on one drive; tensors that are used one after the other lie on different drives. Tensors of more than
64 MiB are striped over all drives.
"""

import argparse
from pathlib import Path

import torch

from tiered import TieredStore

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--drives", nargs="+", default=["drive-a", "drive-b"], help="a folder on each (default: drive-a drive-b)")
parser.add_argument("--store", default="drives-store", help="folder of the commits (default: %(default)s)")
parser.add_argument("--dram", default="8MiB", help="host memory (default: %(default)s)")
parser.add_argument("--layers", type=int, default=16, help="tensors of 2 MiB (default: %(default)s)")
options = parser.parse_args()

with TieredStore.open(options.store, paths=options.drives, dram=options.dram) as store:
    for layer in range(options.layers):
        store.put(f"layer{layer}", torch.full((1 << 19,), float(layer)))  # the commit syncs every drive

for drive in options.drives:
    print(drive, sum(path.stat().st_blocks * 512 for path in Path(drive).iterdir()) >> 20, "MiB")

with TieredStore.open(options.store, paths=options.drives[::-1], dram=options.dram) as store:  # in any order
    store.follow([f"layer{layer}" for layer in range(options.layers)], then="end")  # all drives read ahead
    for layer in range(options.layers):
        with store.lease(f"layer{layer}") as weight:
            assert float(weight[0]) == float(weight[-1]) == layer
        del weight
    up = store.statistics().links[0].up
    print(f"{up.bytes >> 20} MiB in {up.transfers} reads; each block was compared with its checksum")
