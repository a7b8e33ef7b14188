"""Rules for whole parameters, Muon and Adafactor: bit for bit torch's classes in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.quick import quick
from tests.versions import MUON
from tests.zero.harness import clipping, equal, train
from tests.zero.ranks import averaged, on_ranks
from tests.zero.test_few_bytes import Small, built
from tests.zero.test_rules import CUT, WHOLE, Experts, continued, opened, same_states
from tiered import CapacityError, MisuseError, TieredStore, zero

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


class Narrow(Both):
    """Muon whose momentum is rounded to bfloat16 after each step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.muon.state.values():
            state["momentum_buffer"].copy_(state["momentum_buffer"].bfloat16())


def made(model: nn.Module, update: str = "on_fetch", **arguments: Any) -> zero.Optimizer:
    return zero.Muon(model, lr=1e-2, adamw={"lr": 3e-3}, update=update, **arguments)


@MUON
@pytest.mark.parametrize(
    ("update", "dram", "index"),
    quick(
        [(*way, index) for way in (("on_fetch", CUT), ("on_fetch", WHOLE), ("in_backward", CUT)) for index in (0, 1)],
        [("on_fetch", CUT, 0), ("on_fetch", WHOLE, 1), ("in_backward", CUT, 1)],
    ),
)
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


@MUON
@pytest.mark.parametrize(("update", "dram"), quick([("on_fetch", CUT), ("in_backward", WHOLE)], [("on_fetch", CUT)]))
def test_a_momentum_in_bfloat16(update: str, dram: str, tmp_path: Path) -> None:
    reference, model = built(), built()
    theirs = Narrow(reference)
    numbers = train(reference, theirs, steps=6, batches=1)
    with opened(tmp_path / "store", dram) as store:
        zero.page(model, store, name="m")
        ours = made(model, update, moments=torch.bfloat16)
        assert train(model, ours, steps=6, batches=1) == numbers
        assert equal(model.state_dict(), reference.state_dict())
        states = ours.state_dict()["state"]
        for index, state in enumerate(theirs.muon.state.values()):
            kept = states[index]["momentum_buffer"]
            assert kept.dtype is torch.bfloat16
            assert torch.equal(kept.float(), state["momentum_buffer"])
        saved = copy.deepcopy(ours.state_dict())
        torch.optim.Muon(theirs.muon.param_groups[0]["params"]).load_state_dict(
            {"state": {i: saved["state"][i] for i in range(len(theirs.muon.state))}, "param_groups": saved["param_groups"][:1]}
        )
        zero.commit(model, ours)
        continued(model, ours, range(1))
        zero.rollback(model, ours)
        ours.load_state_dict(saved)
        continued(model, ours, range(6, 8))
        continued(reference, theirs, range(6, 8))
        assert equal(model.state_dict(), reference.state_dict())
        store.close()


