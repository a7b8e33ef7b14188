"""A device of torch's that is none: its memory is the host's. Unlike HBM's stand-in, ``device="cpu"``, torch itself takes it
for another device: operands that lie apart raise, and backward runs in the device's own thread. ``device.cpp`` is built on
demand. Where ``TIERED_TEST_DEVICE`` names a CUDA device, that one is taken.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils import cpp_extension

from tiered.tiers import hbm

__all__ = ["NAME", "REAL", "UNUSABLE", "installed"]

REAL = os.environ.get("TIERED_TEST_DEVICE", "").startswith("cuda")
NAME = "cuda" if REAL else "hpu"
HERE = Path(__file__).parent




def _unusable() -> str | None:
    if torch.version.cuda is not None:
        return "torch that is built for CUDA takes no second kind of device"
    known = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    return None if known else "the fake device is written for the C++ of torch 2.13"


UNUSABLE = None if REAL else _unusable()
"""Why there can be no such device here; None where there can."""


@functools.cache
def built() -> ModuleType | str:
    """Build and load it. What a compiler says where it cannot."""
    assert not REAL, "nothing is built for a CUDA device"
    if UNUSABLE:
        return UNUSABLE
    source = HERE / "device.cpp"
    stamp = hashlib.sha256(source.read_bytes() + torch.__version__.encode() + sysconfig.get_config_var("SOABI").encode())
    target = HERE.parents[1] / "build" / f"fake_device-{stamp.hexdigest()[:16]}" / "_fake_device.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
        made = target.with_suffix(f".{os.getpid()}")
        command = ["g++", "-O0", "-fPIC", "-shared", "-std=c++20", "-w", *(f"-I{one}" for one in includes), str(source)]
        libraries = [*(f"-L{one}" for one in cpp_extension.library_paths()), "-ltorch_cpu", "-ltorch_python", "-lc10"]
        ended = subprocess.run([*command, "-o", str(made), *libraries], capture_output=True, text=True)
        if ended.returncode:
            return ended.stderr
        made.replace(target)
    spec = importlib.util.spec_from_file_location("_fake_device", target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch._register_device_module(NAME, _Module(f"torch.{NAME}"))
    return module


class _Module(ModuleType):
    """What torch looks for in ``torch.cuda`` where a device is CUDA. Random numbers are the CPU's."""

    Stream, Event = torch.Stream, torch.Event  # torch.compile looks for them

    def _lazy_init(self) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def device(self, index: object) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


def installed(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Until the end of the test ``TieredStore.open(device=NAME)`` keeps its HBM there."""
    if REAL:
        return torch.device(NAME, 0)
    module, here = built(), torch.device(NAME, 0)
    if UNUSABLE:
        pytest.skip(UNUSABLE)
    if isinstance(module, str):
        pytest.fail(f"the fake device cannot be built:\n{module[:2000]}", pytrace=False)
    device, allocate = hbm._device, hbm._allocate

    def found(name: str) -> torch.device:
        return here if name == NAME else device(name)

    def allocated(nbytes: int, where: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=where) if where == here else allocate(nbytes, where)

    def view(arena: torch.Tensor, offset: int, nbytes: int) -> tuple[torch.Tensor, object]:
        owner = _Owner(arena)
        return module.over(arena.data_ptr() + offset, nbytes, owner), owner

    monkeypatch.setattr(hbm, "_device", found)
    monkeypatch.setattr(hbm, "_allocate", allocated)
    monkeypatch.setattr(hbm, "_device_view", view)
    return here


class _Owner:
    """Of one slot, for as long as a tensor is on it."""

    def __init__(self, arena: torch.Tensor) -> None:
        self.arena = arena
