"""Files of torch.save that are written tensor by tensor: what torch loads of them, and what a full disk leaves."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered import CapacityError, MisuseError, TieredStore, TorchFileError, zero
from tiered.format.foreign.torch_file import TorchFile
from tiered.integrations.deepspeed.saved import tensor_of
from tiered.zero.checkpoint import safetensors
from tiered.zero.checkpoint.torch_writer import ALIGNED, TorchFileWriter, mapped, save_optimizer

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of some types and shapes, turned, with gaps, or expanded."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    made = torch.randint(0, 2, shape).to(draw(st.sampled_from(TYPES)))
    made = made.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        made = made[:: draw(st.integers(1, 3))]
    return made.unsqueeze(-1).expand(*made.shape, 3) if draw(st.booleans()) else made


@settings(max_examples=60, deadline=None)
@given(found=st.lists(tensors(), max_size=4), at_once=st.sampled_from([8, 24, 4 << 20]))
def test_torch_loads_what_was_written(tmp_path_factory: Any, found: list[torch.Tensor], at_once: int) -> None:
    path = tmp_path_factory.mktemp("written") / "a.pt"
    with pytest.MonkeyPatch.context() as patched, TorchFileWriter(path) as file:
        patched.setattr(safetensors, "CONVERTED_AT_ONCE", at_once)
        written = [file.tensor(value) for value in found]
        file.end({"written": written, "inside": found, "plain": [{"lr": 0.1, "betas": (0.9, 0.999), "none": None}]})
    theirs = path.with_name("b.pt")
    torch.save({"plain": (1, [2.5, "x"]), "inside": found}, theirs)
    inside = mapped(theirs)
    assert inside["plain"] == (1, [2.5, "x"])
    for one, value in zip([*inside["inside"], *mapped(path)["written"]], [*found, *found], strict=True):
        assert one.dtype is value.dtype
        assert torch.equal(one, value)
    for by_page in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=by_page)
        assert loaded["plain"] == [{"lr": 0.1, "betas": (0.9, 0.999), "none": None}]
        for one, value in zip([*loaded["written"], *loaded["inside"]], [*found, *found], strict=True):
            assert one.dtype is value.dtype
            assert torch.equal(one, value)
            if torch.empty_like(value).stride() == value.stride():  # dense, in whatever order
                assert one.stride() == value.stride()
            assert not by_page or not one.numel() or one.data_ptr() % ALIGNED == 0
    with TorchFile(path) as read:  # which compares checksums
        assert all(torch.equal(tensor_of(one), value) for one, value in zip(read.value["written"], found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_is_written_as_torch_saves_it(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), torch.nn.Linear(8, 4)).to(dtype)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        zero.page(model, store)
        optimizer = zero.AdamW([{"params": model[:2].parameters(), "lr": 0.1}, {"params": model[2].parameters()}], lr=0.01)
        model[:2](torch.ones(2, 8, dtype=dtype)).sum().backward()  # the last layer has no state
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / "a.pt")
        save_optimizer(optimizer, tmp_path / "b.pt")
        expected, found = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys() == {0, 1, 2, 3}
        for index, state in expected["state"].items():
            assert list(found["state"][index]) == list(state)
            assert all(torch.equal(found["state"][index][name], value) for name, value in state.items())
        optimizer.load_state_dict(torch.load(tmp_path / "b.pt", weights_only=True, mmap=True))
        store.close()


def test_what_is_damaged_or_runs_something_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(1000)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    at = data.index(torch.arange(1000).numpy().tobytes()[800:1600])
    data[at] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(TorchFileError, match="checksum"):
        mapped(tmp_path / "a.pt")
    torch.save({"a": Path("x")}, tmp_path / "b.pt")
    with pytest.raises(TorchFileError):
        mapped(tmp_path / "b.pt")


def test_a_file_that_was_not_ended_is_not_left(tmp_path: Path) -> None:
    large: Any = torch.zeros(1 << 16)
    with pytest.raises(MisuseError, match="written to no file"), TorchFileWriter(tmp_path / "a.pt") as file:
        file.tensor(torch.zeros(2, dtype=torch.complex64).to_sparse())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(CapacityError, match=r"no room for .*a\.pt"), TorchFileWriter(tmp_path / "a.pt") as file:
            file.tensor(large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
