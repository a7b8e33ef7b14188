"""DeepSpeed itself reads what is exported for it, and writes what is imported, on two ranks.

These tests run where ``TIERED_DEEPSPEED`` names a Python that has DeepSpeed 0.19.8 (``make_theirs.py`` says how to install it):

    TIERED_DEEPSPEED=/path/to/python pytest -m soak tests/integrations/deepspeed/test_real.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.deepspeed.shared import BEFORE, CASES, unpacked
from tests.integrations.deepspeed.test_theirs import ROUNDING, close, engine_of, losses_of
from tiered.cli.main import main

PYTHON = os.environ.get("TIERED_DEEPSPEED", "")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not PYTHON, reason="TIERED_DEEPSPEED names no Python that has DeepSpeed 0.19.8"),
]
ROOT = Path(__file__).parents[3]

READS = """
import json, sys, os, torch, deepspeed, torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.integrations.deepspeed.make_theirs import leave
from tests.integrations.deepspeed.shared import AFTER, BEFORE, CASES, Small, batch, config_of, groups_of
name, folder, stage, out = sys.argv[1:5]
case = CASES[name]
config = {**config_of(case), "checkpoint": {"load_universal": True}}
config["zero_optimization"] = {"stage": int(stage)}
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = Small(case.width)
groups = [{"params": [p for group in groups_of(model) for p in group["params"]]}] if stage == "3" else groups_of(model)
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=groups)
path, client_state = engine.load_checkpoint(folder)
found = {}
for key, parameter in model.named_parameters():
    if parameter.requires_grad:
        found[key, "fp32"] = safe_get_full_fp32_param(parameter).clone()
        for state in ("exp_avg", "exp_avg_sq"):
            found[key, state] = safe_get_full_optimizer_state(parameter, state).clone()
losses = []
for step in range(BEFORE, BEFORE + AFTER):
    loss = engine(batch(step, dist.get_rank()))
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
every = [None] * dist.get_world_size()
dist.all_gather_object(every, losses)
if dist.get_rank() == 0:
    torch.save({"tensors": found, "steps": engine.global_steps, "epoch": client_state["epoch"], "losses": every}, out)
leave()
"""


def by_deepspeed(tmp_path: Path, *arguments: object, ranks: int = 2) -> None:
    """Run the program above by DeepSpeed's Python on several ranks."""
    program = tmp_path / "reads.py"
    program.write_text(READS)
    launch = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(program)]
    where = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([*launch, *map(str, arguments)], env=where, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["stage2-fp32", "stage3-nvme"])
def test_deepspeed_reads_a_universal_export(name: str, stage: int, tmp_path: Path) -> None:
    """From DeepSpeed into a store, out as a universal checkpoint, and back into DeepSpeed: masters and moments are those of the
    store bit for bit, and training goes on as it went on in DeepSpeed. (Stage 3 of DeepSpeed 0.19.8 gives all param groups the
    settings of the first; its losses are compared for one step.)"""
    theirs = unpacked(name, tmp_path)
    imported, universal = tmp_path / "imported", tmp_path / "universal"
    assert main(["import", str(theirs), str(imported), "--dram", "1MiB"]) == 0
    assert main(["export", str(imported), "--out", str(universal), "--format", "deepspeed-universal"]) == 0
    by_deepspeed(tmp_path, name, universal, stage, tmp_path / "found.pt")
    found: dict[str, Any] = torch.load(tmp_path / "found.pt", weights_only=False)
    inside = universal / f"global_step{BEFORE}" / "zero"
    assert len(found["tensors"]) >= 18
    for (key, state), value in found["tensors"].items():
        expected = torch.load(inside / key / f"{state}.pt", weights_only=True)["param"]
        assert torch.equal(value.view(expected.shape), expected), (key, state)
    assert (found["epoch"], found["steps"]) == (5, BEFORE + len(found["losses"][0]))
    expected_losses = json.loads((theirs / "losses.json").read_text())
    compared = 1 if stage == 3 else len(expected_losses[0])
    assert close(*([rank[:compared] for rank in losses] for losses in (found["losses"], expected_losses)), within=1e-6)


@pytest.mark.parametrize("name", ["stage2-fp32", "stage3-fp32", "stage3-nvme"])
def test_what_deepspeed_writes_now(name: str, tmp_path: Path) -> None:
    """A checkpoint that DeepSpeed writes in this test, on NVMe with its own limit of 1 MiB lowered."""
    made = "import sys; from pathlib import Path; from tests.integrations.deepspeed.make_theirs import train; "
    made += f"Path({str(tmp_path / 'nvme')!r}).mkdir(exist_ok=True); train({name!r}, Path({str(tmp_path)!r}))"
    (tmp_path / "makes.py").write_text(made)
    launch = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "makes.py")]
    where = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(launch, env=where, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    engine = engine_of(CASES[name], tmp_path / "store")
    engine.load_checkpoint(tmp_path / name)
    found = losses_of(engine, CASES[name])
    assert close(found, json.loads((tmp_path / name / "losses.json").read_text()), ROUNDING["fp32"])
    engine.destroy()
