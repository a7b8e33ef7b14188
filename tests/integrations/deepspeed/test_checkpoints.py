"""Checkpoints of an engine: commits with tags, loaded in the same process, in a new one, and after one was killed."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import programs
from tests.integrations.deepspeed.training import batch, config_for, engine_of, equal, made, plain, train
from tiered import MisuseError, TieredStore, TorchFileError, verify, zero
from tiered.integrations.deepspeed.tags import FILE, LATEST

SCHEDULE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 20, "warmup_num_steps": 4, "warmup_min_ratio": 0.1}}


def uncut(passes: int = 16) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of a training in memory that was never interrupted."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1, fused=True)
    scheduler = zero.WarmupCosineLR(optimizer, **SCHEDULE["params"])  # type: ignore[arg-type]
    return plain(model, optimizer, scheduler, passes=passes), model.state_dict()


def test_it_goes_back_within_a_process(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, scheduler=SCHEDULE)
    seen = train(engine)
    state = {"epoch": 3, "best": 0.5, "of": [1, 2], "tensor": torch.arange(3)}
    assert engine.save_checkpoint(tmp_path / "saved", client_state=state)
    rest = train(engine, 8)
    path, found = engine.load_checkpoint(tmp_path / "saved")
    assert path == str(tmp_path / "saved" / "global_step4")
    assert found is not None
    assert torch.equal(found.pop("tensor"), state.pop("tensor"))
    assert found == state
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (4, 8, 32)
    assert engine.loaded_checkpoint_tag == "global_step4"
    assert train(engine, 8) == rest
    assert seen + rest == uncut()[0]
    assert equal(engine.module_state_dict(), uncut()[1])
    engine.destroy()


@pytest.mark.parametrize("saved_after", [3, 8])
def test_it_goes_on_in_a_new_engine(tmp_path: Path, saved_after: int) -> None:
    """Also from between two passes of a step, whose gradients are saved."""
    engine = engine_of(tmp_path, scheduler=SCHEDULE)
    seen = train(engine, passes=saved_after)
    engine.save_checkpoint(tmp_path / "saved", tag="mine")
    train(engine, saved_after, 4)  # what no checkpoint has is gone
    engine.destroy()
    engine = engine_of(tmp_path, made(seed=5), scheduler=SCHEDULE)
    path, state = engine.load_checkpoint(tmp_path / "saved")
    assert (path, state) == (str(tmp_path / "saved" / "mine"), {})
    assert seen + train(engine, saved_after, 16 - saved_after) == uncut()[0]
    assert equal(engine.module_state_dict(), uncut()[1])
    engine.destroy()


PROGRAM = """
import os, signal, sys
from tests.integrations.deepspeed.test_checkpoints import SCHEDULE
from tests.integrations.deepspeed.training import engine_of, made, train
from pathlib import Path
import warnings

folder, life = Path(sys.argv[1]), int(sys.argv[2])
engine = engine_of(folder, made(seed=life), scheduler=SCHEDULE)
if life:
    path, state = engine.load_checkpoint(folder / "saved")
    assert path is not None
    assert state == {"life": life - 1}
first = engine.micro_steps
seen = train(engine, first, 4)
engine.save_checkpoint(folder / "saved", client_state={"life": life})
with open(folder / f"seen{life}", "w") as file:
    file.write(repr(seen))
if life < 2:
    train(engine, first + 4, 3)
    os.kill(os.getpid(), signal.SIGKILL)
