"""AdamW with moments in fewer bytes: bit for bit the same algorithm in memory, which is written down here from its sources."""

from __future__ import annotations

import copy
import hashlib
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.quick import quick
from tests.versions import FULLY_SHARDS
from tests.zero.harness import clipping, equal, train
from tests.zero.ranks import averaged, on_ranks
from tests.zero.test_rules import CUT, WHOLE, Experts, continued, groups, opened, same_states
from tiered import ManifestError, MisuseError, TensorSpec, TieredStore, zero
from tiered.packing import moments
from tiered.store.at_rest import StoreAtRest
from tiered.zero.checkpoint.checkpoint import read_record
from tiered.zero.checkpoint.exports import export_dcp
from tiered.zero.checkpoint.safetensors import export_at_rest

STEPS = 8


class Reference(torch.optim.Optimizer):
    """AdamW whose moments are kept as ``keep`` makes them of fp32, and as ``widen`` makes fp32 of them."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def keep(self, name: str, moment: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def widen(self, name: str, state: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                inner = torch.optim.AdamW([parameter], lr=group["lr"], weight_decay=group["weight_decay"], fused=True)
                names = ("exp_avg", "exp_avg_sq")
                if state:
                    inner.state[parameter] = {name: self.widen(name, state, parameter) for name in names}
                    inner.state[parameter]["step"] = state["step"]
                inner.step()
                made = inner.state[parameter]
                state["step"] = made["step"]
                for name in names:
                    state.update(self.keep(name, made[name]))


class BFloat16(Reference):
    def keep(self, name: str, moment: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: moment.to(torch.bfloat16)}

    def widen(self, name: str, state: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        return state[name].float()


class Coded(Reference):
    """Codes: of each block the largest absolute value, and of each element the nearest value of a map, compared in float64."""

    block: int
    kept: str
    maps: ClassVar[dict[str, np.ndarray]]

    def keep(self, name: str, moment: torch.Tensor) -> dict[str, torch.Tensor]:
        values = self.maps[name].astype(np.float64)
        codes, scales = [], []
        for block in moment.flatten().split(self.block):
            scale = block.abs().max()
            shares = (block / scale if scale > 0 else torch.zeros_like(block)).double().numpy()
            above = np.searchsorted(values, shares).clip(1, len(values) - 1)
            codes.append(np.where(shares - values[above - 1] <= values[above] - shares, above - 1, above))
            scales.append(scale)
        return {f"{name}_codes": self.arranged(codes), f"{name}_scales": torch.stack(scales)}

    def widen(self, name: str, state: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        codes = self.numbers(state[f"{name}_codes"], like.numel())
        values = torch.from_numpy(self.maps[name])[codes]
        scales = state[f"{name}_scales"].repeat_interleave(self.block)[: like.numel()]
        return (values * scales).view(like.shape)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        for index, state in found["state"].items():
            found["state"][index] = {"step": state["step"], self.kept: self.records(state)}
        return found

    def records(self, state: dict[str, torch.Tensor]) -> torch.Tensor:
        """A record for each block: the codes of both moments, and both scales."""
        codes = [state[f"{name}_codes"] for name in self.maps]
        scales = [state[f"{name}_scales"][:, None].view(torch.uint8) for name in self.maps]
        return torch.cat([*codes, *scales], 1).flatten()

    def arranged(self, codes: list[np.ndarray]) -> torch.Tensor:
        """Codes of shape (blocks, bytes of a block)."""
        full = np.stack([np.pad(one, (0, self.block - len(one))) for one in codes])
        return torch.from_numpy(full).to(torch.uint8)

    def numbers(self, codes: torch.Tensor, count: int) -> torch.Tensor:
        return codes.flatten()[:count].long()


def dynamic_map(bits: int, signed: bool) -> np.ndarray:
    """Numbers of the dynamic data type: 0, 1, and in each decade the middles of equal intervals between 0.1 and 1."""
    found = [0.0, 1.0]
    for exponent in range(bits - 1):
        edges = np.linspace(0.1, 1, 2 ** (exponent + (0 if signed else 1)) + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - bits + 2)
        found += [*middles, *(-middles if signed else [])]
    assert len(found) == 2**bits
    return np.sort(np.array(found)).astype(np.float32)


class Eight(Coded):
    block = 256
    kept = "moments8"
    maps: ClassVar[dict[str, np.ndarray]] = {"exp_avg": dynamic_map(8, True), "exp_avg_sq": dynamic_map(8, False)}


class Four(Coded):
    block = 128
    kept = "moments4"
    maps: ClassVar[dict[str, np.ndarray]] = {
        "exp_avg": dynamic_map(4, True),
        "exp_avg_sq": np.arange(1, 17, dtype=np.float32) / 16,
    }

    def arranged(self, codes: list[np.ndarray]) -> torch.Tensor:
        low, high = super().arranged(codes).chunk(2, 1)
        return low + 16 * high

    def numbers(self, codes: torch.Tensor, count: int) -> torch.Tensor:
        return torch.cat((codes % 16, codes // 16), 1).flatten()[:count].long()


def narrow(params: Any, **arguments: Any) -> zero.Optimizer:
    return zero.AdamW(params, moments=torch.bfloat16, **arguments)


@dataclass(frozen=True)
class Case:
    ours: Callable[..., zero.Optimizer]
    theirs: type[Reference]
    state_bytes: float
    """Of one element, without scales."""


CASES = {
    "bfloat16": Case(narrow, BFloat16, 4),
    "8bit": Case(zero.AdamW8bit, Eight, 2),
    "4bit": Case(zero.AdamW4bit, Four, 1),
}


class Block(nn.Module):
    """Parameters of one unit. The largest begins within what would be a block, were these counted from the unit's beginning,
    and so do the chunks in the smaller pool."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(97))
        self.shift = nn.Parameter(torch.zeros(97))
        self.weight = nn.Parameter(torch.randn(97, 131) / 10)
        self.back = nn.Parameter(torch.randn(131, 97) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh((x * self.scale + self.shift) @ self.weight) @ self.back


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, number: int) -> torch.Tensor:
        x = torch.randn(4, 97, generator=torch.Generator().manual_seed(number))
        return self(x).square().mean()


