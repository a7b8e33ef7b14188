"""torch.distributed.checkpoint: folders that torch wrote, states that are commits, and folders that could run code."""

from __future__ import annotations

import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from tests.format.test_torch_file import RAN, Calling, ran
from tests.versions import NO_DIST
from tiered import MisuseError, TieredError, TieredStore, TorchFileError, zero
from tiered.zero.checkpoint.dcp import Folder
from tiered.zero.checkpoint.exports import export_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def made(seed: int, tokens: int = 16) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(tokens, 32), nn.Linear(32, 48), nn.BatchNorm1d(48), nn.Linear(48, 32))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        tokens = torch.randint(0, model[0].num_embeddings, (8,), generator=torch.Generator().manual_seed(number))
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_memory(tokens: int = 16) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    model = made(0, tokens)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    return model, optimizer, train(model, optimizer, 0, 4)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("tokens", [16, 4096])
def test_what_torch_wrote_goes_on_here(flat: bool, tokens: int, tmp_path: Path) -> None:
    """Bit for bit; also where the embedding is paged some rows at a time."""
    model, optimizer, _ = in_memory(tokens)
    state: dict[str, Any] = {}
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state["model"], state["optimizer"] = get_state_dict(model, optimizer, options=options)
    dcp.save(state, checkpoint_id=tmp_path / "dcp", **NO_DIST)
    rest = train(model, optimizer, 4, 8)
    with TieredStore.open(None, dram="1MiB" if tokens == 16 else "4MiB") as store:
        paged = zero.page(made(5, tokens), store, paging=zero.Paging(largest_unit=256 << 10, slice_weights=True))
        other = zero.AdamW(paged.parameters(), 1.0)
        train(paged, other, 0, 2)
        zero.load_dcp(tmp_path / "dcp", paged, other)
        assert other.param_groups[0]["lr"] == 1e-2
        assert train(paged, other, 4, 8) == rest
        assert all(torch.equal(value, paged.state_dict()[name]) for name, value in model.state_dict().items())


def test_what_is_exported_goes_on_in_torch(tmp_path: Path) -> None:
    _, _, losses = in_memory()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        paged = zero.page(made(0), store)
        other = zero.AdamW(paged.parameters(), 1e-2)
        assert train(paged, other, 0, 4) == losses
        zero.commit(paged, other)
        rest = train(paged, other, 4, 8)
        store.rollback()
    export_dcp(tmp_path / "store", tmp_path / "dcp")
    model = made(3)
    optimizer = torch.optim.AdamW(model.parameters(), 1.0, fused=True)
    state: dict[str, Any] = {}
    state["model"], state["optimizer"] = get_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=tmp_path / "dcp", **NO_DIST)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert train(model, optimizer, 4, 8) == rest


def test_a_state_that_is_a_commit(tmp_path: Path) -> None:
    """In the same process, and in a new one, whose load commits nothing."""
    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=3) as store:
        paged = zero.page(made(0), store)
        other = zero.AdamW(paged.parameters(), 1e-2)
        state = zero.Committed(paged, other)
        train(paged, other, 0, 4)
        dcp.save({"tiered": state}, checkpoint_id=tmp_path / "first", **NO_DIST)
        assert store.generation == 1
        dcp.save({"tiered": state}, checkpoint_id=tmp_path / "same", **NO_DIST)
        assert store.generation == 1
        rest = train(paged, other, 4, 8)
        dcp.load({"tiered": state}, checkpoint_id=tmp_path / "same", **NO_DIST)
        assert train(paged, other, 4, 8) == rest
        store.rollback()
    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=3) as store:
        paged = zero.page(made(9), store, existing="overwrite")
        other = zero.AdamW(paged.parameters(), 1.0)
        state = zero.Committed(paged, other)
        dcp.load({"tiered": state}, checkpoint_id=tmp_path / "first", **NO_DIST)
        assert store.generation == 1  # it went back, and nothing was committed
        assert train(paged, other, 4, 8) == rest
        with pytest.raises(MisuseError, match="does not have it"):
            state.load_state_dict({"mark": "0" * 32, "generations": [1], "store": "elsewhere"})
        with pytest.raises(MisuseError, match="before the first step"):
            state.load_state_dict({"mark": "", "generations": [], "store": ""})
        store.rollback()


