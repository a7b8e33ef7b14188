"""Checkpoints that DeepSpeed 0.19.8 wrote (``make_theirs.py``), read into engines and stores that go on training."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.format.test_torch_file import rewritten
from tests.integrations.deepspeed.shared import AFTER, BEFORE, CASES, Case, Small, batch, config_of, groups_of, unpacked
from tests.versions import NO_DIST
from tiered import MisuseError, TieredStore, TorchFileError, zero
from tiered.cli.main import main
from tiered.integrations.deepspeed.saved import SavedCheckpoint, tag_of

ROUNDING = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-3}
"""By how much losses may differ: of fp32 a few last bits, of narrow types one rounding of the loss's logits."""


def engine_of(case: Case, store: Path, seed: int = 7, **more: Any) -> zero.Engine:
    """An engine of one process, for which each pass is what was a rank of DeepSpeed's."""
    torch.manual_seed(seed)
    model = Small(case.width)
    config = {
        **config_of(case),
        "gradient_accumulation_steps": case.ranks,
        "tiered": {"path": str(store), "dram": "1MiB"},
        **more,
    }
    config["zero_optimization"] = {"stage": 1}
    return zero.initialize(model=model, config=config, model_parameters=groups_of(model))[0]


def losses_of(engine: zero.Engine, case: Case, steps: int = AFTER) -> list[list[float]]:
    """Train on, and return the losses of each rank."""
    found: list[list[float]] = [[] for _ in range(case.ranks)]
    for step in range(BEFORE, BEFORE + steps):
        for rank in range(case.ranks):
            loss = engine(batch(step, rank))
            engine.backward(loss)
            engine.step()
            found[rank].append(loss.item())
    return found


