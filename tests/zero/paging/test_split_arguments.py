"""What is split, what is shared, how outputs come together, and what is refused, by name."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.quick import quick
from tiered import Eviction, MisuseError, TieredStore, zero

DRAM = "16MiB"


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: Any = None


class Part(nn.Module):
    """Notes the shapes that it was given, and gives everything back in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", torch.randn(4, 6))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        self.seen.append((tuple(x.shape), *(tuple(r.shape) for r in rest if isinstance(r, torch.Tensor))))
        y = self.linear(x) * named["options"]["scale"].unsqueeze(-1) if named else self.linear(x)
        return {"out": Output(y, (y.sum(-1), None)), "same": rest, "word": "fixed", "three": [3, torch.tensor(3)]}


class Root(nn.Module):
    """Calls one unit with what ``call`` makes of the batch."""

    def __init__(self, unit: nn.Module, call: Any) -> None:
        super().__init__()
        self.unit, self.call = unit, call
        self.position = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self, x)


def root(store: TieredStore, call: Any, unit: nn.Module | None = None, parts: int = 3) -> Root:
    model = Root(unit or Part(), call)
    zero.page(model, store, micro_batch=parts)
    assert zero.statistics(model).split == ("unit",)
    return model


def test_nested_arguments_and_outputs(store: TieredStore) -> None:
    mask = torch.zeros(5, 5)

    def call(model: Root, x: torch.Tensor) -> Any:
        return model.unit(x, mask, options={"scale": x[:, 0], "names": ["a", 4]})

    model = root(store, call)
    reference = copy.deepcopy(Part())
    reference.load_state_dict(model.unit.state_dict())
    x = torch.randn(7, 6)
    output, expected = model(x), reference(x, mask, options={"scale": x[:, 0]})
    assert model.unit.seen == [((3, 6), (5, 5)), ((2, 6), (5, 5)), ((2, 6), (5, 5))]
    assert isinstance(output["out"], Output)
    assert torch.allclose(output["out"].logits, expected["out"].logits)
    assert torch.allclose(output["out"].extra[0], expected["out"].extra[0])
    assert output["out"].extra[1] is None
    assert output["same"][0] is mask, "what every part gives back is that"
    assert output["word"] == "fixed"
    assert output["three"][0] == 3
    assert output["three"][1] == 3
    output["out"].logits.sum().backward()
    assert len(model.unit.seen) == 6


@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        (lambda model, x: model.unit(x, model.position), ((2, 6), (6, 6))),  # a paged parameter of the batch's size
        (lambda model, x: model.unit(x, model.position.t()), ((2, 6), (6, 6))),
        (lambda model, x: model.unit(x, model.position[:1].expand(6, -1)), ((2, 6), (2, 6))),
        (lambda model, x: model.unit(x, torch.zeros(())), ((2, 6), ())),
        (lambda model, x: model.unit(x, torch.zeros(12, 2)), ((2, 6), (12, 2))),
    ],
)
def test_parameters_are_shared_unless_expanded(store: TieredStore, call: Any, shapes: Any) -> None:
    def summed(model: Root, x: torch.Tensor) -> Any:
        y = call(model, x)
        return y["out"].logits + sum(r.sum() for r in y["same"])

    model = root(store, summed)
    if shapes == ((2, 6), (2, 6)):
        with pytest.raises(MisuseError, match=r"'unit' is given .*\[0\]\[0\] \(6, 6\) and \[0\]\[1\] \(6, 6\).*another size"):
            model(torch.randn(6, 6))
        return
    model(torch.randn(6, 6)).sum().backward()
    assert model.unit.seen == [shapes] * 6
    assert store.statistics().tiers[0].held == 0


def test_buffers_are_shared(store: TieredStore) -> None:
    model = root(store, lambda model, x: model.unit(x, model.unit.table))
    model(torch.randn(4, 6))
    assert model.unit.seen == [((2, 6), (4, 6)), ((1, 6), (4, 6)), ((1, 6), (4, 6))]


def test_a_unit_that_is_not_given_the_batch_runs_whole(store: TieredStore) -> None:
    def call(model: Root, x: torch.Tensor) -> Any:
        places = model.unit(torch.arange(30.0).view(5, 6))["out"].logits
        tokens = model.unit(x.flatten(0, 1))["out"].logits  # flattened: the rows might as well be anything else
        return tokens.view_as(x) + places

    model = root(store, call)
    model(torch.randn(4, 5, 6)).sum().backward()
    assert model.unit.seen == [((5, 6),), ((20, 6),)]


