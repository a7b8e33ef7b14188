"""Muon: bit for bit torch's class in memory, on whole matrices, with AdamW beside it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.zero.harness import clipping, equal, train
from tests.zero.ranks import on_ranks
from tests.zero.test_few_bytes import Small, built
from tests.zero.test_rules import CUT, WHOLE, Experts, continued, opened, same_states
from tiered import CapacityError, MisuseError, TieredStore, zero

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")

ARGUMENTS: list[dict[str, Any]] = [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}]


class Both(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, in memory."""

    def __init__(self, model: nn.Module, **arguments: Any) -> None:
        parameters = list(model.parameters())
        self.muon = torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-2, **arguments)
        self.adamw = torch.optim.AdamW([p for p in parameters if p.dim() != 2], lr=3e-3, fused=True)
        super().__init__(parameters, {"lr": 0.0})
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]  # which a scheduler changes

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.muon.step()  # type: ignore[no-untyped-call]
        self.adamw.step()


def made(model: nn.Module, update: str = "on_fetch", **arguments: Any) -> zero.Optimizer:
    return zero.Muon(model, lr=1e-2, adamw={"lr": 3e-3}, update=update, **arguments)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("update", "dram"), [("on_fetch", CUT), ("on_fetch", WHOLE), ("in_backward", CUT)])
def test_muon_is_torchs_class(update: str, dram: str, index: int, tmp_path: Path) -> None:
    """Accumulated and clipped; in the smaller pool matrices are longer than a chunk, and begin and end within one."""
    fetched, reference, model = update == "on_fetch", built(), built()
    theirs = Both(reference, **ARGUMENTS[index])
    batches = 2 if fetched else 1
    numbers = train(reference, theirs, clipping(reference) if fetched else None, steps=6, batches=batches)
    with opened(tmp_path / "store", dram) as store:
        zero.page(model, store)
        ours = made(model, update, **ARGUMENTS[index])
        assert train(model, ours, ours.clip_grad_norm_ if fetched else None, steps=6, batches=batches) == numbers
        assert equal(model.state_dict(), reference.state_dict())
        states = ours.state_dict()["state"]
        matrices = len(theirs.muon.param_groups[0]["params"])
        same_states({"state": {i: s for i, s in states.items() if i < matrices}}, theirs.muon.state_dict())
        same_states({"state": {i - matrices: s for i, s in states.items() if i >= matrices}}, theirs.adamw.state_dict())
        store.close()


def test_a_bf16_matrix_has_a_master(tmp_path: Path) -> None:
    model = built().to(torch.bfloat16)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    masters = [nn.Parameter(p.detach().float()) for p in matrices]
    theirs = torch.optim.Muon(masters, lr=1e-2)
    with opened(tmp_path / "store", CUT) as store:
        zero.page(model, store)
        ours = zero.Muon(matrices, lr=1e-2)
        for number in range(4):
            x = torch.randn(4, 97, generator=torch.Generator().manual_seed(number))
            ours.zero_grad()
            model(x.bfloat16()).square().mean().backward()
            for master, parameter in zip(masters, matrices, strict=True):
                grad = ours.grad(parameter)
                assert grad is not None
                master.grad = grad.float()
            ours.step()
            theirs.step()  # type: ignore[no-untyped-call]
        states = ours.state_dict()["state"]
        for index, master in enumerate(masters):
            assert torch.equal(states[index].pop("master"), master)
        same_states({"state": states}, theirs.state_dict())
        store.close()


def test_a_run_goes_on_from_a_commit(tmp_path: Path) -> None:
    reference = built()
    theirs = Both(reference)
    continued(reference, theirs, range(7))
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(built(), store, name="m")
        ours = made(model)
        continued(model, ours, range(3))
        zero.commit(model, ours)
        continued(model, ours, range(2))
        zero.rollback(model, ours)
        continued(model, ours, range(3, 4))
        zero.commit(model, ours)
        store.close()
    with opened(tmp_path / "store", WHOLE) as store:
        model = zero.page(built(), store, name="m", existing="resume")
        ours = made(model)
        zero.resume(model, ours)
        continued(model, ours, range(4, 5))
        saved = copy.deepcopy(ours.state_dict())
        ours.load_state_dict(saved)
        continued(model, ours, range(5, 7))
        assert equal(model.state_dict(), reference.state_dict())
        store.close()


