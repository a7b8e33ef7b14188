"""What a model has beside what was paged: added and replaced after ``zero.page``, trained by an optimizer of torch, and in each
commit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from safetensors.torch import load_file
from torch import nn

from tests.quick import quick
from tests.zero.models import Tied
from tests.zero.ranks import on_ranks
from tiered import MisuseError, RankError, TieredStore, zero
from tiered.store.at_rest import StoreAtRest
from tiered.zero.checkpoint.exports import Exported
from tiered.zero.checkpoint.safetensors import export_at_rest

LR = 1e-2


class Scaled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.scale


class Counting(nn.Module):
    """A module with a state of its own, and one that calls leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.weight = 0, nn.Parameter(torch.ones(32))
        self.register_buffer("last", torch.zeros(32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = x * self.weight + self.last
        self.last = y.detach().mean((0, 1))
        return y

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def untied(model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def replaced(model: Any) -> None:
    model.position = nn.Parameter(torch.full_like(model.position, 0.25))


def added(model: Any) -> None:
    model.blocks.append(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), Counting()))
    model.blocks[-1].bn = nn.BatchNorm1d(16)  # takes the 16 tokens for channels


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.blocks[0].out, "weight", Scaled())


def large(model: Any) -> None:
    model.blocks[0].mlp[1] = nn.Linear(32, 128)  # in place of a paged module


def tied(model: Any) -> None:
    model.blocks[1].out.weight = model.blocks[0].out.weight


def all_of_it(model: Any) -> None:
    for change in (untied, replaced, added, parametrized):
        change(model)


CHANGES: list[Callable[[Any], None]] = [all_of_it, large, tied]


class Training:
    """A model that is changed after paging, with an optimizer for each kind of parameters."""

    def __init__(self, store: TieredStore | None, change: Callable[[Any], None], existing: str = "refuse") -> None:
        torch.manual_seed(0)
        self.model: Any = Tied(layers=2)
        if store is not None:
            zero.page(self.model, store, existing=existing)
        paged = list(self.model.parameters())
        change(self.model)
        known = {id(one) for one in paged}
        here = {id(one) for one in self.model.parameters()}
        kind = zero.AdamW if store is not None else torch.optim.AdamW
        self.paged = kind([one for one in paged if id(one) in here], LR, **({} if store is not None else {"fused": True}))
        fresh = [one for one in self.model.parameters() if id(one) not in known]
        self.fresh = torch.optim.AdamW(fresh, LR) if fresh else None

    def step(self, number: int) -> float:
        loss = self.model.loss(number)
        loss.backward()
        for optimizer in (self.paged, self.fresh):
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        return float(loss.item())

    def commit(self) -> int:
        states = None if self.fresh is None else self.fresh.state_dict()
        return zero.commit(self.model, self.paged, extra={"fresh": states})

    def resume(self, generation: int | None = None) -> None:
        if generation is None:
            extra = zero.resume(self.model, self.paged)
        else:
            extra = zero.rollback(self.model, self.paged, generation=generation)
        if self.fresh is not None:
            self.fresh.load_state_dict(extra["fresh"])

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items() if isinstance(value, torch.Tensor)}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("change", quick(CHANGES, [all_of_it]))
def test_a_commit_has_what_was_added_and_replaced(change: Callable[[Any], None], tmp_path: Path) -> None:
    """Bit for bit: in memory, after a rollback, and in another process."""
    reference = Training(None, change)
    expected = [reference.step(number) for number in range(5)]
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        training = Training(store, change)
        seen = [training.step(number) for number in range(2)]
        generation = training.commit()
        saved = training.state()
        seen += [training.step(number) for number in range(2, 5)]
        assert seen == expected
        assert same(training.state(), reference.state())
        training.resume(generation)
        assert same(training.state(), saved)
        assert [training.step(number) for number in range(2, 5)] == expected[2:]
        zero.rollback(training.model, training.paged)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        training = Training(store, change, "resume")
        if change is not tied:
            with pytest.raises(MisuseError, match=r"has '[\w.]+', which had been added, or replaced, .* zero.resume, before"):
                zero.commit(training.model, training.paged)
        training.resume()
        assert same(training.state(), saved)
        assert [training.step(number) for number in range(2, 5)] == expected[2:]
        if change is all_of_it:
            assert training.model.blocks[-1][2].calls == 5
        else:
            zero.export(training.model, tmp_path / "out")
            files = load_file(tmp_path / "out" / "model.safetensors")
            assert all(torch.equal(value, reference.state()[name]) for name, value in files.items())
            once = {value.data_ptr() for value in reference.model.state_dict().values()}
            assert len(files) == len(once)
        store.close()


def test_a_layer_more_or_less_before_paging_is_named(tmp_path: Path) -> None:
    def model(layers: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))

    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        zero.commit(zero.page(model(2), store))
        store.close()
    for layers, says in (
        (3, r"the commit has no '2.weight' \(torch.float32 of shape \(8, 8\)\) and 1 more\. Page"),
        (1, r"the commit has '1.weight' .* and 1 more, which this model has not"),
    ):
        with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
            with pytest.raises(MisuseError, match=says):
                zero.page(model(layers), store, existing="resume")
            store.close()


def test_a_buffer_that_was_expanded_goes_back(tmp_path: Path) -> None:
    def more(model: Any) -> None:
        model.register_buffer("expanded", torch.ones(1).expand(5))

    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        training = Training(store, more)
        training.step(0)
        generation = training.commit()
        training.model.expanded = torch.zeros(1).expand(5)
        training.step(1)
        training.resume(generation)
        assert training.model.expanded.tolist() == [1.0] * 5
        store.close()


