"""Every call of the store on tensors of many sizes, as a page for ``bench/results/``.

    .venv/bin/python -m bench.store --drive /mnt/nvme --seconds 2 > bench/results/store_MACHINE_DATE.md

Options are those of ``tiered bench store``.
"""

from __future__ import annotations

import sys

from bench.command import tiered
from bench.io import page


def main() -> None:
    given = sys.argv[1:]
    if {"-h", "--help"} & set(given):
        print(__doc__)
        return
    command = ["bench", "store", *given]
    print(page("Every call of the store, by size", command, tiered(*command)[0]).rstrip())


if __name__ == "__main__":
    main()
