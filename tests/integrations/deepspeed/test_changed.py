"""Checkpoints of DeepSpeed's with other things in them: those in which little stands for much, and those that are sound.

A pickle says once what it has, and refers to it often. Each of these files has less than 2 MB; written out, it would take
from 8 GB of memory to more than any machine has, or hours.
"""

from __future__ import annotations

import struct
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.deepspeed.shared import BEFORE, CASES, Small, batch, config_of, groups_of, unpacked
from tiered import TorchFileError, zero
from tiered.cli.main import main
from tiered.format.foreign.pickled import unpickled
from tiered.format.foreign.torch_file import TorchFile
from tiered.integrations.deepspeed.importing import SCHEDULED
from tiered.integrations.deepspeed.saved import INERT, SavedCheckpoint, plain

MANY = 20_000
STAND_INS = ("deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.utils.tensor_fragment.fragment_address")
STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"

assert {*STAND_INS, STAGE} <= {*INERT}


@pytest.fixture
def _classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch itself load and save the files, whose classes are those of a DeepSpeed that is not installed."""
    for full in (*STAND_INS, STAGE):
        module, _, name = full.rpartition(".")
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
        made: Any = int if full == STAGE else type(name, (), {"__module__": module})
        monkeypatch.setattr(sys.modules[module], name, made, raising=False)


def changed(folder: Path, change: Callable[[dict[str, Any], list[dict[str, Any]]], None]) -> Path:
    """Change the model's file and the optimizer states of both ranks. Returns the folder of the tag."""
    tag = unpacked("stage2-fp32", folder) / f"global_step{BEFORE}"
    paths = sorted(tag.glob("*.pt"), key=lambda path: "optim" in path.name)
    values = [torch.load(path, weights_only=False) for path in paths]
    change(values[0], [value["optimizer_state_dict"] for value in values[1:]])
    for path, value in zip(paths, values, strict=True):
        torch.save(value, path)
        assert path.stat().st_size < 2_000_000
    return tag


def client_state(model: dict[str, Any], states: list[dict[str, Any]]) -> None:
    tensor = torch.zeros(1 << 16)
    model.update({f"more{number}": [tensor] * 16 for number in range(8000)})


def shapes(model: dict[str, Any], states: list[dict[str, Any]]) -> None:
    model["param_shapes"] = [{f"n{number}": torch.Size([1]) for number in range(MANY)}] * MANY


def settings(model: dict[str, Any], states: list[dict[str, Any]]) -> None:
    model["param_shapes"] += [{}] * MANY
    for state in states:
        groups = state["base_optimizer_state"]["param_groups"]
        groups += [{**groups[0], "more": list(range(MANY))}] * MANY


def slices(model: dict[str, Any], states: list[dict[str, Any]]) -> None:
    model["param_shapes"] = [{f"n{number}": torch.Size([1]) for number in range(MANY)}] + [{}] * MANY
    for state in states:
        address = next(iter(state["param_slice_mappings"][0].values()))
        state["param_slice_mappings"] = [{f"n{number}": address for number in range(MANY)}] * (MANY + 1)
        state["single_partition_of_fp32_groups"] = state["single_partition_of_fp32_groups"][:1] * (MANY + 1)
        state["base_optimizer_state"]["param_groups"] = [{}] * (MANY + 1)


def kept(model: dict[str, Any], states: list[dict[str, Any]]) -> None:
    model["param_shapes"] += [{}] * MANY
    for state in states:
        base = state["base_optimizer_state"]
        many = {f"s{number}": base["state"][0]["exp_avg"] for number in range(MANY)}
        base["state"] = dict.fromkeys(range(MANY + 2), many)
        base["param_groups"] += [{}] * MANY
        state["param_slice_mappings"] += [{}] * MANY
        masters = list(state["single_partition_of_fp32_groups"])
        state["single_partition_of_fp32_groups"] = masters + masters[:1] * MANY


def step(model: dict[str, Any], states: list[dict[str, Any]]) -> None:
    for state in states:
        state["base_optimizer_state"]["state"][0]["step"] = torch.ones(()).expand(1 << 20, 1 << 20)


@pytest.mark.usefixtures("_classes")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (client_state, r"its tensors take 64\.\d MiB, more than 16 times the bytes of the file"),
        (shapes, "one value so often"),
        (settings, "one value so often"),
        (slices, "one value so often"),
        (kept, "one value so often"),
        (step, "a step is a tensor of 1099511627776 elements"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_little_does_not_become_much(
    tmp_path: Path, change: Callable[[dict[str, Any], list[dict[str, Any]]], None], says: str
) -> None:
    tag = changed(tmp_path, change)
    with pytest.raises(TorchFileError, match=says):
        SavedCheckpoint(tag)


@pytest.mark.parametrize(
    "called",
    [
        *(b"ccollections\nOrderedDict\n", b"ccollections\nCounter\n", b"c__builtin__\nset\n", b"cbuiltins\nfrozenset\n"),
        b"c_codecs\nencode\n",
    ],
)
def test_calls_do_not_multiply_what_they_are_given(called: bytes) -> None:
    """200 calls are given the same 20,000 items; one of them may be."""
    item = b"(U\1aK\1t" if b"ollect" in called else b"U\1a"
    given = b"(" + item * MANY + b"l"
    if b"encode" in called:
        given = b"X" + struct.pack("<I", MANY) + b"a" * MANY
    made = b"\x80\2" + given + b"q\0" + b"0(" + (called + b"h\0\x85R") * 200 + b"t."
    with pytest.raises(TorchFileError, match="more than 4 values for each of its bytes"):
        unpickled(made, "a.pt")
    once = b"\x80\2" + given + b"q\0" + b"0(" + called + b"h\0\x85R" + b"t."
    assert len(unpickled(once, "a.pt")) == 1


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "MultiStepLR": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20),
}