def test_a_submodule_called_by_itself_has_its_own_batch(store: TieredStore) -> None:
    model = root(store, lambda model, x: model.unit(x))
    model(torch.randn(4, 6))
    model.unit.seen.clear()
    model.unit(torch.randn(5, 6))
    model.unit(torch.randn(1, 6))
    model.unit(torch.randn(0, 6))
    assert model.unit.seen == [((2, 6),), ((2, 6),), ((1, 6),), ((1, 6),), ((0, 6),)]
    with pytest.raises(MisuseError, match="Root was called without a tensor"):
        model(torch.tensor(1.0))


def test_a_model_without_modules_inside_is_split_itself(store: TieredStore) -> None:
    torch.manual_seed(0)
    model = zero.page(nn.Linear(6, 6), store, micro_batch=2)
    assert zero.statistics(model).split == ("Linear",)
    x = torch.randn(5, 6)
    y = model(x)
    assert torch.allclose(y, F.linear(x, model.state_dict()["weight"], model.state_dict()["bias"]))
    y.sum().backward()
    assert torch.equal(zero.AdamW(model.parameters()).grad(model.bias), torch.full((6,), 5.0))


class Returning(nn.Module):
    """Gives what ``give`` makes of its input."""

    def __init__(self, give: Any) -> None:
        super().__init__()
        self.linear, self.give = nn.Linear(6, 6), give
        self.register_buffer("running", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> Any:
        return self.give(self, self.linear(x))


def changed(module: Returning, y: torch.Tensor) -> torch.Tensor:
    module.running.add_(y.detach().mean(0))
    return y


def replaced(module: Returning, y: torch.Tensor) -> torch.Tensor:
    module.running = module.running + 1
    return y


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda module, y: (y, y.square().mean()), r"output\[1\] of 'unit' \(of shape \(\)\) differs between the parts"),
        (lambda module, y: {"stat": y.mean(0)}, r"output\['stat'\] of 'unit' \(of shape \(6,\)\) differs"),
        (lambda module, y: (y, len(y)), r"output\[1\] of 'unit' \(a int\) differs"),
        (lambda module, y: (y,) * len(y), "outputs of 'unit' .* have different structures"),
        (changed, "'unit' changes its buffer 'running'"),
        (replaced, "'unit' changes its buffer 'running'"),
    ],
)
def test_what_depends_on_the_batch_is_refused(store: TieredStore, give: Any, message: str) -> None:
    model = root(store, lambda model, x: model.unit(x), Returning(give), parts=2)
    with pytest.raises(MisuseError, match=message):
        model(torch.randn(5, 6))
    with torch.no_grad(), pytest.raises(MisuseError, match=message):
        model(torch.randn(5, 6))
    assert store.statistics().tiers[0].held == 0


