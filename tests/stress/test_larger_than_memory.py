"""Import and export of what is larger than the memory that the kernel allows the process; a cgroup counts the page cache, too.

A process that goes beyond its limit is killed. Swap would hide that, so with swap the test says nothing and is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open

from tests.stress.cgroups import cgroup, enter
from tests.stress.contents import content
from tests.stress.tally import Tally
from tiered.format.safetensors import INDEX, entry_of
from tiered.format.safetensors_writer import Shards
from tiered.types import TensorSpec

PROMISE = "17 (limits)"
MIB = 1 << 20
ROOM = 208 * MIB
"""Beside Python with torch, which takes 230 (torch 2.13) to 375 MiB (2.14) where nobody else has its files in memory."""
NBYTES = 768 * MIB
EACH = 24 * MIB

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0, reason="making a cgroup needs root"),
    pytest.mark.skipif(psutil.swap_memory().total > 0, reason="with swap a limit of memory is none"),
]


IMPORTS = """
import os, sys
import torch._dynamo
import tiered.zero
names = "memory.current", "memory.usage_in_bytes"
print(next(int(open(f"{sys.argv[1]}/{name}").read()) for name in names if name in os.listdir(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def limit() -> int:
    """Of a process's memory: ``ROOM`` beside what its imports take."""
    used = 0
    for _ in range(2):  # the files that are new in memory count for the first process
        with cgroup(16 * NBYTES) as folder:
            used = int(run(folder, "-c", IMPORTS, folder))
    return used + ROOM


@pytest.fixture
def limited(limit: int) -> Iterator[Path]:
    with cgroup(limit) as folder:
        yield folder


def run(folder: Path, *command: object) -> str:
    """What it printed, in a process that is in the cgroup from its first page on."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        preexec_fn=lambda: enter(folder),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=900,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_limit_is_one(limited: Path, limit: int) -> None:
    """What has to be killed, is."""
    much = f"print(len(bytearray({limit})))"
    with pytest.raises(AssertionError, match=r"^-9"):
        run(limited, "-c", much)


def test_tensors(tmp_path: Path, limited: Path, tally: Tally) -> None:
    keys = [f"t{number}" for number in range(NBYTES // EACH)]
    entries = [entry_of(key, TensorSpec("uint8", (EACH,), 1)) for key in keys]
    Shards(tmp_path / "given", entries, 5 * EACH, "refuse").write((content(key, 0, EACH).numpy().data for key in keys), None)
    run(limited, "-m", "tiered.cli", "import", tmp_path / "given", tmp_path / "state", "--dram", "64MiB")
    tally.ran()
    run(limited, "-m", "tiered.cli", "export", tmp_path / "state", "--out", tmp_path / "out", "--shard", "200MB")
    tally.ran()
    where = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert sorted(where) == sorted(keys)
    for key in keys:
        with safe_open(tmp_path / "out" / where[key], "pt") as opened:
            assert torch.equal(opened.get_tensor(key), content(key, 0, EACH)), key


TRAINING = """
import sys
import torch
from torch import nn
from tiered import TieredStore, zero

folder, out = sys.argv[1:]
with TieredStore.open(folder, dram="112MiB") as store:
    torch.manual_seed(0)
    with zero.init(store):
        model = nn.Sequential(*(nn.Linear(1536, 1536) for _ in range(24)))
    zero.page(model, store)
    optimizer = zero.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 1536)).square().mean().backward()
        optimizer.step()
    zero.commit(model, optimizer)
    print(sum(store.spec(key).nbytes for key in store))
    zero.export(model, out, shard="100MB")
    store.close()
"""


def test_a_model_with_updates_that_are_pending(tmp_path: Path, limited: Path, limit: int, tally: Tally) -> None:
    """By the model, which applies them, and by the command, which applies them to copies."""
    (tmp_path / "train.py").write_text(TRAINING)
    nbytes = int(run(limited, tmp_path / "train.py", tmp_path / "state", tmp_path / "by model"))
    assert nbytes > 1.4 * limit
    tally.ran()
    run(limited, "-m", "tiered.cli", "export", tmp_path / "state", "--out", tmp_path / "at rest")
    tally.ran()
    run(limited, "-m", "tiered.cli", "verify", tmp_path / "state")
    tally.ran()
    where = json.loads((tmp_path / "by model" / INDEX).read_text())["weight_map"]
    (one,) = (tmp_path / "at rest").glob("*.safetensors")
    with safe_open(one, "pt") as at_rest:
        assert sorted(at_rest.keys()) == sorted(where)
        for key, file in where.items():
            with safe_open(tmp_path / "by model" / file, "pt") as by_model:
                assert torch.equal(by_model.get_tensor(key), at_rest.get_tensor(key)), key