@pytest.mark.usefixtures("_classes")
@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_go_on(tmp_path: Path, name: str, imported: bool) -> None:
    """Learning rates are those of the scheduler that was saved, whose state has a Counter, or which reads the param groups."""
    theirs = torch.optim.AdamW([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}], 1e-2)
    scheduler = SCHEDULERS[name](theirs)
    rates = []
    for number in range(8):
        if number == BEFORE:
            state = scheduler.state_dict()
            written = {key: value for key, value in theirs.param_groups[0].items() if key in SCHEDULED}
        theirs.step()
        scheduler.step()
        rates.append(theirs.param_groups[0]["lr"])

    def change(model: dict[str, Any], states: list[dict[str, Any]]) -> None:
        model["lr_scheduler"] = state
        for one in states:
            for group in one["base_optimizer_state"]["param_groups"]:
                group.update({**written, "lr": rates[BEFORE - 1]})

    folder = changed(tmp_path, change).parent
    if imported:
        assert main(["import", str(folder), str(tmp_path / "imported"), "--dram", "1MiB"]) == 0
        folder = tmp_path / "imported"
    case = CASES["stage2-fp32"]
    torch.manual_seed(1)
    model = Small(case.width)
    config = {**config_of(case), "tiered": {"path": str(tmp_path / "store"), "dram": "1MiB"}, "zero_optimization": {"stage": 1}}
    del config["scheduler"]
    engine = zero.initialize(model=model, config=config, model_parameters=groups_of(model), lr_scheduler=SCHEDULERS[name])[0]
    engine.load_checkpoint(folder)
    found = []
    for step in range(BEFORE, 8):
        engine.backward(engine(batch(step, 0)))
        engine.step()
        found.append(engine.get_lr()[0])
    assert found == rates[BEFORE:]
    if name == "MultiStepLR":
        assert isinstance(engine.lr_scheduler.milestones, Counter)
    engine.destroy()


@pytest.mark.usefixtures("_classes")
def test_momentum_of_torch_goes_on(tmp_path: Path) -> None:
    """torch's SGD counts no steps, and writes which of its kernels was chosen."""

    def change(model: dict[str, Any], states: list[dict[str, Any]]) -> None:
        chosen = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "nesterov": False, "maximize": False, "fused": None}
        for one in states:
            base = one["base_optimizer_state"]
            base["state"] = {index: {"momentum_buffer": state["exp_avg"]} for index, state in base["state"].items()}
            for group in base["param_groups"]:
                for key in ("betas", "eps"):
                    del group[key]
                group.update(chosen)

    tag = changed(tmp_path, change)
    case = CASES["stage2-fp32"]
    model = Small(case.width)
    config = {**config_of(case), "tiered": {"path": str(tmp_path / "store"), "dram": "1MiB"}, "zero_optimization": {"stage": 1}}
    del config["optimizer"], config["scheduler"], config["gradient_clipping"]
    own = torch.optim.SGD(groups_of(model), 1.0, momentum=0.5)
    engine = zero.initialize(model=model, config=config, optimizer=own)[0]
    engine.load_checkpoint(tag.parent)
    values = {name: value.clone() for name, value in engine.module_state_dict().items()}
    reference = Small(case.width)
    reference.load_state_dict(values)
    optimizer = torch.optim.SGD(groups_of(reference), 0.1, momentum=0.9, dampening=0.5)
    for group, settings in zip(optimizer.param_groups, engine.optimizer.param_groups, strict=True):
        group["weight_decay"] = settings["weight_decay"]
    with SavedCheckpoint(tag) as saved:
        for name, parameter in reference.named_parameters():
            if parameter.requires_grad:
                buffer = saved.read(name, "momentum_buffer", 0, parameter.numel())
                assert buffer is not None
                optimizer.state[parameter]["momentum_buffer"] = buffer.view_as(parameter).clone()
    for step in range(BEFORE, BEFORE + 3):
        loss, expected = engine(batch(step, 0)), reference(batch(step, 0))
        assert loss.item() == expected.item(), step
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    engine.destroy()


@pytest.mark.usefixtures("_classes")
def test_many_layers_may_share_a_mask(tmp_path: Path) -> None:
    """A small model's buffers may take more than 16 times its file: 40 layers have the same 256 KiB."""

    def change(model: dict[str, Any], states: list[dict[str, Any]]) -> None:
        mask = torch.tril(torch.ones(256, 256))
        names = [f"layers.{number}.mask" for number in range(40)]
        model["module"].update(dict.fromkeys(names, mask) | {"scale": torch.tensor(2.0).expand(64, 64)})
        model["buffer_names"] += [*names, "scale"]

    with SavedCheckpoint(changed(tmp_path, change)) as saved:
        assert torch.equal(saved.buffers["layers.39.mask"], torch.tril(torch.ones(256, 256)))
        assert torch.equal(saved.buffers["scale"], torch.full((64, 64), 2.0))


def test_a_count_of_pythons_is_a_dict(tmp_path: Path) -> None:
    torch.save({"milestones": Counter({2: 1, 4: 3})}, tmp_path / "a.pt")
    with TorchFile(tmp_path / "a.pt") as file:
        assert plain(file.value) == {"milestones": {2: 1, 4: 3}}