def test_other_models_are_refused(tmp_path: Path) -> None:
    model, _, _ = in_memory()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", **NO_DIST)
    with TieredStore.open(None, dram="1MiB") as store:
        paged = zero.page(nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 40)), store)
        with pytest.raises(MisuseError, match=r"has model\.\d\.\w+, which this model does not have"):
            zero.load_dcp(tmp_path / "dcp", paged)
    with pytest.raises(MisuseError, match=r"has no file \.metadata"):
        Folder(tmp_path, model)


@pytest.mark.parametrize("found", [torch.ones(3), torch.ones(2, 2), torch.ones(()), torch.ones(2, dtype=torch.int64)])
def test_a_buffer_of_another_shape_or_type_is_refused(tmp_path: Path, found: torch.Tensor) -> None:
    """Of a folder of torch, and of a commit, with nothing changed."""
    had = f"{str(found.dtype).removeprefix('torch.')} of shape {tuple(found.shape)}"
    says = re.escape(f"{had}, and this model has float32 of shape (2,)")

    def made(buffer: torch.Tensor) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("mean", buffer)
        model.register_buffer("cache", buffer, persistent=False)
        return model

    dcp.save({"model": made(found).state_dict()}, checkpoint_id=tmp_path / "dcp", **NO_DIST)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = zero.page(made(torch.zeros(2)), store)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(MisuseError, match=rf"dcp has the buffer 'mean' as {says}"):
            zero.load_dcp(tmp_path / "dcp", model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        zero.commit(zero.page(made(found), store, name="other"))
        with pytest.raises(MisuseError, match=rf"committed as 'other': the commit has the buffer 'mean' as {says}"):
            zero.page(made(torch.zeros(2)), store, name="other", existing="resume")
        store.rollback()


def test_nothing_in_a_folder_runs(tmp_path: Path) -> None:
    """A ``.metadata`` that asks for code, and 120 damaged copies of a folder: each is refused, or has the values it had."""
    model, _, _ = in_memory()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", **NO_DIST)
    RAN.clear()
    shutil.copytree(tmp_path / "dcp", tmp_path / "hostile")
    (tmp_path / "hostile" / ".metadata").write_bytes(pickle.dumps({"a": Calling(ran, 1)}))
    with pytest.raises(TorchFileError, match="nothing was called"):
        Folder(tmp_path / "hostile", model)
    expected = values_of(tmp_path / "dcp", model)
    chosen, refused = random.Random(3), 0
    for number in range(120):
        path = tmp_path / "dcp" / (".metadata" if number % 2 else "__0_0.distcp")
        before = path.read_bytes()
        changed = bytearray(before)
        changed[chosen.randrange(len(changed))] ^= 1 << chosen.randrange(8)
        path.write_bytes(changed if number % 3 else changed[: chosen.randrange(len(changed))])
        try:
            found = values_of(tmp_path / "dcp", model)
        except (TieredError, OSError):
            refused += 1
        else:
            assert number % 2 or all(torch.equal(found[name], value) for name, value in expected.items())
        path.write_bytes(before)
    assert refused > 60
    assert RAN == []


def values_of(folder: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    with Folder(folder, model) as found:
        values = {name: found.read(name, "param", 0, parameter.numel()) for name, parameter in model.named_parameters()}
    return {name: value for name, value in values.items() if value is not None}


def changed_dimensions(metadata: Any) -> None:
    metadata.state_dict_metadata["1.weight"].size = (2**52,) * 400


def changed_places(metadata: Any) -> None:
    """All chunks where one is."""
    first = next(iter(metadata.storage_data.values()))
    metadata.storage_data = dict.fromkeys(metadata.storage_data, first)


def changed_name(metadata: Any) -> None:
    metadata.state_dict_metadata[3] = metadata.state_dict_metadata.pop("1.weight")


def changed_path(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "a\0b"


def changed_step(metadata: Any) -> None:
    metadata.state_dict_metadata["optimizer.state.1.weight.step"] = metadata.state_dict_metadata["1.weight"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed_dimensions, "400 dimensions; the limit is 64"),
        (changed_places, "two chunks lie in the same bytes"),
        (changed_name, "a int is taken for a name"),
        (changed_path, "in no file of the folder"),
        (changed_step, "is more than a number"),
    ],
)
def test_metadata_that_torch_does_not_write(change: Callable[[Any], None], says: str, tmp_path: Path) -> None:
    """Before anything is computed, or read, from it."""
    model = made(0)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path, **NO_DIST)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    change(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(TorchFileError, match=says):
        Folder(tmp_path, model)
