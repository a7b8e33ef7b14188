"""What an earlier commit wrote opens, has its bits, trains on and is exported."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.train.trainings import tiered
from tests.earlier.written import KINDS, PROMPT, Small, names, rows, small, step_of, striped, tensors, unpacked
from tests.zero.ranks import on_ranks
from tiered import MisuseError, TieredStore, verify, zero
from tiered.integrations.transformers import open_model


def same(found: Any, expected: Any) -> bool:
    """Return whether two states have the same bits, keys and numbers."""
    if isinstance(expected, torch.Tensor):
        return found.dtype is expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def expected_of(folder: Path) -> Any:
    return torch.load(folder / "expected.pt", weights_only=True)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """What ``tiered export`` writes of the store in ``folder``."""
    out = folder / "out"
    done = tiered("export", str(folder / "store"), "--out", str(out), cwd=folder)
    assert done.returncode == 0, done.stderr
    return {name: tensor for file in sorted(out.glob("*.safetensors")) for name, tensor in read(file).items()}


def read(file: Path) -> dict[str, torch.Tensor]:
    safetensors = pytest.importorskip("safetensors.torch")
    found: dict[str, torch.Tensor] = safetensors.load_file(file)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_is_verified(kind: str, tmp_path: Path) -> None:
    folder = unpacked(kind, tmp_path)
    stores = sorted((folder / "many").iterdir()) if kind == "ranks" else [folder / "store"]
    for store in stores:
        found = verify(store, paths=[folder / "a", folder / "b"]) if kind == "drives" else verify(store)
        assert not found.damages, found


def test_tensors_and_meta(tmp_path: Path) -> None:
    with TieredStore.open(unpacked("store", tmp_path) / "store", dram="1MiB", existing="must") as store:
        assert store.meta == {"step": 7}
        assert same({name: store.get(name) for name in store}, tensors())
        store.put("new", torch.ones(3))
        store.commit()
    with TieredStore.open(tmp_path / "store" / "store", dram="1MiB", access="read") as store:
        assert same({name: store.get(name) for name in store}, {**tensors(), "new": torch.ones(3)})


def test_several_drives(tmp_path: Path) -> None:
    folder = unpacked("drives", tmp_path)
    with TieredStore.open(folder / "store", paths=[folder / "a", folder / "b"], dram="80MiB") as store:
        assert torch.equal(store.get("striped"), striped())
        assert torch.equal(store.get("whole"), rows())


def test_tables_and_small_tensors(tmp_path: Path) -> None:
    with TieredStore.open(unpacked("rows", tmp_path) / "store", dram="1MiB") as store:
        table = store.table("rows", 500, 8)
        assert torch.equal(table.look_up(torch.arange(500)), rows())
        table.update(torch.tensor([3]), torch.ones(1, 8))
        found = store.small("names")
        assert same(dict(found), names())
        found["name 1"] = torch.zeros(2)
        store.commit()


@pytest.mark.parametrize("kind", ["adamw", "pending", "bf16", "codes"])
def test_a_training_goes_on(kind: str, tmp_path: Path) -> None:
    folder = unpacked(kind, tmp_path)
    expected = expected_of(folder)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    if kind != "pending":  # whose update is the machine's that applies it
        assert same(exported(folder), expected["model"])
    with TieredStore.open(folder / "store", dram="1MiB") as store:
        model = zero.page(Small().to(dtype), store, existing="resume")
        kinds: Any = zero.AdamW8bit if kind == "codes" else zero.AdamW
        optimizer = kinds(model.parameters())
        scheduler = None if kind == "codes" else torch.optim.lr_scheduler.StepLR(optimizer, 2)
        data = None if kind == "codes" else torch.Generator()
        extra = zero.resume(model, optimizer, scheduler=scheduler, data=data)
        if kind != "codes":
            assert extra == {"epoch": 3, "name": ("a", 1.5)}
            assert data is not None and data.initial_seed() == 5  # noqa: PT018
        reference = Small().to(dtype)
        if kind == "pending":
            torch.testing.assert_close(dict(model.state_dict()), expected["model"])
            reference.load_state_dict(model.state_dict())
        else:
            assert same(dict(model.state_dict()), expected["model"])
            reference.load_state_dict(expected["model"])
        state, before = optimizer.state_dict(), expected["optimizer"]
        assert [group["lr"] for group in state["param_groups"]] == [group["lr"] for group in before["param_groups"]]
        if kind != "pending":
            assert same(state["state"], before["state"])
        if kind in ("adamw", "pending"):
            theirs = torch.optim.AdamW(reference.parameters(), fused=True)
            theirs.load_state_dict(copy.deepcopy(state))
            for number in range(3, 6):
                step_of(model, optimizer, number)
                step_of(reference, theirs, number)
            assert same(dict(model.state_dict()), dict(reference.state_dict()))
        else:
            step_of(model, optimizer, 3)
            assert not same(dict(model.state_dict()), expected["model"])
        zero.commit(model, optimizer, scheduler=scheduler)


def test_states_of_parameters_in_memory(tmp_path: Path) -> None:
    folder = unpacked("resident", tmp_path)
    expected = expected_of(folder)
    model = small()
    model.load_state_dict(expected["model"])
    with TieredStore.open(folder / "store", dram="1MiB") as store:
        with pytest.raises(MisuseError, match="says which values the states under 'optimizer' belong to"):
            zero.AdamW(model.parameters(), lr=1e-2, store=store, existing="resume").state_dict()
        optimizer = zero.AdamW(model.parameters(), lr=1e-2, store=store, existing="overwrite")
        optimizer.load_state_dict(expected["optimizer"])
        assert same(optimizer.state_dict()["state"], expected["optimizer"]["state"])
        step_of(model, optimizer, 3)
        store.commit()


def resumed(rank: int, folder: Path, ranks: int) -> dict[str, torch.Tensor]:
    with zero.open_store(folder / ("many" if ranks == 2 else "other"), dram="1MiB") as store:
        source = None if ranks == 2 else folder / "many"
        model = zero.page(Small(), store, stage=zero.Stage3(), existing="resume", source=source)
        optimizer = zero.AdamW(model.parameters())
        zero.resume(model, optimizer)
        found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        step_of(model, optimizer, 3)
        zero.commit(model, optimizer)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_go_on_and_so_does_another_number_of_them(ranks: int, tmp_path: Path) -> None:
    folder = unpacked("ranks", tmp_path)
    expected = expected_of(folder)["model"]
    assert all(same(found, expected) for found in on_ranks(ranks, resumed, folder, ranks))


@pytest.mark.parametrize("kind", ["llama", "llama-int8"])
def test_an_imported_model_generates(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = unpacked(kind, tmp_path)
    expected = expected_of(folder)
    with TieredStore.open(folder / "store", dram="4MiB", access="read") as store:
        model = open_model(store)
        assert torch.equal(model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False), expected["tokens"])
        if kind == "llama":
            assert same({name: model.state_dict()[name] for name in expected["model"]}, expected["model"])