def test_a_store_at_rest_is_exported_with_what_was_added(tmp_path: Path) -> None:
    def more(model: Any) -> None:
        model.more = nn.BatchNorm1d(4)

    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        training = Training(store, more)
        training.step(0)
        training.commit()
        expected = training.state()
        store.close()
    with StoreAtRest(tmp_path / "store") as rest:
        export_at_rest(rest, tmp_path / "out")
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in expected if name.startswith("more.")} < files.keys()
    assert all(torch.equal(value, expected[name]) for name, value in files.items())
    with ExitStack() as stack:
        assert set(Exported(tmp_path / "store", None, stack).buffers) >= {name for name in expected if name.startswith("more.")}


def test_a_model_that_lacks_it_or_has_another_is_refused(tmp_path: Path) -> None:
    def head(width: int) -> Callable[[Any], None]:
        return lambda model: model.blocks.append(nn.Linear(32, width))

    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        training = Training(store, head(32))
        training.step(0)
        training.commit()
        store.close()
    for change, complaint in (
        (lambda model: None, r"it has no 'blocks.2.weight', which had been added, or replaced, after zero.page: do so again"),
        (head(33), r"'blocks.2.weight' was \(32, 32\), torch.float32, and is \(33, 32\), torch.float32"),
        (lambda model: (head(32)(model), head(32)(model)), r"that had no 'blocks.3.weight': add it after this call"),
        (lambda model: (head(32)(model), model.blocks[2].half()), r"was \(32, 32\), torch.float32, and is .* torch.float16"),
    ):
        with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
            training = Training(store, change, "resume")  # type: ignore[arg-type]
            with pytest.raises(MisuseError, match=complaint):
                training.resume()
            with pytest.raises(MisuseError, match=r"an export would be without it"):
                zero.export(training.model, tmp_path / "out")
            store.close()


def test_parameters_may_be_read_before_what_is_beside_them_is_loaded(tmp_path: Path) -> None:
    """Reading applies an update that was pending in the commit. Anything else that changes the model is refused."""
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        training = Training(store, untied)
        training.step(0)
        training.commit()
        expected = [training.step(number) for number in (1, 2)]
        store.close()
    for stepping in (False, True):
        with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
            training = Training(store, untied, "resume")
            assert all(parameter.isfinite().all() for parameter in training.model.parameters())
            if stepping:
                training.step(1)
                with pytest.raises(MisuseError, match=r"was trained or changed since it was paged"):
                    training.resume()
            else:
                training.resume()
                assert [training.step(number) for number in (1, 2)] == expected
                assert "model/checkpoint" not in store
            store.close()


def test_what_cannot_be_committed_is_named(tmp_path: Path) -> None:
    class Hooked(nn.Module):
        def __init__(self, added: object) -> None:
            super().__init__()
            self.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}seen": added}))

    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        other: Any = zero.page(nn.Linear(4, 4), store, name="other")
        for more, complaint in (
            (nn.LazyLinear(4), r"'more.weight' was added after zero.page, and has no values yet"),
            (nn.Linear(4, 4, device="meta"), r"'more.weight' was added after zero.page, and has no values yet"),
            (Hooked(torch.zeros(2)), r"'more.seen' of the model's state_dict is neither a parameter nor a buffer"),
            (Hooked("text"), r"'more.seen' of the model's state_dict is neither a parameter nor a buffer"),
            (other, r"parameter 'more.weight' is of another paged model, 'other', than 'model'"),
        ):
            training = Training(store, lambda model: None, "overwrite")
            training.model.more = more
            with pytest.raises(MisuseError, match=complaint):
                training.commit()
        training = Training(store, untied, "overwrite")
        resident = zero.AdamW([nn.Parameter(torch.zeros(4))], store=store, name="resident")
        for wrong, complaint in (
            (training.fresh, r"optimizer= is a AdamW, .* give extra=\{'optimizer': optimizer.state_dict\(\)\}"),
            (resident, r"optimizer= is a AdamW of parameters in memory, .* leave it out here"),
        ):
            for call in (zero.commit, zero.commit_async, zero.resume, zero.rollback):
                with pytest.raises(MisuseError, match=complaint):
                    call(training.model, wrong)
        store.close()


def heads(rank: int, folder: Path) -> float:
    """Two ranks that add a head; committed, and resumed. Values of their own are refused."""
    found = []
    for existing in ("refuse", "resume"):
        with zero.open_store(folder, dram="2MiB") as store:
            training = Training(store, lambda model: model.blocks.append(nn.Linear(32, 32)), existing)
            bias = training.model.blocks[-1].bias
            if existing == "resume":
                training.resume()
            else:
                nn.init.constant_(bias, rank + 1.0)
                with pytest.raises(RankError, match=r"the values of 'blocks.2.bias', which was added or replaced"):
                    training.commit()
                nn.init.constant_(bias, 3.0)
                training.commit()
            found.append(float(bias[0]))
            store.close()
    assert found[0] == found[1]
    return found[1]


@pytest.mark.soak
def test_ranks_commit_what_was_added_and_one_process_takes_it_over(tmp_path: Path) -> None:
    assert on_ranks(2, heads, tmp_path / "ranks") == [3.0, 3.0]
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        torch.manual_seed(0)
        model: Any = zero.page(Tied(layers=2), store, existing="resume", source=tmp_path / "ranks")
        model.blocks.append(nn.Linear(32, 32))
        zero.resume(model, zero.AdamW([one for one in model.parameters() if hasattr(one, "_tiered")], LR))
        assert model.blocks[-1].bias.eq(3).all()
        store.close()
