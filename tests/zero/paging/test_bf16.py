"""bf16 parameters: the master is the parameter and 16 low bits, exactly; training has the bits of training in memory."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.quick import quick
from tests.zero.harness import STEPS, equal, train
from tests.zero.models import Tied, parameter_groups
from tests.zero.narrow import MasterAdamW, Narrow, half_up
from tiered import MisuseError, TieredStore, zero
from tiered.zero.paging.update import Pending, all_finite, join, split


def patterns() -> torch.Tensor:
    """fp32 by bit pattern, all finite: every sign, exponent and upper mantissa, with low halves at the ties and at random."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    generator = torch.Generator().manual_seed(0)
    ties = [upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    bits = torch.cat([*ties, *(upper + torch.randint(0, 1 << 16, (1 << 16,), generator=generator) for _ in range(4))])
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    values = bits.view(torch.float32)
    return values[torch.isfinite(values)]


def test_split_and_join_are_exact_for_every_exponent_tie_and_subnormal() -> None:
    master = patterns()
    high, low = torch.empty(master.numel(), dtype=torch.bfloat16), torch.empty(master.numel(), dtype=torch.int16)
    split(master.clone(), high, low)
    assert torch.equal(high.view(torch.int16), half_up(master).view(torch.int16))
    back, spare = torch.empty_like(master), torch.empty_like(master)
    join(high, low, back, spare)
    assert torch.equal(back.view(torch.int32), master.view(torch.int32)), "also the sign of zero"


def test_it_rounds_like_torch_but_at_ties() -> None:
    master = patterns()
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(half_up(master[~tie]), master[~tie].to(torch.bfloat16))
    assert (half_up(master[tie]).float().abs() > master[tie].abs()).all(), "away from zero"


def test_a_loaded_value_is_its_own_master() -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    master, spare = torch.empty(every.numel()), torch.empty(every.numel())
    join(every, torch.zeros(every.numel(), dtype=torch.int16), master, spare)
    assert torch.equal(master.view(torch.int32), every.float().view(torch.int32))


def test_what_is_finite() -> None:
    assert all_finite(torch.empty(0))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.randn(1000).to(dtype)
        assert all_finite(values)
        for bad in ("nan", "inf", "-inf"):
            spoilt = values.clone()
            spoilt[321] = float(bad)
            assert not all_finite(spoilt)


@pytest.mark.parametrize("kind", quick(["tied", "checkpoint", "reentrant", "narrow"], ["reentrant", "narrow"]))
def test_training_is_that_of_memory_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """Clipping, accumulation, a scheduler, two groups, eviction everywhere; masters by ``state_dict`` too."""
    torch.manual_seed(0)
    mode = "plain" if kind == "tied" else kind
    reference = Narrow() if kind == "narrow" else Tied(width=64, layers=2, mode=mode).to(torch.bfloat16)
    paged = copy.deepcopy(reference)
    masters = MasterAdamW(parameter_groups(reference), lr=1e-3)
    mixed = len({p.dtype for p in reference.parameters()}) > 1

    def clip(norm: float) -> torch.Tensor:
        if mixed:
            return torch.zeros(())
        return torch.nn.utils.clip_grad_norm_(reference.parameters(), norm)

    expected = train(reference, masters, clip)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        zero.page(paged, store)
        optimizer = zero.AdamW(parameter_groups(paged), lr=1e-3)
        numbers = train(paged, optimizer, clip if mixed else optimizer.clip_grad_norm_)
        evictions = store.statistics().evictions
        assert numbers == expected
        assert equal(reference.state_dict(), paged.state_dict())
        ours, theirs = optimizer.state_dict()["state"], masters.state_dict()["state"]
        assert ours.keys() == theirs.keys()
        narrow = {id(master) for _, master in masters.pairs}
        flat = [master for group in masters.param_groups for master in group["params"]]
        for index, state in theirs.items():
            whole = {**state, "master": flat[index].detach()} if id(flat[index]) in narrow else state
            assert equal(whole, ours[index])
        kept = {key.split("/")[-1].split("#")[0] for key in store if "#" in key}
        assert kept == ({"m", "v", "lo", "master"} if mixed else {"m", "v", "lo"})
        assert all(store.spec(key).dtype == "int16" for key in store if "/lo#" in key)
        store.close()
    if kind != "narrow":
        assert evictions > 5 * STEPS, "the budget was meant to be too small to keep anything"


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        model.loss(step).backward()  # type: ignore[operator]
        optimizer.step()


def test_going_on_from_state_dicts_keeps_the_low_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        first = zero.page(Narrow(), store, name="first")
        optimizer = zero.AdamW(first.parameters(), lr=1e-4)
        steps(first, optimizer, 0, 4)
        second = zero.page(Narrow(), store, name="second")
        other = zero.AdamW(second.parameters(), lr=1.0)
        second.load_state_dict(first.state_dict())
        other.load_state_dict(optimizer.state_dict())
        for model, adam in ((first, optimizer), (second, other)):
            steps(model, adam, 4, 8)
        assert equal(first.state_dict(), second.state_dict())
        for left, right in zip(optimizer.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True):
            assert equal(left, right)
        second.load_state_dict({name: value + 1 for name, value in first.state_dict().items()})
        other.load_state_dict(optimizer.state_dict())
        states, values = other.state_dict()["state"], second.state_dict()
        for index, parameter in enumerate(second.parameters()):
            state = states.get(index)
            if state is not None and "master" in state:
                name = next(n for n, p in second.named_parameters() if p is parameter)
                assert torch.equal(state["master"], values[name].float()), "a loaded value is its own master"


@pytest.mark.parametrize("bad", quick(["inf", "-inf", "nan"], ["-inf", "nan"]))
def test_a_gradient_that_is_not_finite_raises_at_step_and_changes_nothing(tmp_path: Path, bad: str) -> None:
    torch.manual_seed(0)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = zero.page(Narrow(), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-3)
        steps(model, optimizer, 0, 2)
        values, states = model.state_dict(), optimizer.state_dict()["state"]
        optimizer.zero_grad()
        model.loss(2).backward()
        weight = model.layers[1].parts["up"].weight
        weight.grad = torch.full(weight.shape, float(bad), dtype=torch.bfloat16)
        with pytest.raises(MisuseError, match=r"'layers\.1\.parts\.up\.weight' is not finite"):
            optimizer.step()
        assert equal(values, model.state_dict())
        for index, state in optimizer.state_dict()["state"].items():
            assert equal(state, states[index])
        steps(model, optimizer, 3, 4)
        assert not equal(values, model.state_dict())


def test_a_master_that_overflows_raises_and_its_piece_is_as_it_was(tmp_path: Path) -> None:
    """A finite gradient, but a learning rate beyond all reason."""
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = zero.page(nn.Linear(8, 8, bias=False).to(torch.bfloat16), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-3)
        optimizer.zero_grad()
        model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.flush()

        def stored() -> list[torch.Tensor]:
            return [store.get(key) for key in sorted(store) if not key.endswith("/grad")]

        before = stored()
        model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.param_groups[0]["lr"] = 1e39
        optimizer.step()
        for _ in range(2):
            with pytest.raises(MisuseError, match="infinite or NaN"):
                optimizer.flush()
        assert all(torch.equal(a, b) for a, b in zip(before, stored(), strict=True))
        store.close()


def test_an_update_that_was_interrupted_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pieces of a chunk: none is updated twice."""
    torch.manual_seed(0)
    reference = Narrow()
    paged = copy.deepcopy(reference)
    masters = MasterAdamW([{"params": list(reference.parameters())}], lr=1e-3)
    steps(reference, masters, 0, 3)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        zero.page(paged, store)
        optimizer = zero.AdamW(paged.parameters(), lr=1e-3)
        steps(paged, optimizer, 0, 2)
        paged.state_dict()
        optimizer.zero_grad()
        paged.loss(2).backward()
        optimizer.step()
        real, calls = Pending.begin, 0

        def interrupted(pending: Pending) -> None:
            nonlocal calls
            calls += 1
            if calls % 2 == 0:
                raise KeyboardInterrupt
            real(pending)

        with monkeypatch.context() as patch:
            patch.setattr(Pending, "begin", interrupted)
            for _ in range(100):
                try:
                    optimizer.flush()
                    break
                except KeyboardInterrupt:
                    pass
        assert calls > 10
        assert equal(reference.state_dict(), paged.state_dict())


def test_a_write_restarts_the_master_of_what_was_written_alone(tmp_path: Path) -> None:
    """The parameters of a unit that nobody wrote to keep the bits below their values' last place."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 7), nn.LayerNorm(7)).to(torch.bfloat16)
    reference[2].half()
    model = copy.deepcopy(reference)
    masters = MasterAdamW([{"params": list(reference.parameters())}], lr=1e-3)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        zero.page(model, store)
        ours = zero.AdamW(model.parameters(), lr=1e-3)
        for number in range(8):
            x = torch.randn(5, 40).bfloat16()
            for one, optimizer in ((reference, masters), (model, ours)):
                hidden = one[2](one[1](one[0](x)).half()).bfloat16()
                one[3](hidden).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert equal(reference.state_dict(), model.state_dict())
            found = ours.state_dict()["state"]
            assert all(torch.equal(found[index]["master"], master) for index, (_, master) in enumerate(masters.pairs))
            for one in (reference, model):
                with torch.no_grad():
                    if number == 1:
                        one[0].bias.zero_()
                    elif number == 3:
                        one[0].weight.add_(1)
                    elif number == 4:
                        one.load_state_dict({name: value.clone() for name, value in one.state_dict().items()})  # the same
                    elif number == 5:
                        one[2].weight.copy_(torch.full((7, 60), 2.0))
        store.close()