class Odd(nn.Module):
    """Parameters of no, one, two, three and four dimensions, one of them with other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(33))
        self.conv = nn.Conv2d(3, 33, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.stack = nn.Parameter(torch.randn(3, 33, 29) / 6)
        self.turned = nn.Parameter(torch.randn(29, 33).t())

    def loss(self, number: int) -> torch.Tensor:
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(number))
        made = self.conv(x).mean((2, 3)) * self.gain + self.shift
        for matrix in (*self.stack, self.turned):
            made = made + torch.tanh(made @ matrix) @ self.turned.t()
        return made.square().mean()


def test_adafactor_of_all_dimensions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = Odd()
    model = copy.deepcopy(reference)
    theirs = torch.optim.Adafactor(reference.parameters(), lr=1e-2, foreach=False)
    continued(reference, theirs, range(6))
    with opened(tmp_path / "store", CUT) as store:
        zero.page(model, store, name="m")
        ours = zero.Adafactor(model.parameters(), lr=1e-2)
        continued(model, ours, range(4))
        zero.commit(model, ours)
        store.close()
    with opened(tmp_path / "store", WHOLE) as store:
        model = zero.page(copy.deepcopy(reference), store, name="m", existing="resume")
        ours = zero.Adafactor(model.parameters(), lr=1e-2)
        zero.resume(model, ours)
        continued(model, ours, range(4, 6))
        assert equal(model.state_dict(), reference.state_dict())
        same_states(ours.state_dict(), theirs.state_dict())
        assert ours.state[model.gain].keys() == ("step", "variance")
        assert ours.state[model.turned]["row_var"].shape == (33, 1)
        again = zero.Adafactor(model.parameters(), lr=1e-2)
        again.load_state_dict(theirs.state_dict())
        continued(model, again, range(6, 7))
        continued(reference, theirs, range(6, 7))
        assert equal(model.state_dict(), reference.state_dict())
        state = again.state_dict()
        state["state"][3]["row_var"] = torch.ones(3)
        with pytest.raises(MisuseError, match=r"'row_var' of .* has shape \(3,\)"):
            again.load_state_dict(state)
        store.close()


@MUON
def test_a_checkpoint_of_whole_parameters_is_divided_anew(tmp_path: Path) -> None:
    """Units and chunks of another budget."""
    reference = built()
    theirs = Both(reference)
    continued(reference, theirs, range(5))
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(built(), store, name="m")
        continued(model, ours := made(model), range(3))
        zero.commit(model, ours)
        store.close()
    with zero.open_store(tmp_path / "other", dram=WHOLE) as store:
        model = zero.page(built(), store, name="m", existing="resume", source=tmp_path / "store")
        zero.resume(model, ours := made(model))
        continued(model, ours, range(3, 5))
        assert equal(model.state_dict(), reference.state_dict())
        store.close()


@MUON
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


@MUON
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


@MUON
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


@MUON
def test_states_of_parameters_in_memory(tmp_path: Path) -> None:
    reference, model = built(), built()
    theirs = Both(reference)
    continued(reference, theirs, range(6))
    with opened(tmp_path / "store", CUT) as store:
        ours = zero.Muon(model, lr=1e-2, adamw={"lr": 3e-3}, store=store)
        continued(model, ours, range(3))
        store.commit()
        store.close()
    with opened(tmp_path / "store", CUT) as store:
        ours = zero.Muon(model, lr=1e-2, adamw={"lr": 3e-3}, store=store, existing="resume")
        continued(model, ours, range(3, 5))
        again = zero.Muon(model, lr=1e-2, adamw={"lr": 3e-3}, store=store, name="other")
        again.load_state_dict(ours.state_dict())
        continued(model, again, range(5, 6))
        assert equal(model.state_dict(), reference.state_dict())
        states = again.state_dict()["state"]
        for index, state in enumerate(theirs.muon.state.values()):
            assert torch.equal(states[index]["momentum_buffer"], state["momentum_buffer"])
        store.close()


class One(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.only = nn.Linear(size, size, bias=False)

    def loss(self, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.only(torch.ones(1, self.only.in_features)).square().mean()
        return loss


@MUON
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


@MUON
def test_what_is_refused(store: TieredStore) -> None:
    model = zero.page(built(), store)
    with pytest.raises(MisuseError, match=r"'blocks.0.scale' has the shape \(97,\): give it a param group with another rule"):
        zero.Muon(model.parameters())
    with pytest.raises(MisuseError, match="Learning rate should be >= 0"):
        zero.Muon(model, lr=-1.0)
    with pytest.raises(MisuseError, match="is out of range"):
        zero.Muon(model, ns_steps=100)
    with pytest.raises(MisuseError, match="momentum is a factor"):
        zero.Muon(model, momentum=torch.bfloat16)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="has what AdamWRule does not"):
        zero.Muon(model, adamw={"amsgrad": True})
    with pytest.raises(MisuseError, match="eps=-1 is out of range"):
        zero.Muon(model, adamw={"eps": -1})
    with pytest.raises(MisuseError, match="adamw= goes with a model"):
        zero.Muon(model.parameters(), adamw={})
    with pytest.raises(MisuseError, match="no matrices but embeddings"):
        zero.Muon(zero.page(nn.LayerNorm(4), store, name="other"))
    with pytest.raises(MisuseError, match=r"parameter 0 \(of shape \(4,\)\) has the shape \(4,\)"):
        zero.Optimizer([nn.Parameter(torch.ones(4))], zero.MuonRule(), store=store, name="resident")
    with pytest.raises(CapacityError, match=r"take 16,777,216 bytes of DRAM.*open it with dram=16777216"):
        zero.Muon([nn.Parameter(torch.ones(2048, 2048))], store=store, name="resident")


@MUON
def test_slices_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(Experts(), store)
        with pytest.raises(MisuseError, match=r"'up\[0\]' is divided into slices"):
            zero.Muon(model.parameters())
        store.close()


KINDS: dict[str, Any] = {
    "muon": (made, Both),
    "muon_bfloat16": (lambda model: made(model, moments=torch.bfloat16), Narrow),
    "adafactor": (
        lambda model: zero.Adafactor(model.parameters(), lr=1e-2),
        lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2, foreach=False),
    ),
}
HERE = [kind for kind in KINDS if kind == "adafactor" or hasattr(torch.optim, "Muon")]


def on_a_rank(rank: int, folder: Path, kinds: list[str], stages: list[str]) -> list[Any]:
    """Train on one loss, so that the mean of the gradients is that of one process; commit, go back, and go on."""
    torch.set_num_threads(1)
    results = []
    for stage in stages:
        for kind in kinds:
            with zero.open_store(folder / f"{stage}-{kind}", dram="2MiB") as store:
                model = zero.page(built(), store, name="m", stage=getattr(zero, stage)())
                ours = KINDS[kind][0](model)
                continued(model, ours, range(2))
                zero.commit(model, ours)
                continued(model, ours, range(2))
                zero.rollback(model, ours)
                saved = copy.deepcopy(ours.state_dict())
                continued(model, ours, range(2, 3))
                zero.rollback(model, ours)
                ours.load_state_dict(saved)
                continued(model, ours, range(2, 4))
                zero.commit(model, ours)
                states = {index: dict(state) for index, state in ours.state_dict()["state"].items()}
                results.append((model.state_dict(), states))
                store.close()
    return results


def on_other_ranks(rank: int, folder: Path, kinds: list[str], stages: list[str]) -> list[Any]:
    """Go on with what other ranks committed."""
    torch.set_num_threads(1)
    results = []
    for stage in stages:
        for kind in kinds:
            with zero.open_store(folder / f"{stage}-{kind}", dram="2MiB") as store:
                source = folder.parent / "4" / f"{stage}-{kind}"
                model = zero.page(built(), store, name="m", existing="resume", source=source)
                zero.resume(model, ours := KINDS[kind][0](model))
                continued(model, ours, range(4, 6))
                results.append((model.state_dict(), {i: dict(s) for i, s in ours.state_dict()["state"].items()}))
                store.close()
    return results


def over_ranks(tmp_path: Path, sizes: tuple[int, int], kinds: list[str], stages: list[str]) -> None:
    for size, scenario, steps in (sizes[0], on_a_rank, 4), (sizes[1], on_other_ranks, 6):
        results = on_ranks(size, scenario, tmp_path / str(steps), kinds, stages)
        for kind, found in zip(kinds * len(stages), zip(*results, strict=True), strict=True):
            reference = built()
            theirs = KINDS[kind][1](reference)
            averaged(reference, theirs, sizes[0], range(4))
            averaged(reference, theirs, sizes[1], range(4, steps))
            for values, states in found:
                assert equal({name: value.clone() for name, value in values.items()}, reference.state_dict())
                if kind == "adafactor":
                    same_states({"state": states}, theirs.state_dict())
                    continue
                for index, state in enumerate(theirs.muon.state.values()):
                    assert torch.equal(states[index]["momentum_buffer"].float(), state["momentum_buffer"])


def test_ranks(tmp_path: Path) -> None:
    """Of each block of the model a matrix is in two ranks' shares, and the other is in one's; and then of three ranks."""
    over_ranks(tmp_path, (2, 3), [kind for kind in ("muon", "adafactor") if kind in HERE], ["Stage3"])


@pytest.mark.soak
def test_ranks_of_all_kinds(tmp_path: Path) -> None:
    over_ranks(tmp_path, (3, 2), HERE, ["Stage1", "Stage2", "Stage3"])


def in_backward(rank: int, folder: Path) -> None:
    with zero.open_store(folder, dram="2MiB") as store:
        model: Small = zero.page(built(), store)
        with pytest.raises(MisuseError, match=r"is divided among ranks, which gather it for its update in one order"):
            zero.Muon(model, update="in_backward")
        store.close()


@MUON
def test_ranks_in_backward_are_refused(tmp_path: Path) -> None:
    on_ranks(2, in_backward, tmp_path)


def in_memory_of_a_rank(rank: int, folder: Path, kinds: list[str]) -> list[Any]:
    """Parameters in memory, the same on all ranks; each matrix is one rank's."""
    torch.set_num_threads(1)
    results = []
    where: dict[str, Any] = {"stage": zero.Stage1()}
    for kind in kinds:
        with TieredStore.open(folder / f"{kind}{rank}", dram="1MiB") as store:
            model = built()
            ours = made(model, store=store, **where) if kind == "muon" else in_store(model, store, **where)
            continued(model, ours, range(2))
            store.commit()
            where["existing"] = "resume"
            ours = made(model, store=store, **where) if kind == "muon" else in_store(model, store, **where)
            del where["existing"]
            continued(model, ours, range(2, 4))
            results.append((model.state_dict(), ours.state_dict()["state"]))
            store.close()
    return results


def in_store(model: nn.Module, store: TieredStore, **where: Any) -> zero.Optimizer:
    return zero.Adafactor(model.parameters(), lr=1e-2, store=store, **where)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ranks_with_parameters_in_memory(size: int, tmp_path: Path) -> None:
    kinds = [kind for kind in ("muon", "adafactor") if kind in HERE]
    results = on_ranks(size, in_memory_of_a_rank, tmp_path, kinds)
    for kind, found in zip(kinds, zip(*results, strict=True), strict=True):
        reference = built()
        theirs = KINDS[kind][1](reference)
        continued(reference, theirs, range(4))
        for values, states in found:
            assert equal(values, reference.state_dict())
            if kind == "adafactor":
                same_states({"state": states}, theirs.state_dict())
                continue
            for index, state in enumerate(theirs.muon.state.values()):
                assert torch.equal(states[index]["momentum_buffer"], state["momentum_buffer"])