def built() -> Small:
    torch.manual_seed(0)
    return Small()


def compare(tmp_path: Path, kind: str, update: str, dram: str, batches: int, clipped: bool, several: bool, steps: int) -> None:
    found, reference, model = CASES[kind], built(), built()
    theirs = found.theirs(groups(reference, several), lr=1e-3)
    numbers = train(reference, theirs, clipping(reference) if clipped else None, steps=steps, batches=batches)
    with opened(tmp_path / "store", dram) as store:
        zero.page(model, store)
        ours = found.ours(groups(model, several), lr=1e-3, update=update)
        clip = ours.clip_grad_norm_ if clipped else None
        assert train(model, ours, clip, steps=steps, batches=batches) == numbers
        assert equal(model.state_dict(), reference.state_dict())
        same_states(ours.state_dict(), theirs.state_dict())
        assert any(key.endswith("#1") for key in store) is (dram == CUT)
        store.close()


@pytest.mark.parametrize("kind", CASES)
def test_a_step_is_that_in_memory(kind: str, tmp_path: Path) -> None:
    """Accumulated, clipped, in two groups, in a pool that has the states in several chunks, cut within blocks of the unit."""
    compare(tmp_path, kind, "on_fetch", CUT, 2, True, True, STEPS)


@pytest.mark.parametrize("kind", CASES)
def test_a_step_in_backward(kind: str, tmp_path: Path) -> None:
    compare(tmp_path, kind, "in_backward", CUT, 1, False, False, STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("dram", [CUT, WHOLE])
@pytest.mark.parametrize("kind", CASES)
def test_a_step_in_all_ways(kind: str, dram: str, clipped: bool, several: bool, tmp_path: Path) -> None:
    compare(tmp_path, kind, "on_fetch", dram, 1 + clipped, clipped, several, 20)


@pytest.mark.parametrize("kind", CASES)
def test_without_the_compiler(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "lib", None)
    compare(tmp_path, kind, "on_fetch", CUT, 1, False, True, 2)


@pytest.mark.parametrize("kind", CASES)
def test_a_bf16_parameter_has_a_master(kind: str, tmp_path: Path) -> None:
    found = CASES[kind]
    model = built().to(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    theirs = found.theirs(masters, lr=1e-3)
    with opened(tmp_path / "store", CUT) as store:
        zero.page(model, store)
        ours = found.ours(model.parameters(), lr=1e-3)
        for number in range(STEPS):
            x = torch.randn(4, 97, generator=torch.Generator().manual_seed(number))
            ours.zero_grad()
            model(x.bfloat16()).square().mean().backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                grad = ours.grad(parameter)
                assert grad is not None
                master.grad = grad.float()
            ours.step()
            theirs.step()
        states = ours.state_dict()["state"]
        for index, master in enumerate(masters):
            assert torch.equal(states[index].pop("master"), master)
        same_states({"state": states}, theirs.state_dict())
        store.close()


@pytest.mark.parametrize("kind", CASES)
def test_a_run_goes_on_from_a_commit(kind: str, tmp_path: Path) -> None:
    """Committed with an update pending, rolled back and reopened, it is the run that never stopped."""
    found, reference = CASES[kind], built()
    theirs = found.theirs(groups(reference, True), lr=1e-3)
    continued(reference, theirs, range(STEPS))
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(built(), store, name="m")
        ours = found.ours(groups(model, True), lr=1e-3)
        continued(model, ours, range(4))
        zero.commit(model, ours)
        continued(model, ours, range(4, 6))
        zero.rollback(model, ours)
        continued(model, ours, range(4, 5))
        zero.commit(model, ours)
        store.close()
    with opened(tmp_path / "store", WHOLE) as store:
        model = zero.page(built(), store, name="m", existing="resume")
        ours = found.ours(groups(model, True), lr=1e-3)
        zero.resume(model, ours)
        continued(model, ours, range(5, STEPS))
        assert equal(model.state_dict(), reference.state_dict())
        same_states(ours.state_dict(), theirs.state_dict())
        store.close()


def test_a_damaged_chunk_is_noticed(tmp_path: Path) -> None:
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(built(), store, name="m")
        ours = zero.AdamW8bit(model.parameters(), lr=1e-3)
        continued(model, ours, range(2))
        zero.commit(model, ours)
        key = next(key for key in store if "moments8#0" in key)
        store.put(key, store.get(key)[:-1], owner=store.owner_of(key))
        store.commit()
        store.close()
    with opened(tmp_path / "store", CUT) as store:
        with pytest.raises(ManifestError, match="moments8"):
            zero.page(built(), store, name="m", existing="resume")
        store.close()


def test_codes_are_not_exported_for_others(tmp_path: Path) -> None:
    """Before anything is written; safetensors has the values."""
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(built(), store, name="m")
        ours = zero.AdamW8bit(model.parameters(), lr=1e-3)
        continued(model, ours, range(2))
        zero.commit(model, ours)
        store.close()
    with pytest.raises(MisuseError, match=r"keeps 'moments8' as uint8, 520 for 256, which torch-dcp has no place for"):
        export_dcp(tmp_path / "store", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("kind", CASES)
def test_states_of_parameters_in_memory(kind: str, tmp_path: Path) -> None:
    found, reference, model = CASES[kind], built(), built()
    theirs = found.theirs(groups(reference, True), lr=1e-3)
    continued(reference, theirs, range(STEPS))
    with opened(tmp_path / "store", CUT) as store:
        ours = found.ours(groups(model, True), lr=1e-3, store=store)
        continued(model, ours, range(3))
        store.commit()
        store.close()
    with opened(tmp_path / "store", CUT) as store:
        ours = found.ours(groups(model, True), lr=1e-3, store=store, existing="resume")
        continued(model, ours, range(3, 5))
        again = found.ours(groups(model, True), lr=1e-3, store=store, name="other")
        again.load_state_dict(ours.state_dict())
        continued(model, again, range(5, STEPS))
        assert equal(model.state_dict(), reference.state_dict())
        same_states(again.state_dict(), theirs.state_dict())
        store.close()


@pytest.mark.parametrize("kind", CASES)
def test_state_dicts_are_loaded(kind: str, tmp_path: Path) -> None:
    found, reference = CASES[kind], built()
    theirs = found.theirs(groups(reference, True), lr=1e-3)
    continued(reference, theirs, range(6))
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(built(), store)
        ours = found.ours(groups(model, True), lr=1e-3)
        continued(model, ours, range(3))
        saved, values = copy.deepcopy(ours.state_dict()), {name: v.clone() for name, v in model.state_dict().items()}
        continued(model, ours, range(7, 9))
        model.load_state_dict(values)
        ours.load_state_dict(saved)
        continued(model, ours, range(3, 6))
        assert equal(model.state_dict(), reference.state_dict())
        same_states(ours.state_dict(), theirs.state_dict())
        store.close()


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_from_fp32_and_back(kind: str, store: TieredStore) -> None:
    """What torch's AdamW had is encoded when it is loaded; what the codes say goes back to torch's AdamW."""
    found, reference = CASES[kind], built()
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True)
    continued(reference, theirs, range(3))
    model = zero.page(copy.deepcopy(reference), store)
    ours = found.ours(model.parameters(), lr=1e-3)
    ours.load_state_dict(theirs.state_dict())
    made = found.theirs(reference.parameters(), lr=1e-3)
    states, floats = ours.state_dict()["state"], ours.float_state_dict()  # type: ignore[attr-defined]
    for index, parameter in enumerate(reference.parameters()):
        kept = {}
        for name in ("exp_avg", "exp_avg_sq"):
            kept.update(made.keep(name, theirs.state[parameter][name]))
            widened = made.widen(name, kept, parameter)
            assert torch.equal(floats["state"][index][name], widened)
            theirs.state[parameter][name].copy_(widened)
        assert isinstance(made, Coded)
        assert torch.equal(states[index][made.kept], made.records(kept))
    back = torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True)
    back.load_state_dict(floats)
    same_states(back.state_dict(), theirs.state_dict())
    with pytest.raises(MisuseError, match="has no 'exp_avg': give what float_state_dict"):
        zero.AdamW(model.parameters(), lr=1e-3).load_state_dict(ours.state_dict())


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_experts_that_miss_steps(kind: str, tmp_path: Path) -> None:
    found = CASES[kind]
    torch.manual_seed(0)
    reference = Experts()
    model = copy.deepcopy(reference)
    theirs = found.theirs(reference.parameters(), lr=1e-3)
    with opened(tmp_path / "store", CUT) as store:
        zero.page(model, store, name="m")
        ours = found.ours(model.parameters(), lr=1e-3)
        continued(reference, theirs, range(6))
        continued(model, ours, range(4))
        saved = copy.deepcopy(ours.state_dict())
        zero.commit(model, ours)
        continued(model, ours, range(1))
        zero.rollback(model, ours)
        ours.load_state_dict(saved)
        continued(model, ours, range(4, 6))
        assert equal(model.state_dict(), reference.state_dict())
        same_states(ours.state_dict(), theirs.state_dict())
        store.close()


def test_a_group_with_fp32_moments(store: TieredStore) -> None:
    """Parameters of one unit have moments of several forms."""
    reference, model = built(), built()
    zero.page(model, store, name="m")
    first, second = groups(reference, True)
    exact, coded = torch.optim.AdamW(first["params"], lr=1e-3, fused=True), Eight(second["params"], lr=1e-3)
    first, second = groups(model, True)
    rule = zero.AdamWRule(1e-3, (0.9, 0.999), 1e-8, 1e-2, False)
    ours = zero.AdamW8bit([{"params": first["params"], "rule": rule}, {"params": second["params"]}], lr=1e-3)
    for number in range(STEPS):
        reference.zero_grad()
        reference.loss(number).backward()
        exact.step()
        coded.step()
        continued(model, ours, range(number, number + 1))
        if number == 4:
            zero.commit(model, ours)
            continued(model, ours, range(1))
            zero.rollback(model, ours)
    assert equal(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("kind", CASES)
def test_the_bytes_of_states(kind: str, tmp_path: Path) -> None:
    with opened(tmp_path / "store", WHOLE) as store:
        model = zero.page(built(), store, name="m")
        ours = CASES[kind].ours(model.parameters(), lr=1e-3)
        continued(model, ours, range(1))
        ours.flush()
        kept = sum(store.spec(key).nbytes for key in store if "#" in key)
        count = sum(p.numel() for p in model.parameters())
        assert CASES[kind].state_bytes * count <= kept <= 1.12 * CASES[kind].state_bytes * count
        store.close()


@dataclass(frozen=True)
class Averages:
    """A rule of one's own, with one state for each block, first, and one for each element."""

    lr: float = 0.5
    granularity = 48

    def state_specs(self, param: TensorSpec) -> dict[str, TensorSpec]:
        return {"mean": TensorSpec("float64", (2,), 8), "ups": TensorSpec("int16", param.shape, 2)}

    def update(self, param: torch.Tensor, grad: torch.Tensor, state: Any, step: int) -> None:
        padded = nn.functional.pad(grad, (0, -len(grad) % 48)).view(-1, 48)
        state["mean"].view(-1, 2).add_(torch.stack((padded.double().mean(1), padded.double().amax(1)), 1))
        state["ups"].add_((grad > 0).to(torch.int16))
        param.sub_(state["mean"].view(-1, 2)[:, 0].repeat_interleave(48)[: len(grad)].float(), alpha=self.lr)


def test_a_rule_of_ones_own_for_blocks(tmp_path: Path) -> None:
    """48 is no part of a chunk."""
    model, memory = built(), built()
    means = [torch.zeros(-(-p.numel() // 48) * 2, dtype=torch.float64) for p in memory.parameters()]
    ups = [torch.zeros(p.numel(), dtype=torch.int16) for p in memory.parameters()]
    with opened(tmp_path / "store", CUT) as store:
        zero.page(model, store)
        ours = zero.Optimizer(model.parameters(), Averages())
        for number in range(3):
            memory.zero_grad()
            memory.loss(number).backward()
            for parameter, mean, up in zip(memory.parameters(), means, ups, strict=True):
                assert parameter.grad is not None
                state = {"mean": mean, "ups": up}
                Averages().update(parameter.detach().view(-1), parameter.grad.flatten(), state, number + 1)
            continued(model, ours, range(number, number + 1))
        assert equal(model.state_dict(), memory.state_dict())
        for state, mean, up in zip(ours.state_dict()["state"].values(), means, ups, strict=True):
            assert torch.equal(state["mean"], mean)
            assert torch.equal(state["ups"].flatten(), up)
        store.close()


def test_what_is_refused(store: TieredStore) -> None:
    model = zero.page(built(), store)
    with pytest.raises(MisuseError, match=r"moments=torch\.float16: they are float32, or bfloat16"):
        zero.AdamW(model.parameters(), moments=torch.float16)
    with pytest.raises(MisuseError, match=r"betas=\(1\.0, 0\.9\) is out of range"):
        zero.AdamW8bit(model.parameters(), betas=(1.0, 0.9))
    coded = zero.AdamW8bit(model.parameters())
    continued(model, coded, range(1))
    state = coded.state_dict()
    state["state"][0]["moments8"] = torch.ones(3, dtype=torch.uint8)
    with pytest.raises(MisuseError, match=r"'moments8' of 'blocks.0.scale' has shape \(3,\)"):
        coded.load_state_dict(state)


WRONG = {
    "short": (lambda v: v[:-1], r"'moments8' of .* has shape \(.*\), and the parameter has shape .*, for which it has"),
    "empty": (lambda v: v[:0], "'moments8' of .* has shape"),
    "twice": (lambda v: torch.cat([v, v]), "'moments8' of .* has shape"),
    "records": (lambda v: v.view(-1, 520), "'moments8' of .* has shape"),
    "one": (lambda v: torch.tensor([7], dtype=torch.uint8), "'moments8' of .* has shape"),
    "floats": (lambda v: v.float(), r"'moments8' of .* is torch.float32, .*: torch.uint8 is expected"),
    "signed": (lambda v: v.to(torch.int8), "'moments8' of .* is torch.int8"),
    "meta": (lambda v: v.to("meta"), "'moments8' of .* on meta"),
    "list": (lambda v: v.tolist(), "'moments8' of .* is list: a tensor is expected"),
    "none": (lambda v: None, "has no 'moments8'"),
}


@pytest.mark.parametrize("resident", [False, True], ids=["paged", "resident"])
@pytest.mark.parametrize("how", WRONG)
def test_wrong_records_are_refused_and_nothing_changes(store: TieredStore, how: str, resident: bool) -> None:
    model = built() if resident else zero.page(built(), store)
    coded = zero.AdamW8bit(model.parameters(), **({"store": store} if resident else {}))
    continued(model, coded, range(2))
    good, wrong = copy.deepcopy(coded.state_dict()), copy.deepcopy(coded.state_dict())
    change, says = WRONG[how]
    wrong["state"][1]["moments8"] = change(wrong["state"][1]["moments8"])
    with pytest.raises(MisuseError, match=says):
        coded.load_state_dict(wrong)
    same_states(coded.state_dict(), good)
    coded.load_state_dict(good)


@pytest.mark.parametrize("resident", [False, True], ids=["paged", "resident"])
@pytest.mark.parametrize("step", [-3, 1.5, "x", math.nan, torch.ones(2)], ids=str)
def test_a_number_of_steps_that_is_none(store: TieredStore, step: Any, resident: bool) -> None:
    model = built() if resident else zero.page(built(), store)
    ours = zero.AdamW(model.parameters(), **({"store": store} if resident else {}))
    continued(model, ours, range(2))
    good, wrong = copy.deepcopy(ours.state_dict()), copy.deepcopy(ours.state_dict())
    wrong["state"][1]["step"] = step
    with pytest.raises(MisuseError, match=r"'step' of this state is .*: it is how many steps were made"):
        ours.load_state_dict(wrong)
    same_states(ours.state_dict(), good)


def test_slices_that_end_within_a_block(tmp_path: Path) -> None:
    class Odd(Experts):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(16, 127, 48) / 8)
            self.down = nn.Parameter(torch.randn(16, 48, 127) / 8)

    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(Odd(), store)
        with pytest.raises(MisuseError, match="divided among slices of 6096 elements, each of which ends within a block"):
            zero.AdamW8bit(model.parameters())
        store.close()


def on_a_rank(rank: int, folder: Path, kinds: list[str], stages: list[str]) -> list[tuple[Any, Any]]:
    """Train on one loss, so that the mean of the gradients is that of one process; commit, go back, and go on."""
    torch.set_num_threads(1)
    made = []
    for stage in stages:
        for kind in kinds:
            with zero.open_store(folder / f"{stage}-{kind}", dram="2MiB") as store:
                model = zero.page(built(), store, name="m", stage=getattr(zero, stage)())
                ours = CASES[kind].ours(model.parameters(), lr=1e-3)
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
                made.append((model.state_dict(), {i: dict(s) for i, s in ours.state_dict()["state"].items()}))
                store.close()
    return made


def on_other_ranks(rank: int, folder: Path, kinds: list[str], stages: list[str]) -> list[tuple[Any, Any]]:
    """Go on with what other ranks committed."""
    torch.set_num_threads(1)
    made = []
    for stage in stages:
        for kind in kinds:
            with zero.open_store(folder / f"{stage}-{kind}", dram="2MiB") as store:
                source = folder.parent / "4" / f"{stage}-{kind}"
                model = zero.page(built(), store, name="m", stage=zero.Stage3(), existing="resume", source=source)
                ours = CASES[kind].ours(model.parameters(), lr=1e-3)
                zero.resume(model, ours)
                continued(model, ours, range(4, 6))
                made.append((model.state_dict(), {i: dict(s) for i, s in ours.state_dict()["state"].items()}))
                store.close()
    return made


def over_ranks(tmp_path: Path, sizes: tuple[int, int], kinds: list[str], stages: list[str]) -> None:
    for size, scenario, steps in (sizes[0], on_a_rank, 4), (sizes[1], on_other_ranks, 6):
        results = on_ranks(size, scenario, tmp_path / str(steps), kinds, stages)
        for kind, found in zip(kinds * len(stages), zip(*results, strict=True), strict=True):
            reference = built()
            theirs = CASES[kind].theirs(reference.parameters(), lr=1e-3)
            averaged(reference, theirs, sizes[0], range(4))
            averaged(reference, theirs, sizes[1], range(4, steps))
            for values, states in found:
                assert equal({name: value.clone() for name, value in values.items()}, reference.state_dict())
                same_states({"state": states}, theirs.state_dict())


def test_ranks(tmp_path: Path) -> None:
    """Shares end where blocks do, so two ranks, and then three, have what one process has."""
    over_ranks(tmp_path, (2, 3), ["8bit"], ["Stage3"])


@pytest.mark.soak
def test_ranks_of_all_kinds(tmp_path: Path) -> None:
    over_ranks(tmp_path, (3, 2), list(CASES), ["Stage1", "Stage2", "Stage3"])


def in_memory_of_a_rank(rank: int, folder: Path, kinds: list[str]) -> list[Any]:
    """Parameters in memory, the same on all ranks, each of which has the states of its share."""
    torch.set_num_threads(1)
    made = []
    for kind in kinds:
        with TieredStore.open(folder / f"{kind}{rank}", dram="1MiB") as store:
            model = built()
            ours = CASES[kind].ours(model.parameters(), lr=1e-3, store=store, stage=zero.Stage1())
            continued(model, ours, range(2))
            saved = copy.deepcopy(ours.state_dict())
            store.commit()
            ours = CASES[kind].ours(model.parameters(), lr=1e-3, store=store, stage=zero.Stage1(), existing="resume")
            continued(model, ours, range(2, 3))
            values = {name: value.clone() for name, value in model.state_dict().items()}
            again = CASES[kind].ours(model.parameters(), lr=1e-3, store=store, stage=zero.Stage1(), name="again")
            again.load_state_dict(ours.state_dict())
            continued(model, again, range(3, 4))
            made.append((values, saved, model.state_dict(), again.state_dict()["state"]))
            store.close()
    return made


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_parameters_in_memory(size: int, tmp_path: Path) -> None:
    kinds = ["8bit", "4bit"]
    results = on_ranks(size, in_memory_of_a_rank, tmp_path, kinds)
    for kind, found in zip(kinds, zip(*results, strict=True), strict=True):
        reference = built()
        theirs = CASES[kind].theirs(reference.parameters(), lr=1e-3)
        continued(reference, theirs, range(2))
        after_two = copy.deepcopy(theirs.state_dict())
        continued(reference, theirs, range(2, 4))
        for _, saved, values, states in found:
            same_states(saved, after_two)
            assert equal(values, reference.state_dict())
            same_states({"state": states}, theirs.state_dict())


def sharded_on_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    """``fully_shard``: the matrices' shards end where blocks do, the vectors' do not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 32))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    matrices, vectors = ([p for p in model.parameters() if p.dim() == size] for size in (2, 1))
    with TieredStore.open(folder / f"store{rank}", dram="1MiB") as store:
        with pytest.raises(MisuseError, match="is a DTensor whose shards end within a block"):
            zero.AdamW8bit(model.parameters(), store=store)
        with pytest.raises(MisuseError, match="is a DTensor, of which each rank has a shard: page the model"):
            zero.Muon(matrices, store=store)
        rule = zero.AdamWRule(1e-3, (0.9, 0.999), 1e-8, 1e-2, False)
        ours = zero.AdamW8bit([{"params": matrices}, {"params": vectors, "rule": rule}], lr=1e-3, store=store)
        for number in range(5):
            ours.zero_grad()
            x = torch.randn(4, 128, generator=torch.Generator().manual_seed(number))
            model(x).square().mean().backward()
            ours.step()
            if number == 2:
                saved = ours.state_dict()
                ours = zero.AdamW8bit(
                    [{"params": matrices}, {"params": vectors, "rule": rule}], lr=1e-3, store=store, name="again"
                )
                ours.load_state_dict(saved)
        store.close()
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


@FULLY_SHARDS
def test_shards_of_fully_shard(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 32))
    coded = Eight([p for p in reference.parameters() if p.dim() == 2], lr=1e-3)
    exact = torch.optim.AdamW([p for p in reference.parameters() if p.dim() == 1], lr=1e-3, fused=True)
    for number in range(5):
        reference.zero_grad()
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(number))
        reference(x).square().mean().backward()
        coded.step()
        exact.step()
    for values in on_ranks(2, sharded_on_a_rank, tmp_path):
        assert equal(values, reference.state_dict())


@pytest.mark.soak
def test_ranks_round_by_the_same_chance(tmp_path: Path) -> None:
    reference = narrow_model()
    averaged(reference, ByChance(reference, Eight, seed=7), 2, range(4))
    for values in on_ranks(2, by_chance_on_a_rank, tmp_path):
        assert equal(values, reference.state_dict())


def by_chance_on_a_rank(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    with zero.open_store(folder / "store", dram="2MiB") as store:
        model = zero.page(narrow_model(), store, name="m")
        ours = zero.AdamW8bit(model.parameters(), lr=1e-3, rounding="stochastic", seed=7)
        continued(model, ours, range(2))
        zero.commit(model, ours)
        continued(model, ours, range(1))
        zero.rollback(model, ours)
        continued(model, ours, range(2, 4))
        made = {name: value.clone() for name, value in model.state_dict().items()}
        store.close()
    return made


def of_an_earlier_release(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiered.zero.paging.units.SHARE_STEP", 32)
        with zero.open_store(folder / "store", dram="2MiB") as store:
            model = zero.page(built(), store, name="m")
            ours = zero.AdamW(model.parameters(), lr=1e-3)
            continued(model, ours, range(2))
            zero.commit(model, ours)
            assert "step" not in read_record(store, "m")["layout"]
            store.close()
    with zero.open_store(folder / "store", dram="2MiB") as store:
        model = zero.page(built(), store, name="m", existing="resume")
        with pytest.raises(MisuseError, match="ranks at multiples of 32 elements, as earlier releases did"):
            zero.AdamW8bit(model.parameters())
        zero.resume(model, ours := zero.AdamW(model.parameters(), lr=1e-3))
        continued(model, ours, range(2, 4))
        zero.commit(model, ours)
        reference = built()
        continued(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True), range(4))
        assert equal({name: value.clone() for name, value in model.state_dict().items()}, reference.state_dict())
        store.close()
    with zero.open_store(folder / "next", dram="2MiB") as store:  # divided anew, at multiples of a block
        model = zero.page(built(), store, name="m", existing="resume", source=folder / "store")
        saved = zero.AdamW(model.parameters(), lr=1e-3)
        zero.resume(model, saved)
        coded = zero.AdamW8bit(model.parameters())
        coded.load_state_dict(saved.state_dict())
        continued(model, coded, range(1))
        store.close()


def test_ranks_of_an_earlier_release(tmp_path: Path) -> None:
    on_ranks(2, of_an_earlier_release, tmp_path)


@pytest.mark.parametrize("kind", CASES)
def test_an_export_applies_what_is_pending(kind: str, tmp_path: Path) -> None:
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(built(), store, name="m")
        ours = CASES[kind].ours(model.parameters(), lr=1e-3)
        continued(model, ours, range(3))
        zero.commit(model, ours)
        values = {name: value.clone() for name, value in model.state_dict().items()}
        store.close()
    with StoreAtRest(tmp_path / "store") as store:
        files = export_at_rest(store, tmp_path / "out")
    found = {name: value for file in files for name, value in load_file(tmp_path / "out" / file).items()}
    assert equal(found, values)


# Rounding by chance


def rounded_by_chance(values: torch.Tensor, seed: int, step: int, name: str) -> torch.Tensor:
    """Written down from docs/optimizers.md, in numbers of Python's size."""
    key = int.from_bytes(hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=4).digest(), "little")
    number = (np.arange(values.numel(), dtype=np.uint64) * 0x9E3779B9 + key) % 2**32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        number = (number ^ number >> np.uint64(shift)) * factor % 2**32
    bits = values.flatten().numpy().view(np.uint32).astype(np.uint64)
    upper = ((bits + (number >> np.uint64(16))) >> np.uint64(16)).astype(np.uint32) << np.uint32(16)
    return torch.from_numpy(upper.view(np.float32)).view(values.shape).bfloat16()


class ByChance(torch.optim.Optimizer):
    """``kind`` in fp32, of bf16 parameters whose only copy is what each step leaves, rounded."""

    def __init__(self, model: nn.Module, kind: type[Reference], seed: int) -> None:
        self.named = dict(model.named_parameters())
        super().__init__(list(self.named.values()), {"lr": 1e-3})
        self.wide = {name: nn.Parameter(value.detach().float()) for name, value in self.named.items()}
        self.inner, self.seed = kind(list(self.wide.values()), lr=1e-3), seed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for name, parameter in self.named.items():
            self.wide[name].copy_(parameter)
            assert parameter.grad is not None
            self.wide[name].grad = parameter.grad.float()
        self.inner.step()
        for name, parameter in self.named.items():
            step = int(self.inner.state[self.wide[name]]["step"])
            parameter.copy_(rounded_by_chance(self.wide[name].detach(), self.seed, step, name))


class InBFloat16(Small):
    def loss(self, number: int) -> torch.Tensor:
        x = torch.randn(4, 97, generator=torch.Generator().manual_seed(number)).bfloat16()
        loss: torch.Tensor = self(x).float().square().mean()
        return loss


def narrow_model() -> InBFloat16:
    torch.manual_seed(0)
    return InBFloat16().to(torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "update"),
    quick([("bfloat16", "on_fetch"), ("8bit", "in_backward"), ("4bit", "on_fetch")], [("8bit", "in_backward")]),
)
def test_rounding_by_chance(kind: str, update: str, tmp_path: Path) -> None:
    """No master is kept; a run that was committed, left, and taken up with other chunks has the bits of one in memory."""
    found, reference = CASES[kind], narrow_model()
    theirs = ByChance(reference, found.theirs, seed=7)
    continued(reference, theirs, range(STEPS))
    settings: dict[str, Any] = {"lr": 1e-3, "rounding": "stochastic", "seed": 7, "update": update}
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(narrow_model(), store, name="m")
        ours = found.ours(model.parameters(), **settings)
        continued(model, ours, range(3))
        zero.commit(model, ours)
        continued(model, ours, range(2))
        zero.rollback(model, ours)
        continued(model, ours, range(3, 5))
        zero.commit(model, ours)
        assert not any("/lo#" in key or "/master#" in key for key in store)
        store.close()
    with zero.open_store(tmp_path / "other", dram=WHOLE) as store:
        source = tmp_path / "store"
        model = zero.page(narrow_model(), store, name="m", existing="resume", source=source)
        ours = found.ours(model.parameters(), **settings)
        zero.resume(model, ours)
        continued(model, ours, range(5, 7))
        saved = copy.deepcopy(ours.state_dict())
        store.close()
    with opened(tmp_path / "store", CUT) as store:
        model = zero.page(narrow_model(), store, name="m", existing="resume")
        ours = found.ours(model.parameters(), **settings)
        zero.resume(model, ours)
        continued(model, ours, range(5, 7))
        same_states(ours.state_dict(), saved)
        ours.load_state_dict(saved)
        continued(model, ours, range(7, STEPS))
        assert equal(model.state_dict(), reference.state_dict())
        same_states(ours.state_dict(), theirs.inner.state_dict())
        store.close()


def test_rounding_by_chance_has_the_mean_of_what_it_rounds() -> None:
    value = torch.full((1 << 16,), 1.0 + 2**-9)  # a quarter of the way to the next number of bfloat16
    made = torch.empty(1 << 16, dtype=torch.bfloat16)
    moments.round_by_chance(value, made, 12345, 0)
    up = float((made > 1).double().mean())
    assert abs(up - 0.25) < 6 * (0.25 * 0.75 / (1 << 16)) ** 0.5
    assert set(made.tolist()) == {1.0, 1.0 + 2**-7}
    signs = torch.stack([torch.empty(1 << 12, dtype=torch.bfloat16) for _ in range(8)])
    for key, row in enumerate(signs):
        moments.round_by_chance(value[: 1 << 12], row, key, 0)
    between = torch.corrcoef((signs > 1).double())
    assert float((between - torch.eye(8, dtype=torch.float64)).abs().max()) < 0.1, "keys are independent"


def test_rounding_by_chance_in_c_and_torch() -> None:
    assert hasattr(moments.lib, "moments_round"), "the kernels were not built: run make setup"
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5000, generator=generator) * torch.exp(torch.randn(5000, generator=generator) * 20)
    values[:4] = torch.tensor([3.4e38, -3.4028234e38, 0.0, -0.0])
    for key, first in ((1, 0), (2**32 - 1, 2**32 - 2500), (77, 2**33 + 5)):
        made = [torch.empty(5000, dtype=torch.bfloat16) for _ in range(2)]
        moments.round_by_chance(values, made[0], key, first)
        moments.round_by_chance_by_torch(values, made[1], key, first)
        assert torch.equal(made[0].view(torch.int16), made[1].view(torch.int16))
        assert bool(made[0].isfinite().all())
        assert float(((made[0].double() - values.double()) / values.double().abs().clamp(1e-38)).abs().max()) < 2**-7


@pytest.mark.soak
def test_rounding_by_chance_of_experts_that_miss_steps(tmp_path: Path) -> None:
    class Narrow(Experts):
        def loss(self, number: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(number)
            x, chosen = torch.randn(6, 64, generator=generator), torch.randint(0, 16, (6,), generator=generator)
            return self(x.bfloat16(), chosen).float().square().mean()

    torch.manual_seed(0)
    reference = Narrow().to(torch.bfloat16)
    model = copy.deepcopy(reference)
    continued(reference, ByChance(reference, Eight, seed=0), range(6))
    with opened(tmp_path / "store", CUT) as store:
        zero.page(model, store)
        ours = zero.AdamW8bit(model.parameters(), lr=1e-3, rounding="stochastic")
        continued(model, ours, range(6))
        assert equal(model.state_dict(), reference.state_dict())
        store.close()


def test_rounding_by_chance_is_for_bfloat16(store: TieredStore) -> None:
    model = zero.page(built(), store)
    with pytest.raises(MisuseError, match=r"rounds bfloat16 parameters by chance, and 'blocks.0.scale' is torch.float32"):
        zero.AdamW8bit(model.parameters(), rounding="stochastic")
    with pytest.raises(MisuseError, match=r"'stochastic', with moments=torch\.bfloat16"):
        zero.AdamW(model.parameters(), rounding="stochastic")
    with pytest.raises(MisuseError, match="is 'stochastic' or None, not 'nearest'"):
        zero.AdamW4bit(model.parameters(), rounding="nearest")


# The codes


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    usual = torch.randn(3000, generator=generator)
    strange = usual.clone()
    strange[3], strange[900], strange[256:512], strange[600:1000] = torch.nan, torch.inf, 0.0, -0.0
    wide = usual * torch.exp(torch.randn(3000, generator=generator) * 8)
    return [usual, strange, wide, usual * 1e-42, usual * 1e38, usual[:1], usual[:129], torch.full((300,), -2.0)]


@pytest.mark.parametrize("name", ["MOMENT_8", "SQUARE_8", "MOMENT_4", "SQUARE_4"])
def test_the_kernel_gives_the_bits_of_torch(name: str) -> None:
    code: moments.BlockCode = getattr(moments, name)
    assert hasattr(moments.lib, "moments_encode8"), "the kernels were not built: run make setup"
    every = torch.tensor(code.values).repeat_interleave(3)
    nearby = torch.nextafter(every, torch.tensor([-9.0, 0.0, 9.0]).repeat(len(code.values)))  # also of the bounds
    ends = code._bounds[:-1].repeat_interleave(3)
    bounds = torch.nextafter(ends, torch.tensor([-9.0, 0.0, 9.0]).repeat(len(code.values) - 1))
    shares = torch.cat((nearby, bounds)).clamp(-1, 1)
    for values in [*samples(), torch.nn.functional.pad(shares.view(-1, 3), (1, 0), value=1.0).flatten()]:
        made = []
        for encode, decode in ((code.encode, code.decode), (code.encode_by_torch, code.decode_by_torch)):
            records = torch.full((code.blocks(values.numel()), code.bytes_in_block + 12), 99, dtype=torch.uint8)
            codes, scales = records[:, 4:-8], records[:, -8:-4].view(torch.float32)[:, 0]
            out = torch.full_like(values, 9.0)
            encode(values, codes, scales)
            decode(codes, scales, out)
            assert (torch.cat((records[:, :4], records[:, -4:]), 1) == 99).all(), "what lies between is not written"
            made.append((records, out.isnan(), out.nan_to_num(0)))
        assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_maps_are_those_of_the_sources() -> None:
    """The 16 numbers that torchao's 4-bit AdamW prints, and the ends of the maps of 8 bits."""
    four = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875]
    assert moments.MOMENT_4.values == pytest.approx([*[-x for x in reversed(four)], 0.0, *four, 1.0])
    assert torch.equal(torch.tensor(moments.MOMENT_8.values), torch.from_numpy(dynamic_map(8, True)))
    assert torch.equal(torch.tensor(moments.SQUARE_8.values), torch.from_numpy(dynamic_map(8, False)))
    assert moments.MOMENT_8.values[-2:] == pytest.approx([0.9929688, 1.0])
    assert moments.SQUARE_8.values[:2] == pytest.approx([0.0, 3.25e-7])


# torchao, as a second oracle


@pytest.mark.parametrize("bits", [8, 4])
def test_torchao_has_the_same_codes_and_steps(bits: int, store: TieredStore) -> None:
    """Its maps differ from these in the last bits (their middles are computed in float32), and so may a code whose element lies
    on a bound. Its AdamW adds up in another order than torch's fused one."""
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed: pip install --no-deps torchao")
    state_of = getattr(importlib.import_module(f"torchao.optim.subclass_{bits}bit"), f"OptimState{bits}bit")
    made: moments.BlockCode
    for signed, made in ((True, getattr(moments, f"MOMENT_{bits}")), (False, getattr(moments, f"SQUARE_{bits}"))):
        given = torch.randn(64 * made.block, generator=torch.Generator().manual_seed(3))
        given = given if signed else given.square()
        theirs = state_of.zeros(given.shape, signed, made.block)
        theirs.copy_(given)
        assert torch.allclose(theirs.qmap, torch.tensor(made.values), rtol=1e-6, atol=0)
        codes, scales = torch.empty((64, made.bytes_in_block), dtype=torch.uint8), torch.empty(64)
        made.encode(given, codes, scales)
        assert torch.equal(scales, theirs.scale)
        ours = torch.empty_like(given)
        made.decode(codes, scales, ours)
        apart = (ours - theirs.dequantize()).abs() > 1e-6 * scales.repeat_interleave(made.block)
        assert int(apart.sum()) <= len(given) // 1000
    torch.manual_seed(0)
    model = nn.Linear(256, 64, bias=False)
    start = model.weight.detach().clone()
    memory, exact = copy.deepcopy(model), copy.deepcopy(model)
    torchaos = getattr(optim, f"AdamW{bits}bit")(memory.parameters(), lr=1e-3, weight_decay=1e-2)
    plain = torch.optim.AdamW(exact.parameters(), lr=1e-3, weight_decay=1e-2)
    zero.page(model, store)
    ours_ = getattr(zero, f"AdamW{bits}bit")(model.parameters(), lr=1e-3, weight_decay=1e-2)
    with torch.compiler.set_stance("force_eager"):
        for number in range(STEPS):
            x = torch.randn(16, 256, generator=torch.Generator().manual_seed(number))
            for one, optimizer in ((memory, torchaos), (exact, plain), (model, ours_)):
                optimizer.zero_grad()
                one(x).square().mean().backward()
                optimizer.step()
    found = model.state_dict()["weight"] - start
    apart = float((found - (memory.weight.detach() - start)).norm() / found.norm())
    lossy = float((found - (exact.weight.detach() - start)).norm() / found.norm())
    assert apart < lossy / 3, (apart, lossy)
