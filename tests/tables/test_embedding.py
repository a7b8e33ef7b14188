"""``TieredEmbedding`` and its optimizers beside ``torch.nn.Embedding(sparse=True)`` and torch's, bit for bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.store.chains import MIB, nothing_is_held, same
from tiered import MisuseError, RowwiseAdagrad, SparseAdagrad, SparseAdamW, TieredEmbedding, TieredStore, zero

ROWS, WIDTH = 500, 24
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
"""torch's own optimizers say so once in a process."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "state", dram=MIB) as opened:
        yield opened
        opened.close()


class Pair:
    """The same model in memory and in a store."""

    def __init__(self, store: TieredStore, dtype: torch.dtype = torch.float32, padding: int | None = None, width: int = WIDTH):
        torch.manual_seed(0)
        self.plain = nn.Embedding(ROWS, width, sparse=True, padding_idx=padding, dtype=dtype)
        self.table = store.table("e", ROWS, width, dtype, block=7 * width * dtype.itemsize)
        self.ours = TieredEmbedding(self.table, padding_idx=padding)
        assert not self.ours.load_state_dict(self.plain.state_dict()).missing_keys
        self.source = torch.Generator().manual_seed(1)

    def backward(self, count: int = 40, times: int = 2) -> None:
        """Several uses of the embedding in one backward pass, and each id more than once."""
        for module in (self.plain, self.ours):
            generator = torch.Generator().manual_seed(int(self.source.initial_seed()) + count)
            loss = torch.zeros((), dtype=self.table.dtype)
            for _ in range(times):
                ids = torch.randint(0, ROWS, (4, count // 4), generator=generator) // 3
                weights = torch.randn(4, count // 4, self.table.row_shape[0], generator=generator).to(self.table.dtype)
                loss = loss + (module(ids) * weights).sum() + module(ids[0]).square().sum()
            loss.backward()
            if module is self.plain:
                expected = loss
        same(loss, expected)
        mine, theirs = self.ours.weight.grad, self.plain.weight.grad
        assert mine is not None
        assert theirs is not None
        assert mine.is_coalesced() == theirs.is_coalesced()
        same(mine._indices(), theirs._indices())
        same(mine._values(), theirs._values())
        self.source.manual_seed(int(self.source.initial_seed()) + 1)

    def compare(self) -> None:
        same(self.table[:], self.plain.weight)


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Make, Make, dict[str, str]]] = {
    "adam": (
        lambda p: torch.optim.SparseAdam(p, lr=0.1, betas=(0.8, 0.95)),
        lambda p: SparseAdamW(p, lr=0.1, betas=(0.8, 0.95)),
        {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    ),
    "adam, maximize": (
        lambda p: torch.optim.SparseAdam(p, lr=0.01, maximize=True),
        lambda p: SparseAdamW(p, lr=0.01, maximize=True),
        {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    ),
    "adagrad": (
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.3),
        lambda p: SparseAdagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.3),
        {"sum": "sum"},
    ),
}


@pytest.mark.parametrize(
    ("together", "dtype"),
    [
        (MIB, torch.float32),
        pytest.param(12 * 4096, torch.float32, marks=pytest.mark.soak),
        pytest.param(MIB, torch.float64, marks=pytest.mark.soak),
        pytest.param(12 * 4096, torch.float64, marks=pytest.mark.soak),
        pytest.param(MIB, torch.bfloat16, marks=pytest.mark.soak),
        (12 * 4096, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torch(store: TieredStore, name: str, dtype: torch.dtype, together: int) -> None:
    pair = Pair(store, dtype, padding=3, width=WIDTH + 1)
    theirs, ours, states = OPTIMIZERS[name]
    plain, mine = theirs(pair.plain.parameters()), ours(pair.ours.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (plain, mine)]
    for step in range(5):
        for _ in range(1 + step % 2):  # gradients of two passes add up
            pair.backward(count=4 if step == 3 else 120)
        pair.table._together = together
        plain.step()
        mine.step()
        pair.compare()
        for each in schedules:
            each.step()
        if step != 1:
            plain.zero_grad()
            mine.zero_grad()
    for state, key in states.items():
        same(store.table(f"e/{key}")[:], plain.state[pair.plain.weight][state])
    assert store.get("e/steps")[0] == 5
    nothing_is_held(store)


def test_a_pass_without_ids_counts_as_in_torch(store: TieredStore) -> None:
    pair = Pair(store)
    plain, mine = torch.optim.SparseAdam(pair.plain.parameters()), SparseAdamW(pair.ours.parameters())
    for ids in (torch.tensor([1]), torch.empty(0, dtype=torch.int64), torch.tensor([1, 2])):
        for module in (pair.plain, pair.ours):
            module.zero_grad()
            module(ids).square().sum().backward()
        plain.step()
        mine.step()
        pair.compare()


def test_decay_is_of_the_rows_that_change(store: TieredStore) -> None:
    pair = Pair(store)
    optimizer = SparseAdamW(pair.ours.parameters(), lr=0.1, weight_decay=0.2)
    before = pair.table[:]
    ids = torch.tensor([4, 9, 4])
    pair.ours(ids).sum().backward()
    optimizer.step()
    expected = before.clone()
    step = 0.1 * 0.001**0.5 / 0.1
    for row, gradient in ((4, 2.0), (9, 1.0)):
        expected[row] = before[row] * (1 - 0.1 * 0.2) - step * (0.1 * gradient) / ((0.001 * gradient**2) ** 0.5 + 1e-8)
    torch.testing.assert_close(pair.table[:], expected)
    expected[[4, 9]] = before[[4, 9]] = 0
    assert torch.equal(pair.table[:].index_fill(0, torch.tensor([4, 9]), 0), before)


def test_one_number_for_a_row(store: TieredStore) -> None:
    pair = Pair(store)
    optimizer = RowwiseAdagrad(pair.ours.parameters(), lr=0.1, eps=1e-6)
    weight, sums = pair.plain.weight.detach().clone(), torch.zeros(ROWS, 1)
    for _ in range(3):
        pair.ours.zero_grad()
        pair.plain.zero_grad()
        pair.backward()
        assert pair.plain.weight.grad is not None
        gradient = pair.plain.weight.grad.to_dense()
        sums += gradient.square().mean(1, keepdim=True)
        weight -= 0.1 * gradient / (sums.sqrt() + 1e-6)
        optimizer.step()
        torch.testing.assert_close(pair.table[:], weight)
        pair.ours.load_state_dict({"weight": weight})
        pair.plain.load_state_dict({"weight": weight})
    state = store.table("e/sum_of_rows")
    torch.testing.assert_close(state[:], sums)
    assert state.block_rows > pair.table.block_rows, "a number takes little room beside a row"


def test_resumed_from_a_commit(tmp_path: Path) -> None:
    def train(opened: TieredStore, pair: Pair, steps: int) -> None:
        optimizer = SparseAdamW(pair.ours.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            pair.ours(torch.randint(0, ROWS, (30,), generator=pair.source)).square().sum().backward()
            optimizer.step()

    with TieredStore.open(tmp_path / "whole", dram=MIB) as whole:
        pair = Pair(whole)
        train(whole, pair, 6)
        expected = dict(whole.items())
    with TieredStore.open(tmp_path / "parts", dram=MIB) as first:
        pair = Pair(first)
        train(first, pair, 3)
        first.commit()
        kept = pair.source
        optimizer = SparseAdamW(pair.ours.parameters())
        pair.ours(torch.arange(9)).sum().backward()
        optimizer.step()
        first.rollback()
        state = kept.get_state()
    with TieredStore.open(tmp_path / "parts", dram=MIB) as second:
        pair = Pair.__new__(Pair)
        pair.ours, pair.source = TieredEmbedding(second.table("e")), torch.Generator()
        pair.source.set_state(state)
        train(second, pair, 3)
        assert sorted(second) == sorted(expected)
        for key, value in second.items():
            same(value, expected[key])


def test_states_travel(store: TieredStore) -> None:
    pair = Pair(store)
    same(pair.ours.state_dict()["weight"], pair.plain.weight)
    model = nn.Sequential(pair.ours, nn.Linear(WIDTH, 2))
    assert sorted(model.state_dict()) == ["0.weight", "1.bias", "1.weight"]
    other = nn.Sequential(TieredEmbedding(store.table("other", ROWS, WIDTH)), nn.Linear(WIDTH, 2))
    other.load_state_dict(model.state_dict())
    same(store.table("other")[:], pair.plain.weight)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        other.load_state_dict({**model.state_dict(), "0.weight": torch.zeros(3, WIDTH)})
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({"1.weight": torch.zeros(2, WIDTH), "1.bias": torch.zeros(2)})


def test_initialised_in_blocks(store: TieredStore) -> None:
    embedding = TieredEmbedding(store.table("e", ROWS, WIDTH, block="4KiB"), padding_idx=-1)
    assert embedding.initialize(nn.init.normal_) is embedding
    values = embedding.table[:]
    assert values[-1].eq(0).all()
    assert 0.9 < values[:-1].std() < 1.1
    assert len(set(values[:, 0].tolist())) > ROWS * 0.9


def test_what_a_weight_cannot_do(store: TieredStore) -> None:
    pair = Pair(store)
    weight = pair.ours.weight
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (ROWS, WIDTH)
    assert weight.untyped_storage().nbytes() == 4, "it takes no memory"
    assert weight.isnan().all(), "and has no values"
    assert repr(weight) == f"TableWeight of {pair.table!r}"
    assert [p is weight for p in nn.Sequential(pair.ours).parameters()] == [True]
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(MisuseError):
            refused(pair.ours)
    with pytest.raises(MisuseError, match="stays so"):
        pair.ours.half()
    assert pair.ours.to("cpu").float().weight is weight
    pair.backward()
    for theirs in ("SparseAdam", "AdamW", "SGD", "Adagrad"):
        ours = "SparseAdagrad" if theirs == "Adagrad" else "SparseAdamW"
        with pytest.raises(MisuseError, match=rf"{theirs} cannot update the weight of a TieredEmb.* make tiered\.{ours} "):
            getattr(torch.optim, theirs)([weight, nn.Parameter(torch.zeros(3))]).step()
    with pytest.raises(MisuseError, match=r"parameter '0\.weight' is a table, whose rows are in a store already: page the"):
        zero.page(nn.Sequential(pair.ours, nn.Linear(WIDTH, 2)), store)
    pair.compare()
    weight.grad = None
    torch.optim.SGD([weight]).step()  # which leaves alone what has no gradient
    with pytest.raises(MisuseError, match="vectors of floating"):
        TieredEmbedding(store.table("whole", 3, 3, torch.int64))
    with pytest.raises(MisuseError, match="no row"):
        TieredEmbedding(pair.table, padding_idx=ROWS)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "zeros_": nn.init.zeros_,
    "constant_": lambda weight: nn.init.constant_(weight, 2.0),
    "normal_": nn.init.normal_,
    "uniform_": nn.init.uniform_,
    "eye_": nn.init.eye_,
    "mul_": lambda weight: weight.mul_(2),
    "copy_": lambda weight: weight.copy_(torch.zeros(ROWS, WIDTH)),
    "weight[0] =": lambda weight: weight.__setitem__(0, 3),
    "+=": lambda weight: weight.__iadd__(1),
    "data.zero_": lambda weight: weight.data.zero_(),
    "data.fill_": lambda weight: weight.data.fill_(3),
    "data[0].zero_": lambda weight: weight.data[0].zero_(),
    "detach().view().zero_": lambda weight: weight.detach().view(-1)[3:5].zero_(),
    "unbind()[1].zero_": lambda weight: weight.data.unbind()[1].zero_(),
    "data =": lambda weight: setattr(weight, "data", torch.zeros(ROWS, WIDTH)),
    "data.data =": lambda weight: setattr(weight.data, "data", torch.zeros(ROWS, WIDTH)),
    "vector_to_parameters": lambda weight: nn.utils.vector_to_parameters(torch.zeros(ROWS * WIDTH), [weight]),
    "set_": lambda weight: weight.set_(torch.zeros(ROWS, WIDTH)),  # type: ignore[call-overload]
    "resize_": lambda weight: weight.data.resize_(3, 3),
    "out=": lambda weight: torch.add(torch.ones(ROWS, WIDTH), 1, out=weight.data),
    "foreach": lambda weight: torch._foreach_zero_([torch.ones(3), weight.data]),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_a_weight_is_refused(store: TieredStore, name: str) -> None:
    embedding = TieredEmbedding(store.table("e", ROWS, WIDTH))
    with torch.no_grad(), pytest.raises(MisuseError, match=r"'e' cannot be written to.*initialize\(fill\).*table\[rows\] ="):
        WRITES[name](embedding.weight)
    assert embedding.weight.isnan().all()
    assert embedding.table[:].eq(0).all()


def test_a_weight_is_not_replaced(store: TieredStore) -> None:
    embedding, other = (TieredEmbedding(store.table(name, ROWS, WIDTH)) for name in "eo")
    weight, ids = embedding.weight, torch.tensor([1])
    refused = pytest.raises(MisuseError, match=r"'e' cannot be replaced.*initialize\(fill\).*table\[rows\] =")
    for wrong in (nn.Parameter(torch.zeros(ROWS, WIDTH)), torch.zeros(ROWS, WIDTH), None, other.weight):
        with refused:
            embedding.weight = wrong  # type: ignore[assignment]
    for gradient in (True, False):
        with torch.set_grad_enabled(gradient), refused:  # which torch puts there without an assignment
            torch.func.functional_call(embedding, {"weight": torch.zeros(ROWS, WIDTH)}, ids)
        with torch.set_grad_enabled(gradient):
            same(torch.func.functional_call(embedding, {"weight": weight}, ids), torch.zeros(1, WIDTH))
    embedding.weight = weight
    assert embedding.weight is weight


def test_a_weight_reads_as_nan(store: TieredStore) -> None:
    weight = TieredEmbedding(store.table("e", ROWS, WIDTH)).weight
    views = (weight.data, weight.detach(), weight[3], weight.T, weight.data.chunk(2)[1], weight.view(-1), next(iter(weight)))
    for view in views:
        assert view.isnan().all()
        assert not view.detach().numpy().flags.writeable
        assert view.untyped_storage().nbytes() == 4
    computed = (weight * 2, weight.sum(), weight.data.clone(), weight.double(), torch.cat([weight, weight]), weight @ weight.T)
    for value in (*computed, copy.deepcopy(weight.data), pickle.loads(pickle.dumps(weight.data))):
        assert type(value) is torch.Tensor
        assert value.isnan().all()
    assert str(weight.data[0, :2].tolist()) == "[nan, nan]"
    assert "nan" in repr(weight.data)
    assert torch.zeros(ROWS, WIDTH).copy_(weight.data).isnan().all()
    assert nn.functional.embedding(torch.tensor([1]), weight, max_norm=1.0).isnan().all()
    tied = nn.Linear(WIDTH, ROWS, bias=False)
    tied.weight = weight
    tied(torch.ones(2, WIDTH)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.eq(2).all()
    assert weight.detach_() is weight.requires_grad_() is weight


def test_clipped_as_the_guide_says(store: TieredStore) -> None:
    pair = Pair(store)
    pair.backward()
    grad = pair.ours.weight.grad
    assert grad is not None
    before = grad.to_dense()
    grad.mul_((1 / grad.coalesce().values().norm()).clamp(max=1))
    assert before.norm() > 1
    torch.testing.assert_close(grad.to_dense(), before / before.norm())


def test_what_an_optimizer_refuses(store: TieredStore) -> None:
    pair = Pair(store)
    with pytest.raises(MisuseError, match="give that to an optimizer of torch"):
        SparseAdamW([nn.Parameter(torch.zeros(3))])
    for wrong in ({"lr": -1.0}, {"eps": float("nan")}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}):
        with pytest.raises(MisuseError):
            SparseAdamW(pair.ours.parameters(), **wrong)  # type: ignore[arg-type]
    optimizer = SparseAdamW(pair.ours.parameters())
    pair.ours.weight.grad = torch.zeros(ROWS, WIDTH)
    with pytest.raises(MisuseError, match="is dense"):
        optimizer.step()
    pair.ours.weight.grad = None
    optimizer.step()
    assert "e/steps" not in store
    pair.ours(torch.tensor([1])).sum().backward()
    optimizer.step()
    with pytest.raises(MisuseError, match="another optimizer"):
        SparseAdagrad(pair.ours.parameters()).step()
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 1e-3


def test_forward_without_a_gradient(store: TieredStore) -> None:
    pair = Pair(store)
    ids = torch.tensor([[1, 2], [2, 499]])
    with torch.no_grad():
        same(pair.ours(ids), pair.plain(ids))
    assert not pair.ours.requires_grad_(False)(ids).requires_grad
    pair.ours.requires_grad_()
    with pytest.raises(MisuseError, match="no row 500"):
        pair.ours(torch.tensor([500]))