def close(found: list[list[float]], expected: list[list[float]], within: float) -> bool:
    return all(
        math.isclose(one, other, rel_tol=within)
        for mine, theirs in zip(found, expected, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From the folder itself, and from a store that ``tiered import`` made of it: both as DeepSpeed went on, to rounding."""
    case, theirs = CASES[name], unpacked(name, tmp_path)
    expected = json.loads((theirs / "losses.json").read_text())
    engine = engine_of(case, tmp_path / "store")
    path, client_state = engine.load_checkpoint(theirs)
    assert path == str(theirs / f"global_step{BEFORE}")
    assert client_state == {"epoch": 5, "who": ("a", 1.5)}
    assert (engine.global_steps, engine.skipped_steps) == (BEFORE, 0)
    if case.dtype == "fp16":
        assert engine.loss_scale() == 64
    lr = engine.get_lr()
    found = losses_of(engine, case)
    assert close(found, expected, ROUNDING[case.dtype]), (found, expected)
    engine.save_checkpoint(tmp_path / "ours")
    engine.destroy()
    if name in ("stage2-fp32", "stage3-bf16", "stage2-adagrad"):
        assert main(["import", str(theirs), str(tmp_path / "imported"), "--dram", "1MiB"]) == 0
        assert f"of step {BEFORE} (ZeRO stage {case.stage}, {case.ranks} ranks)" in capfd.readouterr().out
        engine = engine_of(case, tmp_path / "again", seed=3)
        assert engine.load_checkpoint(tmp_path / "imported")[1] == client_state
        assert engine.get_lr() == lr
        assert losses_of(engine, case) == found
        engine.destroy()


def test_a_checkpoint_of_ours_follows(tmp_path: Path) -> None:
    """What was loaded is durable after ``save_checkpoint``, and goes on bit for bit in a new engine."""
    case, theirs = CASES["stage3-nvme"], unpacked("stage3-nvme", tmp_path)
    assert list(theirs.glob("*/offloaded_tensors/rank01/exp_avg-*.swp"))  # what it is about
    engine = engine_of(case, tmp_path / "store")
    engine.load_checkpoint(theirs)
    engine.save_checkpoint(tmp_path / "ours")
    found = losses_of(engine, case, 2)
    engine.destroy()
    engine = engine_of(case, tmp_path / "store", seed=1)
    engine.load_checkpoint(tmp_path / "ours")
    assert losses_of(engine, case, 2) == found
    engine.destroy()


def test_a_loop_of_ones_own_goes_on_from_an_import(tmp_path: Path) -> None:
    """``zero.page(source=)`` and ``zero.resume``: parameters, moments and counts are those of the files, bit for bit."""
    theirs = unpacked("stage2-fp32", tmp_path)
    assert main(["import", str(theirs), str(tmp_path / "imported"), "--dram", "1MiB"]) == 0
    with TieredStore.open(None, dram="1MiB") as store:
        model = zero.page(Small(6), store, existing="resume", source=tmp_path / "imported")
        optimizer = zero.AdamW(groups_of(model))
        extra = zero.resume(model, optimizer)
        assert extra["client_state"] == {"epoch": 5, "who": ("a", 1.5)}
        assert extra["lr_scheduler"] == {"last_batch_iteration": BEFORE - 1}
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        state = optimizer.state_dict()["state"]
        names = [name for group in optimizer.param_groups for name in _names(model, group["params"])]
        with SavedCheckpoint(theirs / f"global_step{BEFORE}") as saved:
            assert saved.aliases == {"head.weight": "embed.weight"}
            for name, parameter in model.named_parameters():
                assert torch.equal(_read(saved, name, "param"), parameter.detach().clone())
            for index, name in enumerate(names):
                assert state[index]["step"] == BEFORE
                for kind in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(_read(saved, name, kind), state[index][kind])
        assert torch.equal(model.seen, torch.full((3,), float(BEFORE)))


def _names(model: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> list[str]:
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [known[id(parameter)] for parameter in parameters]


def _read(saved: SavedCheckpoint, name: str, state: str) -> torch.Tensor:
    shape = saved.parameters[name].shape
    found = saved.read(name, state, 0, math.prod(shape))
    assert found is not None
    return found.view(shape)


@pytest.mark.parametrize("option", ["load_module_only", "load_optimizer_states"])
def test_the_parameters_alone(tmp_path: Path, option: str) -> None:
    """The optimizer begins anew: its first steps are those of one that was made for these parameters."""
    case, theirs = CASES["stage3-fp32"], unpacked("stage3-fp32", tmp_path)
    engine = engine_of(case, tmp_path / "store")
    losses_of(engine, case, 2)  # states that must not stay
    engine.load_checkpoint(theirs, **{option: option == "load_module_only"})
    values = engine.module_state_dict()
    assert engine.global_steps == (2 if option == "load_module_only" else BEFORE)
    assert not engine.optimizer.state_dict()["state"]
    with SavedCheckpoint(theirs / f"global_step{BEFORE}") as saved:
        assert all(torch.equal(_read(saved, name, "param"), values[name]) for name in saved.parameters)
    engine.destroy()


def test_other_models_are_refused(tmp_path: Path) -> None:
    theirs = unpacked("stage2-fp32", tmp_path)
    wide = Case(2, width=12)
    engine = engine_of(wide, tmp_path / "store")
    with pytest.raises(MisuseError, match=r"'embed.weight' of shape \(11, 6\), and this model of \(11, 12\)"):
        engine.load_checkpoint(theirs)
    assert losses_of(engine, wide, 1)  # nothing was changed
    engine.destroy()
    case = CASES["stage2-fp32"]
    engine = engine_of(case, tmp_path / "other", optimizer={"type": "Lion", "params": {"lr": 1e-3}})
    with pytest.raises(MisuseError, match=r"has 'exp_avg_sq' of 'embed\.weight', which no LionRule keeps"):
        engine.load_checkpoint(theirs)
    engine.load_checkpoint(theirs, load_optimizer_states=False)
    assert losses_of(engine, case, 2)
    engine.destroy()
    engine = engine_of(case, tmp_path / "third", optimizer={"type": "RMSprop", "params": {"lr": 1e-3}})
    with pytest.raises(MisuseError, match=r"has no 'square_avg' of 'embed\.weight', which RMSpropRule keeps"):
        engine.load_checkpoint(theirs)
    engine.destroy()


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    theirs = unpacked("stage3-bf16", tmp_path)
    tag = theirs / f"global_step{BEFORE}"
    lost = tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    lost.unlink()
    with pytest.raises(TorchFileError, match="saved by 3 ranks, and has the optimizer states of 2: 0, 2"):
        SavedCheckpoint(tag)


def changed(theirs: Path, change: Callable[[bytes], bytes]) -> Path:
    """Change the pickle of each file of a checkpoint, and return the folder of its tag."""
    tag = theirs / f"global_step{BEFORE}"
    for path in list(tag.glob("*.pt")):
        with zipfile.ZipFile(path) as archive:
            pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
        rewritten(path, tag / "changed", entries={"data.pkl": change(pickled)}).replace(path)
    return tag


@pytest.mark.parametrize("name", ["../../../own", "/tmp/tiered-x", "global/../..", "embed\0weight"])
def test_names_that_lead_out_of_a_folder(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Such names of parameters are only text in a store; no export makes them paths."""
    assert len(name) in (12, 13)
    theirs, stored = unpacked("stage2-fp32", tmp_path), str(tmp_path / "imported")
    other = b"X" + len(name).to_bytes(4, "little") + name.encode()
    changed(theirs, lambda data: data.replace(b"X\x0c\0\0\0embed.weight", other))
    assert main(["import", str(theirs), stored, "--dram", "1MiB"]) == 0
    there = {path for path in tmp_path.rglob("*") if "imported" not in path.parts}
    assert main(["export", stored, "--out", str(tmp_path / "a" / "b"), "--format", "deepspeed-universal"]) == 1
    assert "is no name for a folder" in capfd.readouterr().err
    assert {path for path in tmp_path.rglob("*") if "imported" not in path.parts} <= {*there, tmp_path / "a"}
    assert not Path("/tmp/tiered-x").exists()


def test_counts_and_pipes_take_neither_memory_nor_time(tmp_path: Path) -> None:
    theirs = unpacked("stage2-fp32", tmp_path)
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    os.mkfifo(pipes / "latest")
    engine = engine_of(CASES["stage2-fp32"], tmp_path / "store")
    with pytest.raises(MisuseError, match="latest is not a regular file"):
        engine.load_checkpoint(pipes)
    (pipes / "latest").unlink()
    (pipes / "latest").symlink_to("/dev/zero")
    with pytest.raises(MisuseError, match="latest is not a regular file"):
        tag_of(pipes)
    (pipes / "latest").unlink()
    (pipes / "latest").write_bytes(bytes(2 << 20))
    with pytest.raises(MisuseError, match="more than 1,048,576 bytes"):
        engine.load_checkpoint(pipes)
    engine.destroy()

    def many_ranks(data: bytes) -> bytes:
        at = data.find(b"partition_count")
        return data if at < 0 else data[:at] + data[at:].replace(b"K\x02", b"J\xff\xff\xff\x7f", 2)

    with pytest.raises(TorchFileError, match="was saved by 2147483647 ranks, and has the optimizer states of 2: 0, 1"):
        SavedCheckpoint(changed(theirs, many_ranks))


@pytest.mark.parametrize("kind", ["buffers", "parameters"])
def test_a_small_file_does_not_write_much(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """2,000 tensors in the same MiB would be 2 GiB."""
    theirs, names = unpacked("stage2-fp32", tmp_path), [f"more.{number}" for number in range(2000)]
    path = theirs / f"global_step{BEFORE}" / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=True)
    zeros = torch.zeros(1 << 18)
    for name in names:
        model["module"][name] = zeros[:]
    if kind == "buffers":
        model["buffer_names"] += names
    torch.save(model, path)
    stored = tmp_path / "imported"
    assert main(["import", str(theirs), str(stored), "--dram", "8MiB"]) == 1
    assert re.search(r"take 2\.0 GiB, which is more than 16 times the \S+ MiB of its files", capfd.readouterr().err)
    assert not stored.exists() or sum(file.stat().st_blocks for file in stored.rglob("*")) * 512 < 1 << 20


def test_moments_that_are_integers(tmp_path: Path) -> None:
    theirs = unpacked("stage2-fp32", tmp_path)
    tag = changed(theirs, lambda data: data.replace(b"ctorch\nFloatStorage\n", b"ctorch\nIntStorage\n"))
    with pytest.raises(TorchFileError, match="not of floating point"):
        SavedCheckpoint(tag)


@pytest.mark.parametrize("wrong", [b"G" + struct.pack(">d", math.nan), b"X\1\0\0\0a", b"N"], ids=["nan", "text", "none"])
def test_settings_that_are_no_numbers(tmp_path: Path, wrong: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    theirs = unpacked("stage2-fp32", tmp_path)
    changed(theirs, lambda data: data.replace(b"G" + struct.pack(">d", 0.95), wrong))
    assert main(["import", str(theirs), str(tmp_path / "imported"), "--dram", "1MiB"]) == 1
    assert "for the setting 'betas' of a param group" in capfd.readouterr().err
    engine = engine_of(CASES["stage2-fp32"], tmp_path / "store")
    with pytest.raises(TorchFileError, match="for the setting 'betas' of a param group"):
        engine.load_checkpoint(theirs)
    engine.destroy()


# -- exports ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a bf16 model that was trained for some steps; its last update is pending."""
    folder = tmp_path_factory.mktemp("exports") / "store"
    case = Case(1, "bf16", ranks=1, width=12)
    engine = engine_of(case, folder)
    losses_of(engine, case, 3)
    engine.save_checkpoint(folder.parent / "saved", client_state={"epoch": 2})
    torch.save(
        {"model": engine.module_state_dict(), "optimizer": engine.optimizer.state_dict(), "names": _groups(engine)},
        folder.parent / "expected.pt",
    )
    engine.destroy()
    return folder


def _groups(engine: zero.Engine) -> list[str]:
    return [name for group in engine.optimizer.param_groups for name in _names(engine.module, group["params"])]


def expected_of(trained: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    found = torch.load(trained.parent / "expected.pt", weights_only=False)
    states = {found["names"][index]: state for index, state in found["optimizer"]["state"].items()}
    return found["model"], states


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_what_is_exported_for_it(trained: Path, tmp_path: Path) -> None:
    assert main(["export", str(trained), "--out", str(tmp_path / "dcp"), "--format", "torch-dcp"]) == 0
    values, states = expected_of(trained)
    del values["head.weight"]  # the embedding's second name
    wanted: dict[str, Any] = {
        "model": {name: torch.zeros_like(value) for name, value in values.items()},
        "optimizer": {
            "state": {
                name: {key: torch.zeros_like(torch.as_tensor(value)).float() for key, value in state.items()}
                for name, state in states.items()
            },
            "param_groups": [{"lr": 0.0, "weight_decay": 1.0, "params": []} for _ in range(2)],
        },
    }
    dcp.load(wanted, checkpoint_id=tmp_path / "dcp", **NO_DIST)
    assert all(torch.equal(wanted["model"][name], value) for name, value in values.items())
    assert len(states) == 10
    for name, state in states.items():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "master"}
        for key, value in state.items():
            assert torch.equal(wanted["optimizer"]["state"][name][key], torch.as_tensor(value)), (name, key)
    assert [group["weight_decay"] for group in wanted["optimizer"]["param_groups"]] == [0.1, 0.0]


def test_safetensors_reads_what_is_exported_for_it(trained: Path, tmp_path: Path) -> None:
    assert main(["export", str(trained), "--out", str(tmp_path / "out"), "--format", "safetensors"]) == 0
    values, _ = expected_of(trained)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == values.keys() - {"head.weight"}
    assert all(torch.equal(value, values[name]) for name, value in found.items())


def test_the_universal_files(trained: Path, tmp_path: Path) -> None:
    """As torch reads them; test_real.py has DeepSpeed read them."""
    assert main(["export", str(trained), "--out", str(tmp_path / "uni"), "--format", "deepspeed-universal"]) == 0
    _, states = expected_of(trained)
    tag = (tmp_path / "uni" / "latest_universal").read_text()
    assert tag == "global_step3"
    for name, state in states.items():
        for file, key in (("fp32", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            found = torch.load(tmp_path / "uni" / tag / "zero" / name / f"{file}.pt", weights_only=True)["param"]
            assert torch.equal(found, state[key])
        assert torch.load(tmp_path / "uni" / tag / "zero" / name / "step.pt", weights_only=True) == 3
    model = torch.load(tmp_path / "uni" / tag / "mp_rank_00_model_states.pt", weights_only=True)
    assert (model["epoch"], model["global_steps"], model["lr_scheduler"]["last_batch_iteration"]) == (2, 3, 2)


def test_what_cannot_be_exported(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for arguments, says in (
        (["--out", str(tmp_path / "taken"), "--format", "torch-dcp"], "is there already"),
        (["--out", str(tmp_path / "a"), "--format", "torch-dcp", "--dtype", "float16"], "are for safetensors"),
        (["--out", str(tmp_path / "a"), "--format", "deepspeed-universal", "--model", "other"], "other"),
    ):
        try:
            code = main(["export", str(trained), *arguments])
        except SystemExit as ended:
            code = ended.code
        assert code
        assert says in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