def test_how_a_model_is_split(store: TieredStore) -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(50, 16), nn.Embedding(8, 16)
            self.norm, self.mix, self.out = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 50)

    model = zero.page(Language(), store)
    ours = zero.Muon(model, lr=0.02, adamw={"lr": 1e-3, "betas": (0.9, 0.95)})
    assert [name for name, rule in ours.split.items() if rule == "MuonRule"] == ["mix.weight"]
    assert len(ours.split) == len(list(model.parameters()))
    assert [group["lr"] for group in ours.param_groups] == [0.02, 1e-3]
    assert ours.param_groups[1]["betas"] == (0.9, 0.95)
    assert {name: value for name, value in ours.defaults.items() if name != "lr"} == {
        name: value for name, value in torch.optim.Muon([torch.zeros(1, 1)]).defaults.items() if name != "lr"
    }


class One(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.only = nn.Linear(size, size, bias=False)

    def loss(self, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.only(torch.ones(1, self.only.in_features)).square().mean()
        return loss


def test_memory_that_is_too_small_is_named(tmp_path: Path) -> None:
    with opened(tmp_path / "one", CUT) as store:
        model = zero.page(One(260), store)
        with pytest.raises(CapacityError, match=r"'only.weight' of shape \(260, 260\).*open it with dram=(\d+)") as found:
            zero.Muon(model.parameters())
        assert zero.AdamW(model.parameters()) is not None
        store.close()
    needed = str(found.value).partition("dram=")[2].partition(",")[0]
    torch.manual_seed(0)
    reference = One(260)
    theirs = torch.optim.Muon(reference.parameters(), lr=1e-2)
    model = copy.deepcopy(reference)
    continued(reference, theirs, range(4))
    with opened(tmp_path / "two", needed) as store:
        zero.page(model, store)
        continued(model, zero.Muon(model.parameters(), lr=1e-2), range(4))
        assert equal(model.state_dict(), reference.state_dict())
        store.close()


def test_what_is_refused(store: TieredStore) -> None:
    model = zero.page(built(), store)
    with pytest.raises(MisuseError, match=r"'blocks.0.scale' has the shape \(97,\): give it a param group with another rule"):
        zero.Muon(model.parameters())
    with pytest.raises(MisuseError, match="Learning rate should be >= 0"):
        zero.Muon(model, lr=-1.0)
    with pytest.raises(MisuseError, match="is out of range"):
        zero.Muon(model, ns_steps=100)
    with pytest.raises(MisuseError, match="has what AdamWRule does not"):
        zero.Muon(model, adamw={"amsgrad": True})
    with pytest.raises(MisuseError, match="adamw= goes with a model"):
        zero.Muon(model.parameters(), adamw={})
    with pytest.raises(MisuseError, match="no matrices but embeddings"):
        zero.Muon(zero.page(nn.LayerNorm(4), store, name="other"))
    with pytest.raises(MisuseError, match="updates whole matrices, which states in a store are not kept for"):
        zero.Optimizer([nn.Parameter(torch.ones(4, 4))], zero.MuonRule(), store=store, name="resident")


def test_slices_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(Experts(), store)
        with pytest.raises(MisuseError, match=r"'up\[0\]' is divided into slices"):
            zero.Muon(model.parameters())
        store.close()


def on_a_rank(rank: int, folder: Path) -> None:
    with zero.open_store(folder, dram="4MiB") as store:
        model: Small = zero.page(built(), store)
        with pytest.raises(MisuseError, match="is divided among ranks"):
            zero.Muon(model)
        store.close()


def test_ranks_are_refused(tmp_path: Path) -> None:
    on_ranks(2, on_a_rank, tmp_path)