class Cache:
    """Grows with each call, as a cache of keys and values does."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.total = torch.zeros(6)

    def update(self, y: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        if in_place:
            self.total.add_(y.detach().sum(0))
            return y + self.total
        self.seen.append(y)
        return y + torch.cat(self.seen).sum(0)


class Caching(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(6, 6), in_place

    def forward(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y if cache is None else cache.update(y, in_place=self.in_place)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_cache_that_each_part_would_fill_is_refused(store: TieredStore, in_place: bool) -> None:
    """The second part would compute with what the first one left in it."""
    model = root(store, lambda model, x: model.unit(x, model.cache), Caching(in_place), parts=2)
    for recording in (True, False):
        model.cache = Cache()  # type: ignore[assignment]
        with torch.set_grad_enabled(recording), pytest.raises(MisuseError, match="'unit' puts tensors into the Cache that"):
            model(torch.randn(4, 6))
    model.cache = None  # type: ignore[assignment]
    model(torch.randn(4, 6)).sum().backward()


def test_an_output_of_parameters_alone_comes_once(store: TieredStore) -> None:
    model = root(store, lambda model, x: model.unit(x), Returning(lambda m, y: (y, m.linear.weight.square().sum())))
    _, penalty = model(torch.randn(5, 6))
    weight = model.unit.state_dict()["linear.weight"]
    assert torch.equal(penalty, weight.square().sum())
    penalty.backward()
    assert torch.equal(zero.AdamW(model.parameters()).grad(model.unit.linear.weight), 2 * weight)


class Statistical(nn.Module):
    """Computes across the batch in a way that nothing but its author can tell."""

    batch_dependent = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) * self.scale


@pytest.mark.parametrize(
    ("unit", "name"),
    [
        (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), r"'unit\.1' \(BatchNorm1d\)"),
        (nn.Sequential(nn.Linear(6, 6), nn.SyncBatchNorm(6)), r"'unit\.1' \(SyncBatchNorm\)"),
        (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False).eval()), r"'unit\.1' \(BatchNorm1d\)"),
        (nn.Sequential(nn.Linear(6, 6), nn.InstanceNorm1d(6, track_running_stats=True)), r"'unit\.1' \(InstanceNorm1d\)"),
        (nn.Sequential(nn.Linear(6, 6), Statistical()), r"'unit\.1' \(Statistical\)"),
        (nn.LSTM(6, 6, batch_first=True), r"'unit' \(LSTM\)"),
        (nn.TransformerEncoderLayer(6, 2, 6), r"'unit' \(TransformerEncoderLayer\)"),
    ],
)
def test_modules_that_compute_across_the_batch_are_refused_by_name(store: TieredStore, unit: nn.Module, name: str) -> None:
    model = Root(unit, lambda model, x: model.unit(x))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(MisuseError, match=name):
        zero.page(model, store, micro_batch=2)
    assert len(store) == 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "nothing was changed"
    zero.page(model, store, micro_batch=1)


def test_batch_norm_may_use_the_statistics_that_it_has(store: TieredStore) -> None:
    unit = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model = Root(unit, lambda model, x: model.unit(x)).eval()
    zero.page(model, store, micro_batch=2)
    model(torch.randn(5, 6)).sum().backward()
    model.train()
    with pytest.raises(MisuseError, match=r"'unit\.1' \(BatchNorm1d\) computes across the batch"):
        model(torch.randn(5, 6))


def test_packed_sequences_and_wrong_numbers_are_refused(store: TieredStore) -> None:
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 6), torch.randn(2, 6)])
    model = root(store, lambda model, x: model.unit(packed))
    with pytest.raises(MisuseError, match="'unit' is given a packed or nested batch"):
        model(torch.randn(2, 6))
    for wrong in (0, -1, True, 2.0):
        with pytest.raises(MisuseError, match="micro_batch is into how many parts"):
            zero.page(nn.Linear(2, 2), store, name="other", micro_batch=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("widths", "batch"),
    quick(
        [
            ((512, 1024, 8), 2000),
            ((512, 512, 300, 700, 100, 100), 64),
            ((700, 256, 256, 700, 300, 256), 64),
            ((64, 256, 512, 100, 700), 64),
        ],
        [((512, 1024, 8), 2000), ((64, 256, 512, 100, 700), 64)],
    ),
)
def test_the_smallest_budget_that_is_named_works(tmp_path: Path, widths: tuple[int, ...], batch: int) -> None:
    """Where each lies in memory is chance: these once had no room in one piece beside the unit in use."""

    class Dense(nn.Module):
        """A linear layer that is not one of torch's, whose weight could be divided into rows."""

        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(after, before) / before), nn.Parameter(torch.zeros(after))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    def wide() -> nn.Module:
        layers = [(Dense(before, after), nn.ReLU()) for before, after in itertools.pairwise(widths)]
        return nn.Sequential(*(module for pair in layers for module in pair))

    with TieredStore.open(tmp_path / "small", dram="1MiB") as small, pytest.raises(Exception, match="smallest") as caught:
        zero.page(wide(), small, micro_batch=4)
    number = int(str(caught.value).split("smallest that works is ")[1].split(" ")[0].replace(",", ""))
    with TieredStore.open(tmp_path / "enough", dram=number, eviction=Eviction(deadline=20)) as enough:
        model = zero.page(wide(), enough, micro_batch=4)
        optimizer = zero.AdamW(model.parameters())
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(batch, widths[0])).sum().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        assert not torch.isnan(model.state_dict()["0.weight"]).any()
        enough.close()
