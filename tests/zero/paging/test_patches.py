"""What paging changes of torch: nothing before the first model is paged, nothing after the last one is gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

PROGRAM = """
import gc
import sys
import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap
import torch.optim.optimizer
import torch.utils._device
import torch.utils._foreach_utils
from torch import nn

MODULES = [m for n, m in sorted(sys.modules.items()) if n.split(".")[0] == "torch" and m is not None]
CLASSES = [torch.Tensor, torch._C.TensorBase, nn.Parameter, nn.Module, torch.UntypedStorage, torch.optim.Optimizer]
CLASSES += [torch._C.ScriptFunction, torch._C.ScriptMethod, torch.autograd.Function]


def state():
    found = {}
    for owner in [*MODULES, *CLASSES]:
        for name, value in list(vars(owner).items()):
            if name in ("__warningregistry__", "__doc__") or type(value).__name__ == "module":
                continue
            found[getattr(owner, "__name__", owner), name] = (id(value), list(value) if type(value) is list else None)
    return found


def different(one, other):
    return sorted(key for key in one.keys() & other.keys() if one[key] != other[key])


torch.jit._builtins._get_builtin_table()
torch.utils._device._device_constructors()
before = state()
from tiered import TieredStore, zero
LISTENS = not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")  # torch 2.6 gives no other way
HOOKS = [("torch._C._autograd", f"_{do}_saved_tensors_default_hooks") for do in ("pop", "push")]


def left():
    return [one for one in different(before, state()) if not (LISTENS and one in HOOKS)]


print("imported:", left())
known = set(torch.jit._builtins._builtin_table)
with TieredStore.open(sys.argv[1], dram="1MiB") as store:
    models = [zero.page(nn.Linear(4, 4), store, name=f"model{i}") for i in range(2)]
    during = state()
    print("paged:", len(different(before, during)))
    models.pop()
    gc.collect()
    print("one gone:", len(different(during, state())))
    assert torch.tensor(models[0].weight).isfinite().all()
    models.clear()
    gc.collect()
    print("gone:", left(), set(torch.jit._builtins._builtin_table) - known)
    again = zero.page(nn.Linear(4, 4), store, name="again")
    assert torch.tensor(again.weight).isfinite().all()
    print("again:", len(different(before, state())))
"""


def test_torch_is_changed_while_a_model_is_paged_and_not_else(tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]  # not forked: what the server imported has imported us
    ended = subprocess.run(program, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    said = dict(line.split(": ") for line in ended.stdout.splitlines())
    listens = [(module, "_engine_run_backward") for module in ("torch.autograd", "torch.autograd.graph")]
    always = [] if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks") else listens  # see docs/limits.md
    assert (said["imported"], said["gone"]) == (f"{always}", f"{always} set()"), said
    assert int(said["paged"]) >= 10, said
    assert (said["one gone"], said["again"]) == ("0", said["paged"]), said
