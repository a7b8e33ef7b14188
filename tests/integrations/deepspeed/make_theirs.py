"""Have DeepSpeed write the checkpoints in ``theirs/``, and the losses of its training after them.

    DS_ACCELERATOR=cpu python -m tests.integrations.deepspeed.make_theirs [NAME ...]

It runs with DeepSpeed 0.19.8 in the environment (pip install --no-build-isolation deepspeed==0.19.8 hjson ninja py-cpuinfo
einops msgpack), whose operations are compiled at their first use. On NVMe DeepSpeed puts only what has 1 MiB or more; for a
file that is small enough for a repository the limit is lowered here to 1 KiB. It does not offer fp16 on a CPU; torch has it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NoReturn

from tests.integrations.deepspeed.shared import AFTER, BEFORE, CASES, FOLDER, Small, batch, config_of, groups_of


def train(name: str, out: Path) -> NoReturn:
    """Train on this rank, write a checkpoint, go on, write the losses, and end the process."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.swap_tensor import optimizer_utils

    optimizer_utils.MIN_AIO_BYTES = 1024
    get_accelerator().is_fp16_supported = lambda: True  # torch computes with it on a CPU, which DeepSpeed does not know
    case = CASES[name]
    config = config_of(case, str(out / "nvme"))
    if case.offload == "nvme":
        config["aio"] = {"block_size": 1024}
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = Small(case.width)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=groups_of(model))
    losses = []
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            engine.save_checkpoint(str(out / name), client_state={"epoch": 5, "who": ("a", 1.5)})
        loss = engine(batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, losses[BEFORE:])
    if dist.get_rank() == 0:
        (out / name / "losses.json").write_text(json.dumps(found))
    leave()


def leave() -> NoReturn:
    """End this process of DeepSpeed's, whose files are written. An interpreter that ends by itself now and then aborts
    ("terminate called without an active exception"): process groups are left, whose threads run when they are destroyed."""
    import torch.distributed as dist

    dist.barrier()
    os._exit(0)


def pack(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        (out / "nvme").mkdir()
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={CASES[name].ranks}"]
        subprocess.run([*launch, "-m", "tests.integrations.deepspeed.make_theirs", "--train", name, folder], check=True)
        for script in out.rglob("zero_to_*.py"):
            script.unlink()
        with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(out / name, name)
        shutil.rmtree(out / name)
    print(name, os.path.getsize(FOLDER / f"{name}.tar.xz"), "bytes", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], Path(sys.argv[3]))
    else:
        FOLDER.mkdir(exist_ok=True)
        for chosen in sys.argv[1:] or CASES:
            pack(chosen)