engine.save_16bit_model(folder, "last.bin")
engine.destroy()
"""


def test_it_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    seen: list[float] = []
    for life in range(3):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(life)]
        done = programs.run(command, cwd=programs.ROOT, capture_output=True, text=True)
        assert done.returncode == (-signal.SIGKILL if life < 2 else 0), done.stderr
        seen += eval((tmp_path / f"seen{life}").read_text())
    losses, parameters = uncut(12)
    assert seen == losses
    assert equal(torch.load(tmp_path / "last.bin"), parameters)
    assert not verify(tmp_path / "store").damages


def test_a_commit_stays_as_long_as_the_folder_of_its_tag(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    saved, parameters = tmp_path / "saved", []
    for number in range(5):
        train(engine, 2 * number, 2)
        engine.save_checkpoint(saved, save_latest=number < 4)
        parameters.append(engine.module_state_dict())
    assert len(engine.store.generations) == 5
    assert (saved / LATEST).read_text() == "global_step4"
    shutil.rmtree(saved / "global_step2")
    for tag, number in (("global_step1", 0), ("global_step3", 2), (None, 3)):
        engine.load_checkpoint(saved, tag)
        assert equal(engine.module_state_dict(), parameters[number])
    train(engine, 8, 2)
    engine.save_checkpoint(saved, "another")
    engine.save_checkpoint(saved, "another")  # the first one of this name is not named any more
    engine.save_checkpoint(saved, "last")
    others = [engine.store.commit() for _ in range(4)]  # drop none of those with a tag, and are dropped as keep= says
    assert [one for one in engine.store.generations if one in others] == others[-2:]
    names = ["global_step1", "global_step3", "global_step4", "global_step5", "another", "last"]
    assert {folder.name for folder in saved.iterdir()} == {*names, LATEST}
    assert len(engine.store.generations) == len(names) + 2
    engine.destroy()
    engine = engine_of(tmp_path)
    for tag in names:
        assert engine.load_checkpoint(saved, tag).load_path == str(saved / tag)
    engine.destroy()


def test_parts_of_a_checkpoint(tmp_path: Path) -> None:
    """The optimizer begins anew, or the scheduler stays as it is."""
    engine = engine_of(tmp_path, scheduler=SCHEDULE)
    train(engine)
    engine.save_checkpoint(tmp_path / "saved")
    parameters = engine.module_state_dict()
    rates = engine.get_lr()
    engine.destroy()

    for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
        engine = engine_of(tmp_path, scheduler=SCHEDULE)
        engine.load_checkpoint(tmp_path / "saved", **options)
        assert equal(engine.module_state_dict(), parameters)
        assert engine.optimizer is not None
        assert engine.optimizer.state_dict()["state"] == {}
        assert engine.get_lr() == [0.0]
        assert engine.global_steps == (0 if "load_module_only" in options else 4)
        reference = made()
        reference.load_state_dict(parameters)
        theirs = torch.optim.AdamW(reference.parameters(), 1e-2, weight_decay=0.1, fused=True)
        expected = plain(reference, theirs, zero.WarmupCosineLR(theirs, **SCHEDULE["params"]))  # type: ignore[arg-type]
        assert train(engine) == expected
        engine.destroy()

    engine = engine_of(tmp_path, scheduler=SCHEDULE)
    engine.load_checkpoint(tmp_path / "saved", load_lr_scheduler_states=False)
    assert (engine.get_lr(), engine.lr_scheduler.last_batch_iteration) == ([0.0], -1)
    engine.load_checkpoint(tmp_path / "saved")
    assert (engine.get_lr(), engine.lr_scheduler.last_batch_iteration) == (rates, 3)
    engine.destroy()


def test_where_there_is_none(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    with pytest.warns(UserWarning, match="latest does not exist"):
        assert engine.load_checkpoint(tmp_path / "saved") == (None, None)
    engine.save_checkpoint(tmp_path / "saved")
    with pytest.warns(UserWarning, match="nothing does not exist"):
        assert engine.load_checkpoint(tmp_path / "saved", "nothing") == (None, None)
    engine.destroy()


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    saved = tmp_path / "saved"
    engine.save_checkpoint(saved, "one")
    with pytest.raises(MisuseError, match="custom_load_fn"):
        engine.load_checkpoint(saved, custom_load_fn=print)
    (saved / "theirs").mkdir()
    with pytest.raises(MisuseError, match="did not come to its end"):
        engine.load_checkpoint(saved, "theirs")
    (saved / "theirs" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(TorchFileError, match="no zip archive"):
        engine.load_checkpoint(saved, "theirs")
    found = json.loads((saved / "one" / FILE).read_text())
    for wrong, says in (
        ("{", "damaged"),
        ("[]", "does not say which commit"),
        ({**found, "generations": ["1"]}, "does not say which commit"),
        ({**found, "mark": 3}, "does not say which commit"),
        ({**found, "generations": [1, 1]}, "saved by 2 ranks, and there are 1"),
        ({**found, "generations": [99]}, "names generation 99 of the store"),
        ({**found, "mark": "0" * 32}, "names generation 1 of the store"),
    ):
        (saved / "one" / FILE).write_text(wrong if isinstance(wrong, str) else json.dumps(wrong))
        with pytest.raises(MisuseError, match=says):
            engine.load_checkpoint(saved)
    (saved / "one" / FILE).write_text(json.dumps(found))
    engine.load_checkpoint(saved)
    made = engine.store.generation
    for tag, says in (
        *((tag, "not a name for a folder") for tag in ("a/b", "", ".", "..", LATEST, f"{LATEST}.tmp", "a\0")),
        *((tag, "begins or ends with a space") for tag in (" x", "x ", "x\n", "\t", "\u2003x", "x\x85")),
        ("x" * 300, "has 300 bytes"),
        ("\u00e4" * 128, "has 256 bytes"),
        ("x\udc80", "leave surrogates out"),
    ):
        with pytest.raises(MisuseError, match=says):
            engine.save_checkpoint(saved, tag)
    assert engine.store.generation == made
    for tag in ("two words", "a\nb", "-", "..a", "\u00e4" * 127):  # what a save takes, a load finds
        engine.save_checkpoint(saved, tag)
        assert engine.load_checkpoint(saved).load_path == engine.load_checkpoint(saved, tag).load_path == str(saved / tag)
    with pytest.raises(MisuseError, match="save_dir is empty"):
        engine.save_checkpoint("")
    with pytest.raises(MisuseError, match="client_state"):
        engine.save_checkpoint(saved, client_state={"a": object()})
    engine.destroy()


def test_another_budget_is_named(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    engine = engine_of(tmp_path, tiered={"dram": "3MiB"})
    with pytest.raises(MisuseError, match=r"saved with a budget of .*1048576.* give \"tiered\" the same"):
        engine.load_checkpoint(tmp_path / "saved")
    engine.destroy()


def test_a_budget_that_is_not_said_is_that_of_the_last_checkpoint(tmp_path: Path) -> None:
    config = config_for(tmp_path, zero_optimization={"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}})
    engine, *_ = zero.initialize(model=made(), config=config)
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    del config["tiered"]["dram"]
    engine, *_ = zero.initialize(model=made(), config=config)
    assert engine.store.statistics().tier("dram").capacity == 1 << 20
    assert engine.load_checkpoint(tmp_path / "saved").load_path
    engine.destroy()


def test_random_states_are_restored(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    engine.save_checkpoint(tmp_path / "saved")
    drawn = torch.rand(3)
    engine.load_checkpoint(tmp_path / "saved")
    assert torch.equal(torch.rand(3), drawn)
    engine.destroy()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_the_weights_alone(tmp_path: Path, name: str) -> None:
    engine = engine_of(tmp_path, bf16={"enabled": True})
    train(engine, passes=2)
    assert engine.save_16bit_model(tmp_path / "out", name)
    expected = engine.module_state_dict()
    assert {value.dtype for value in expected.values()} == {torch.bfloat16}
    if name.endswith(".bin"):
        assert equal(torch.load(tmp_path / "out" / name), expected)
        assert engine.save_fp16_model(tmp_path / "out", "again.bin")
        engine.save_16bit_model(tmp_path / "out", "trained.bin", exclude_frozen_parameters=True)
        assert expected.keys() - torch.load(tmp_path / "out" / "trained.bin").keys() == {"body.2.bias"}
    else:
        from safetensors.torch import load_file

        found = load_file(tmp_path / "out" / name)
        assert all(torch.equal(value, expected[key]) for key, value in found.items())
        assert "embed.weight" in found
        with pytest.raises(MisuseError, match="exclude_frozen_parameters"):
            engine.save_16bit_model(tmp_path / "out", name, exclude_frozen_parameters=True)
    other = made(seed=4)
    engine.load_module_state_dict(other.state_dict())
    assert torch.equal(engine.module_state_dict()["embed.weight"], other.embed.weight.detach().bfloat16())
    engine.destroy()


def test_the_store_is_one_of_tiereds(tmp_path: Path) -> None:
    """A checkpoint is a commit that everything else reads."""
    engine = engine_of(tmp_path)
    train(engine, passes=2)
    engine.save_checkpoint(tmp_path / "saved")
    expected = engine.module_state_dict()
    engine.destroy()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        assert store.meta["step"] == 1
        model = zero.page(made(seed=3), store, existing="resume")
        assert equal(dict(model.state_dict()), expected)
        store.close()


def test_a_batch_that_was_seen_is_not_needed(tmp_path: Path) -> None:
    """A new engine may evaluate a checkpoint without a step."""
    engine = engine_of(tmp_path)
    train(engine, passes=4)
    engine.save_checkpoint(tmp_path / "saved")
    with torch.no_grad():
        expected = engine.eval()(batch(0)[0])
    engine.destroy()
    engine = engine_of(tmp_path, made(seed=2))
    engine.load_checkpoint(tmp_path / "saved")
    with torch.no_grad():
        found: Any = engine.eval()(batch(0)[0])
    assert torch.equal(found, expected)
    engine.destroy()
