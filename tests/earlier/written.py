"""What commit a6e6406 wrote, one folder of each kind, and how it was written.

    PYTHONPATH=CHECKOUT python tests/earlier/written.py     CHECKOUT: of a6e6406, with its extensions; needs transformers

Each archive has a folder with what that commit wrote, and ``expected.pt``: the values that it read back itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

FOLDER = Path(__file__).parent / "a6e6406"
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}
PROMPT = [1, 17, 42, 9]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        made: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return made


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def small(dtype: torch.dtype = torch.float32) -> Small:
    model = Small().to(dtype)
    for number, parameter in enumerate(model.parameters()):
        parameter.data.copy_(drawn(tuple(parameter.shape), number) - 0.5)
    return model


def step_of(model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    x = drawn((4, 16), 100 + number, next(model.parameters()).dtype)
    model(x).square().mean().backward()
    optimizer.step()


def tensors() -> dict[str, torch.Tensor]:
    """What the plain store has."""
    dtypes = torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool
    made = {f"of {dtype}": (drawn((3, 1000), 7) * 100).to(dtype) for dtype in dtypes}
    both = torch.complex(drawn((5,), 1), drawn((5,), 2))
    return {**made, "empty": torch.zeros(0, 4), "one": torch.tensor(2.5), "complex": both}


def striped() -> torch.Tensor:
    """65 MiB: larger than what stays on one drive."""
    return (torch.arange(65 << 20, dtype=torch.int32) % 251).to(torch.uint8)


def rows() -> torch.Tensor:
    return drawn((500, 8), 3)


def names() -> dict[str, torch.Tensor]:
    return {f"name {number}": torch.full((number % 7,), float(number)) for number in range(50)}


def _store(folder: Path) -> object:
    from tiered import TieredStore

    with TieredStore.open(folder / "store", dram="1MiB") as store:
        for name, tensor in tensors().items():
            store.put(name, tensor)
        store.commit(meta={"step": 7})
    return None


def _drives(folder: Path) -> object:
    from tiered import TieredStore

    drives = [folder / name for name in ("a", "b")]
    for drive in drives:
        drive.mkdir()
    with TieredStore.open(folder / "store", paths=drives, dram="80MiB") as store:
        store.put("striped", striped())
        store.put("whole", rows())
        store.commit()
    return None


def _rows(folder: Path) -> object:
    from tiered import TieredStore

    with TieredStore.open(folder / "store", dram="1MiB") as store:
        table = store.table("rows", 500, 8)
        table.update(torch.arange(500), rows())
        store.small("names").update(names())
        store.commit()
    return None


def _trained(folder: Path, dtype: torch.dtype, pending: bool) -> object:
    from tiered import TieredStore, zero

    with TieredStore.open(folder / "going-on", dram="1MiB") as store:
        model = zero.page(small(dtype), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for number in range(3):
            step_of(model, optimizer, number)
            scheduler.step()
        if not pending:
            optimizer.zero_grad()
            model.state_dict()
        data = torch.Generator().manual_seed(5)
        zero.commit(model, optimizer, scheduler=scheduler, data=data, extra={"epoch": 3, "name": ("a", 1.5)})
        shutil.copytree(folder / "going-on", folder / "store")
        # What follows applies what is pending, and is committed at the end of the block.
        found = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    shutil.rmtree(folder / "going-on")
    return found


def _resident(folder: Path) -> object:
    from tiered import TieredStore, zero

    model = small()
    with TieredStore.open(folder / "store", dram="1MiB") as store:
        optimizer = zero.AdamW(model.parameters(), lr=1e-2, store=store)
        for number in range(3):
            step_of(model, optimizer, number)
        store.commit()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _codes(folder: Path) -> object:
    from tiered import TieredStore, zero

    with TieredStore.open(folder / "store", dram="1MiB") as store:
        model = zero.page(small(), store)
        optimizer = zero.AdamW8bit(model.parameters(), lr=1e-2)
        for number in range(3):
            step_of(model, optimizer, number)
        model.state_dict()
        zero.commit(model, optimizer)
        return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


def _ranks(folder: Path) -> object:
    """Two processes of torchrun, which run this file again."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*launch, __file__, "rank", str(folder)], check=True)
    return torch.load(folder / "rank-0.pt", weights_only=True)


def _rank(folder: Path) -> None:
    import torch.distributed as dist

    from tiered import zero

    dist.init_process_group("gloo")
    with zero.open_store(folder / "many", dram="1MiB") as store:
        model = zero.page(small(), store, stage=zero.Stage3())
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        for number in range(3):
            step_of(model, optimizer, number)
        values = dict(model.state_dict())
        zero.commit(model, optimizer)
        if dist.get_rank() == 0:
            torch.save({"model": values}, folder / "rank-0.pt")
        dist.barrier()
    dist.destroy_process_group()


def _llama(folder: Path, **options: Any) -> object:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tiered import TieredStore
    from tiered.integrations.transformers import import_model, open_model

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **LLAMA))
    for number, parameter in enumerate(model.parameters()):
        parameter.data.copy_((drawn(tuple(parameter.shape), number) - 0.5) / 4)
    with tempfile.TemporaryDirectory() as source:
        model.save_pretrained(source)
        with TieredStore.open(folder / "store", dram="4MiB") as store:
            import_model(source, store, **options)
    with TieredStore.open(folder / "store", dram="4MiB", access="read") as store:
        opened = open_model(store)
        tokens = opened.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    return {"model": {} if options else model.state_dict(), "tokens": tokens}


KINDS: dict[str, Callable[[Path], object]] = {
    "store": _store,
    "drives": _drives,
    "rows": _rows,
    "adamw": lambda folder: _trained(folder, torch.float32, False),
    "pending": lambda folder: _trained(folder, torch.float32, True),
    "bf16": lambda folder: _trained(folder, torch.bfloat16, False),
    "resident": _resident,
    "codes": _codes,
    "ranks": _ranks,
    "llama": _llama,
    "llama-int8": lambda folder: _llama(folder, quantize="int8"),
}


def unpacked(kind: str, folder: Path) -> Path:
    """Unpack what was written of a kind, and return the folder that has it."""
    with tarfile.open(FOLDER / f"{kind}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / kind


def write(kind: str) -> None:
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above) / kind
        folder.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is not committed any more
            expected = KINDS[kind](folder)
        if expected is not None:
            torch.save(expected, folder / "expected.pt")
        with tarfile.open(FOLDER / f"{kind}.tar.xz", "w:xz") as archive:
            archive.add(folder, kind)
    print(kind, os.path.getsize(FOLDER / f"{kind}.tar.xz"), "bytes", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        _rank(Path(sys.argv[2]))
    else:
        FOLDER.mkdir(exist_ok=True)
        for chosen in sys.argv[1:] or KINDS:
            write(chosen)
