"""Experts in one parameter: each is a unit, only those that are used are fetched, and the bits are those of memory, also where
an expert had no tokens for some steps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.quick import quick
from tests.versions import COMPILES
from tiered import MisuseError, TieredStore, zero
from tiered.store.at_rest import StoreAtRest
from tiered.zero.checkpoint.safetensors import export_at_rest

Model = Any
EXPERTS, WIDTH, INNER, STEPS = 8, 32, 48, 7
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class Experts(nn.Module):
    """Experts as transformers has them, with the same three ways to compute, and a bias for each expert."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.1)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = getattr(self, self.how)(x, chosen, weights)
        return result

    def eager(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        for expert in chosen.unique():
            token, place = torch.where(chosen == expert)
            gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down_proj[expert]) + self.bias[expert]
            made = made.index_add(0, token, y * weights[token, place, None])
        return made

    def grouped(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = chosen.reshape(-1).argsort(stable=True)
        token = order // chosen.shape[1]
        ends = torch.bincount(chosen.reshape(-1), minlength=EXPERTS).cumsum(0).int()
        gate, up = F.grouped_mm(x[token], self.gate_up_proj.transpose(-2, -1), offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(-2, -1), offs=ends)
        return torch.zeros_like(x).index_add(0, token, y * weights.reshape(-1)[order, None])

    def batched(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat, each = chosen.reshape(-1), x.repeat_interleave(chosen.shape[1], 0)
        gate, up = torch.bmm(self.gate_up_proj[flat], each.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        y = torch.bmm(self.down_proj[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1) + self.bias[flat]
        return (y * weights.reshape(-1)[:, None]).view(x.shape[0], -1, x.shape[1]).sum(1)

    def together(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Use all experts for all tokens, as a model does that knows nothing of slices."""
        gate, up = torch.einsum("th,eoh->teo", x, self.gate_up_proj).chunk(2, -1)
        y = torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.down_proj) + self.bias
        return (y * torch.zeros(y.shape[:2], dtype=y.dtype).scatter(1, chosen, weights)[..., None]).sum(1)


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False), Experts(how)

    def forward(self, x: torch.Tensor, closed: torch.Tensor) -> torch.Tensor:
        weights, chosen = (self.router(self.norm(x)) + closed).softmax(-1).topk(2, -1)
        return x + self.experts(self.norm(x), chosen, weights)


class Mixture(nn.Module):
    """``closed``: added to the logits of the routers, so that some experts get no tokens."""

    def __init__(self, how: str = "eager", recompute: bool | None = None) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor, closed: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, closed) if self.recompute is None else checkpoint(block, x, closed, use_reentrant=self.recompute)
        result: torch.Tensor = self.head(x)
        return result

    def loss(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        dtype = self.head.weight.dtype
        closed = torch.full((EXPERTS,), -1e4, dtype=dtype)
        closed[torch.randperm(EXPERTS, generator=generator)[:3]] = 0
        x = torch.randn(5, WIDTH, generator=generator).to(dtype)
        return self(x.requires_grad_(self.recompute is True), closed).float().square().mean()


def build(how: str = "eager", dtype: torch.dtype = torch.float32, recompute: bool | None = None) -> Mixture:
    torch.manual_seed(3)
    return Mixture(how, recompute).to(dtype)


def train(model: Mixture, optimizer: torch.optim.Optimizer, steps: range, *, micro: int = 1, clip: Any = None) -> list[Any]:
    seen: list[Any] = []
    for step in steps:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        optimizer.zero_grad()
        for part in range(micro):
            loss = model.loss(step * micro + part)
            loss.backward()  # type: ignore[no-untyped-call]
            seen.append(loss.detach().clone())
        if clip is not None:
            seen.append(clip(model))
        optimizer.step()
    return seen


def in_memory(model: Mixture, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, **options)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def states(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    return {
        index: {name: found[name] for name in ("step", "exp_avg", "exp_avg_sq")}
        for index, found in optimizer.state_dict()["state"].items()
    }


def close(left: list[Any], right: list[Any]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(left, right, strict=True))


# -- training ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "update"),
    quick(
        [(how, update) for how in ("eager", "grouped", "batched", "together") for update in ("on_fetch", "in_backward")],
        [("eager", "in_backward"), ("together", "on_fetch")],
    ),
)
def test_the_bits_of_memory(store: TieredStore, how: str, update: str) -> None:
    if how == "grouped" and not hasattr(F, "grouped_mm"):
        pytest.skip(f"torch {torch.__version__} has no torch.nn.functional.grouped_mm")
    memory, paged = build(how), zero.page(build(how), store)
    first, second = in_memory(memory), zero.AdamW(paged.parameters(), lr=1e-2, update=update)
    assert zero.statistics(paged).units > 2 * EXPERTS
    assert same(train(memory, first, range(STEPS)), train(paged, second, range(STEPS)))  # type: ignore[arg-type]
    assert same(dict(memory.state_dict()), dict(paged.state_dict()))
    assert same(states(first), states(second))


@pytest.mark.parametrize("kind", quick(["bf16", "fp64"], ["bf16"]))
def test_other_types(store: TieredStore, kind: str) -> None:
    """bf16 with its fp32 masters: against the same experts as modules of their own, which are paged as ever."""
    paged, whole = (
        zero.page(build(dtype=DTYPES[kind]), store, name=name, paging=zero.Paging(experts=name)) for name in ("sliced", "whole")
    )
    first, second = zero.AdamW(paged.parameters(), lr=1e-2), zero.AdamW(whole.parameters(), lr=1e-2)
    assert zero.statistics(whole).units < zero.statistics(paged).units
    assert same(train(whole, second, range(STEPS)), train(paged, first, range(STEPS)))  # type: ignore[arg-type]
    assert same(dict(whole.state_dict()), dict(paged.state_dict()))
    assert same(first.state_dict()["state"], second.state_dict()["state"])


@pytest.mark.parametrize(
    ("recompute", "update"),
    quick(
        [(recompute, update) for recompute in (False, True) for update in ("on_fetch", "in_backward")],
        [(False, "on_fetch"), (True, "in_backward")],
    ),
)
def test_checkpointed(store: TieredStore, recompute: bool, update: str) -> None:
    memory, paged = build(recompute=recompute), zero.page(build(recompute=recompute), store)
    first, second = in_memory(memory), zero.AdamW(paged.parameters(), lr=1e-2, update=update)
    assert same(train(memory, first, range(4)), train(paged, second, range(4)))  # type: ignore[arg-type]
    assert same(dict(memory.state_dict()), dict(paged.state_dict()))


@pytest.mark.parametrize("how", ["eager", "grouped"])
def test_what_is_computed_again_keeps_no_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The eight experts of a layer are more than the budget, and backward needs each of them after all have computed."""
    monkeypatch.setattr(f"{__name__}.WIDTH", 64)
    monkeypatch.setattr(f"{__name__}.INNER", 192)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        memory, paged = build(how, recompute=False), zero.page(build(how, recompute=False), store)
        assert sum(unit.plan.nbytes for unit in _pager(paged).units if unit.plan.of_expert) > 2 << 20
        x = torch.randn(40, WIDTH)
        for model in (memory, paged):
            for block in model.blocks:
                block.experts.requires_grad_(False)  # whose gradients would take turns with them
            model(x, torch.zeros(EXPERTS)).square().mean().backward()
        for (name, one), other in zip(memory.named_parameters(), paged.parameters(), strict=True):
            assert (one.grad is None) is (other.grad is None), name
            assert one.grad is None or torch.equal(one.grad, other.grad.clone()), name
        store.close()


@pytest.mark.soak
@COMPILES
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own reads
@pytest.mark.parametrize("how", ["eager", "batched"])
def test_compiled(store: TieredStore, how: str) -> None:
    """Reads of experts break the graph. So the numbers are those of memory without torch.compile, which adds up gradients in
    another order."""
    memory, paged = build(how), zero.page(build(how), store)
    first, second = in_memory(memory), zero.AdamW(paged.parameters(), lr=1e-2)
    torch._dynamo.reset()
    for block in paged.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    assert same(train(memory, first, range(3)), train(paged, second, range(3)))  # type: ignore[arg-type]
    assert same(dict(memory.state_dict()), dict(paged.state_dict()))
    assert not any(unit.held for unit in _pager(paged).units)


def test_accumulated(store: TieredStore) -> None:
    memory, paged = build(), zero.page(build(), store)
    first, second = in_memory(memory), zero.AdamW(paged.parameters(), lr=1e-2)
    assert same(train(memory, first, range(4), micro=3), train(paged, second, range(4), micro=3))  # type: ignore[arg-type]
    assert same(dict(memory.state_dict()), dict(paged.state_dict()))


def clip_norm(model: Mixture) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_one_by_one(model: Mixture) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=False)


def clip_value(model: Mixture) -> torch.Tensor:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    return torch.zeros(())


@pytest.mark.parametrize("clip", quick([clip_norm, clip_one_by_one, clip_value], [clip_one_by_one]))
def test_clipped(store: TieredStore, clip: Callable[[Mixture], torch.Tensor]) -> None:
    """A value is clipped to the bit; the norm of a sliced gradient is that of its slices, which rounds otherwise."""
    memory, paged = build(), zero.page(build(), store)
    first, second = in_memory(memory), zero.AdamW(paged.parameters(), lr=1e-2)
    seen = train(memory, first, range(3), clip=clip), train(paged, second, range(3), clip=clip)  # type: ignore[arg-type]
    assert close(*seen)
    values, expected = dict(paged.state_dict()), memory.state_dict()
    assert all(torch.allclose(values[name], value, atol=1e-6) for name, value in expected.items())
    assert clip is not clip_value or same(dict(expected), values)


def test_our_clipping_is_that_of_torch(store: TieredStore) -> None:
    one, other = (zero.page(build(), store, name=name) for name in ("one", "other"))
    first, second = zero.AdamW(one.parameters(), lr=1e-2), zero.AdamW(other.parameters(), lr=1e-2)
    seen = train(one, first, range(3), clip=clip_norm)  # type: ignore[arg-type]
    assert same(seen, train(other, second, range(3), clip=lambda _: second.clip_grad_norm_(0.01)))  # type: ignore[arg-type]
    assert same(dict(one.state_dict()), dict(other.state_dict()))


def test_scaled(store: TieredStore) -> None:
    memory, paged = build(), zero.page(build(), store)
    first, second = in_memory(memory), zero.AdamW(paged.parameters(), lr=1e-2)
    scalers = torch.amp.GradScaler("cpu", init_scale=8.0), zero.GradScaler(init_scale=8.0)
    for step in range(3):
        for model, optimizer, scaler in zip((memory, paged), (first, second), scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model.loss(step)).backward()  # type: ignore[no-untyped-call, operator]
            if step == 1:
                model.blocks[0].experts.down_proj.grad[0, 0, 0] = float("inf")  # type: ignore[index, union-attr]
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0
    assert same(dict(memory.state_dict()), dict(paged.state_dict()))


# -- what is fetched -----------------------------------------------------------------------------------------------------------


def test_experts_without_tokens_stay_where_they_are(store: TieredStore) -> None:
    """Between two steps of one routing, nothing of the other experts is fetched; their steps wait."""
    paged: Model = zero.page(build(), store)
    optimizer = zero.AdamW(paged.parameters(), lr=1e-2)
    train(paged, optimizer, range(1))
    optimizer.flush()
    fetched: list[str] = []
    lease = store.lease

    def watched(key: Any, **options: Any) -> Any:
        fetched.extend([key] if isinstance(key, str) else key)
        return lease(key, **options)

    store.lease = watched  # type: ignore[method-assign]
    train(paged, optimizer, range(1, 2))
    del store.lease
    generator = torch.Generator().manual_seed(1)
    used = set(torch.randperm(EXPERTS, generator=generator)[:3].tolist())
    keys = {key for key in fetched if "experts[" in key}
    assert keys
    assert {int(key.split("experts[")[1].split("]")[0]) for key in keys} <= used
    waiting = [unit for unit in _pager(paged).units if unit.pending is not None and not unit.pending.graded]
    assert len(waiting) >= 2 * (EXPERTS - 3)


def _pager(model: Model) -> Any:
    return model.head.weight._tiered.resolve()[0]


# -- checkpoints ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def expected() -> tuple[Mixture, dict[Any, Any]]:
    memory = build()
    optimizer = in_memory(memory)
    train(memory, optimizer, range(STEPS))
    return memory, states(optimizer)


@pytest.mark.parametrize("steps", quick([1, 4], [4]))
def test_a_commit_has_the_steps_that_wait(tmp_path: Path, steps: int, expected: tuple[Mixture, dict[Any, Any]]) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        paged = zero.page(build(), store)
        optimizer = zero.AdamW(paged.parameters(), lr=1e-2)
        train(paged, optimizer, range(steps))  # type: ignore[arg-type]
        assert any(unit.pending is not None and not unit.pending.graded for unit in _pager(paged).units)
        zero.commit(paged, optimizer)
    for _ in range(2):  # the second time after it went on, and back
        with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
            paged = zero.page(build(), store, existing="resume")
            optimizer = zero.AdamW(paged.parameters(), lr=1e-2)
            zero.resume(paged, optimizer)
            train(paged, optimizer, range(steps, STEPS))  # type: ignore[arg-type]
            zero.rollback(paged, optimizer)
            train(paged, optimizer, range(steps, STEPS))  # type: ignore[arg-type]
            assert same(dict(expected[0].state_dict()), dict(paged.state_dict()))
            assert same(expected[1], states(optimizer))
            store.rollback()


def test_state_dicts_go_to_and_from_memory(store: TieredStore, expected: tuple[Mixture, dict[Any, Any]]) -> None:
    memory, paged = build(), zero.page(build(), store)
    first, second = in_memory(memory), zero.AdamW(paged.parameters(), lr=1e-2)
    train(memory, first, range(3))
    paged.load_state_dict(memory.state_dict())
    second.load_state_dict(first.state_dict())
    train(paged, second, range(3, 5))  # type: ignore[arg-type]
    memory.load_state_dict(paged.state_dict())
    first.load_state_dict(second.state_dict())
    train(memory, first, range(5, STEPS))
    assert same(dict(memory.state_dict()), dict(expected[0].state_dict()))
    assert same(states(first), expected[1])


def test_exports_have_whole_parameters(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        paged = zero.page(build(), store)
        optimizer = zero.AdamW(paged.parameters(), lr=1e-2)
        train(paged, optimizer, range(3))  # type: ignore[arg-type]
        zero.commit(paged, optimizer)  # with steps that wait
        zero.export(paged, tmp_path / "open")
        values = dict(paged.state_dict())
        store.rollback()
    with StoreAtRest(tmp_path / "store") as rest:
        export_at_rest(rest, tmp_path / "rest")
    for folder in ("open", "rest"):
        assert same(safetensors.load_file(tmp_path / folder / "model.safetensors"), values)
    with torch.device("meta"):
        blank = Mixture()
    with TieredStore.open(tmp_path / "other", dram="1MiB") as store:
        again = zero.page(blank, store, weights=tmp_path / "open")
        assert zero.statistics(again).units == zero.statistics(paged).units
        assert same(dict(again.state_dict()), values)
        zero.commit(again)
    with torch.device("meta"):
        blank = Mixture()
    with TieredStore.open(tmp_path / "other", dram="1MiB", access="read") as store:
        again = zero.page(blank, store, existing="resume")
        assert zero.statistics(again).units == zero.statistics(paged).units
        assert same(dict(again.state_dict()), values)


def test_an_older_commit_with_whole_experts_goes_on(tmp_path: Path, expected: tuple[Mixture, dict[Any, Any]]) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        paged = zero.page(build(), store, paging=zero.Paging(experts="whole"))
        optimizer = zero.AdamW(paged.parameters(), lr=1e-2)
        train(paged, optimizer, range(2))  # type: ignore[arg-type]
        zero.commit(paged, optimizer)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        paged = zero.page(build(), store, existing="resume")
        assert zero.statistics(paged).units < 2 * EXPERTS
        optimizer = zero.AdamW(paged.parameters(), lr=1e-2)
        zero.resume(paged, optimizer)
        train(paged, optimizer, range(2, STEPS))  # type: ignore[arg-type]
        assert same(dict(expected[0].state_dict()), dict(paged.state_dict()))


def test_another_budget_takes_the_experts_over(tmp_path: Path, expected: tuple[Mixture, dict[Any, Any]]) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        paged = zero.page(build(), store)
        optimizer = zero.AdamW(paged.parameters(), lr=1e-2)
        train(paged, optimizer, range(2))  # type: ignore[arg-type]
        zero.commit(paged, optimizer)
    with TieredStore.open(tmp_path / "larger", dram="4MiB") as store:
        paged = zero.page(build(), store, existing="resume", source=tmp_path / "store")
        optimizer = zero.AdamW(paged.parameters(), lr=1e-2)
        zero.resume(paged, optimizer)
        train(paged, optimizer, range(2, STEPS))  # type: ignore[arg-type]
        assert same(dict(expected[0].state_dict()), dict(paged.state_dict()))


# -- the parameter -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def both(store: TieredStore) -> tuple[Experts, Experts]:
    memory, paged = build(), zero.page(build(), store)
    return memory.blocks[0].experts, paged.blocks[0].experts  # type: ignore[union-attr, misc, index]


def own(made: torch.Tensor, p: torch.Tensor) -> list[Any]:
    """Return what a tensor on the values of ``p`` with a gradient of its own gives, after a step of it, too."""
    (made[2].sin().sum() + (made.mT * made.mT.detach()).sum() + made.sum() + p.detach().sum()).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD([made], lr=0.1).step()
    return [made.grad, made.is_leaf, made.requires_grad, p.grad is None, made.detach() * 1, p.detach() * 1]


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda p: p.sum(),
    "a leaf": lambda p: own(p.detach().requires_grad_(), p),
    "a Parameter": lambda p: own(nn.Parameter(p), p),
    "a Parameter of a view": lambda p: own(nn.Parameter(p.mT), p),
    "swapped": lambda p: [
        backup := p.data,
        setattr(p, "data", torch.ones_like(p)),
        *(p.detach() * 1, backup * 1),
        setattr(p, "data", backup),
        p.detach() * 1,
    ][2:],
    "norm of all": lambda p: p.view(-1).norm(),
    "flat": lambda p: p.flatten()[3:9] * 1,
    "one": lambda p: p[2] * 1,
    "last": lambda p: p[-1] * 1,
    "one row": lambda p: p[2, 5] * 1,
    "select": lambda p: p.select(0, 3) * 1,
    "some": lambda p: p[2:5] * 1,
    "numbered": lambda p: p[torch.tensor([5, 1, 5])] * 1,
    "masked": lambda p: p[torch.arange(EXPERTS) > 5] * 1,
    "none": lambda p: p[None] * 1,
    "ellipsis": lambda p: p[..., 0] * 1,
    "transposed": lambda p: p.mT[3] * 1,
    "permuted": lambda p: p.permute(1, 0, 2) * 1,
    "contiguous": lambda p: p.contiguous() * 1,
    "to": lambda p: p.to(torch.float32) * 1,
    "double": lambda p: p.double(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach() * 1,
    "data": lambda p: p.data * 1,
    "shape": lambda p: (tuple(p.shape), p.stride(), p.dtype, p.dim(), len(p), p.is_contiguous(), p.numel()),
    "iteration": lambda p: torch.stack([one.mean() for one in p]),
    "unbind": lambda p: torch.stack([one.mean() for one in p.unbind()]),
    "chunk": lambda p: [one * 1 for one in p.chunk(2)],
    "split": lambda p: [one * 1 for one in p.split(3, 1)],
    "stack": lambda p: torch.stack([p, p]),
    "equal": lambda p: torch.equal(p, p.clone()),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "zeros_like": lambda p: torch.zeros_like(p),
    "foreach": lambda p: torch._foreach_mul([p, p], 2.0),
    "shown": lambda p: repr(p.detach()),
    "max": lambda p: p.max(dim=0),
    "bmm": lambda p: torch.bmm(p, torch.ones(EXPERTS, p.shape[2], 2)),
}


@pytest.mark.parametrize("read", READS)
def test_reads(both: tuple[Experts, Experts], read: str) -> None:
    left, right = (READS[read](one.gate_up_proj) for one in both)
    assert same(left, right)
    if isinstance(left, torch.Tensor) and left.requires_grad:
        left.square().sum().backward()  # type: ignore[no-untyped-call]
        right.square().sum().backward()
        assert torch.equal(both[0].gate_up_proj.grad, both[1].gate_up_proj.grad.clone())  # type: ignore[arg-type, union-attr]
    elif isinstance(left, torch.Tensor):
        assert not right.requires_grad


def nothing(p: torch.Tensor) -> None:
    with torch.no_grad():
        p[1].zero_()


def rows(p: torch.Tensor) -> None:
    with torch.no_grad():
        p[2:4] *= 3


def indexed(p: torch.Tensor) -> None:
    with torch.no_grad():
        p[3, 1:3] = 7.0


def numbered(p: torch.Tensor) -> None:
    with torch.no_grad():
        p[torch.tensor([0, 6])] = 5.0


def given(p: Any) -> None:
    p.data = torch.full_like(p, 2.0)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "one": nothing,
    "rows": rows,
    "indexed": indexed,
    "numbered": numbered,
    "data": given,
    "clamped": lambda p: p.data.clamp_(-0.05, 0.05),
    "row of data": lambda p: p.data[4].fill_(1.5),
    "flat": lambda p: p.data.view(-1)[5:9].fill_(1.5),
    "transposed": lambda p: p.detach().mT.mul_(2),
    "normal": lambda p: nn.init.normal_(p, generator=torch.Generator().manual_seed(5)),
    "xavier": lambda p: nn.init.xavier_uniform_(p, generator=torch.Generator().manual_seed(5)),
    "vector": lambda p: nn.utils.vector_to_parameters(torch.arange(p.numel()).float(), [p]),
    "foreach": lambda p: torch._foreach_mul_([p.detach()], 0.5),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes(both: tuple[Experts, Experts], write: str) -> None:
    for one in both:
        WRITES[write](one.gate_up_proj)
    assert torch.equal(both[0].gate_up_proj, both[1].gate_up_proj)
    assert not torch.equal(both[0].gate_up_proj, build().blocks[0].experts.gate_up_proj)  # type: ignore[union-attr, arg-type]


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda g: g.clone(),
    "cpu": lambda g: g.cpu(),
    "numpy": lambda g: torch.from_numpy(g.numpy().copy()),
    "flat": lambda g: g.view(-1)[7:20] * 1,
    "finite": lambda g: torch.isfinite(g).all(),
    "largest": lambda g: g.norm(float("inf")),
    "some": lambda g: g.norm(0),
    "value": lambda g: g.clamp_(-1e-5, 1e-5).clone(),
    "halved": lambda g: g.mul_(0.5).clone(),
    "zero": lambda g: g.zero_().clone(),
    "added": lambda g: g.add_(1.0).clone(),
    "row": lambda g: (g[2].fill_(3.0), g.clone())[1],
    "foreach": lambda g: (torch._foreach_mul_([g], 0.5), g.clone())[1],
    "foreach sum": lambda g: torch._foreach_add([g], 1.0),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("what", GRADIENTS)
def test_gradients(both: tuple[Experts, Experts], what: str, store: TieredStore) -> None:
    seen = []
    for one in both:
        one.gate_up_proj.grad = None
        (one.gate_up_proj[1] * 2 + one.gate_up_proj[6]).square().sum().backward()  # type: ignore[no-untyped-call]
        gradient = one.gate_up_proj.grad
        assert gradient is one.gate_up_proj.grad
        seen.append(GRADIENTS[what](gradient))
    assert same(*seen)
    assert torch.equal(*(one.gate_up_proj.grad.clone() for one in both))  # type: ignore[union-attr]


def test_gradients_by_autograd(both: tuple[Experts, Experts]) -> None:
    for one in both:
        loss = (one.gate_up_proj[1] * 2).sum() + one.bias.square().sum()
        loss.backward(inputs=[one.gate_up_proj], retain_graph=True)  # type: ignore[no-untyped-call]
        assert one.bias.grad is None
        one.found = torch.autograd.grad(loss, [one.gate_up_proj, one.bias, one.down_proj], allow_unused=True)  # type: ignore
    assert torch.equal(both[0].gate_up_proj.grad, both[1].gate_up_proj.grad.clone())  # type: ignore[arg-type, union-attr]
    for left, right in zip(both[0].found, both[1].found, strict=True):  # type: ignore[arg-type]
        assert (left is None and right is None) or torch.equal(left, right)


def test_given_and_taken_gradients(both: tuple[Experts, Experts], store: TieredStore) -> None:
    for one in both:
        one.bias.grad = torch.ones_like(one.bias) * 3
        assert torch.equal(one.bias.grad.clone(), torch.full((EXPERTS, WIDTH), 3.0))
        one.bias.grad = None
        assert one.bias.grad is None
    with pytest.raises(RuntimeError, match="shape"):
        both[1].bias.grad = torch.ones(2)


def test_a_given_gradient_that_changes_before_the_step(store: TieredStore) -> None:
    memory, paged = build(), zero.page(build(), store)
    first, second = in_memory(memory), zero.AdamW(paged.parameters(), lr=1e-2)
    sums: list[torch.Tensor] = []
    for model, optimizer in ((memory, first), (paged, second)):
        for step in range(3):
            optimizer.zero_grad()
            model.loss(step).backward()  # type: ignore[no-untyped-call, operator]
            weight: Any = model.blocks[0].experts.down_proj  # type: ignore[union-attr, index]
            weight.grad = given = torch.zeros_like(weight)
            given.add_(1e-3)
            model.loss(step + 1).backward()  # type: ignore[no-untyped-call, operator]
            sums.append(given.clone())
            given.mul_(0.5)
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(sums[:3], sums[3:], strict=True)), "autograd adds to it"
    assert same(dict(memory.state_dict()), dict(paged.state_dict()))
    assert same(states(first), states(second))


def test_data_of_a_gradient_is_written_to_it(both: tuple[Experts, Experts]) -> None:
    for one in both:
        one.bias[2].sum().backward()  # type: ignore[no-untyped-call]
        gradient: Any = one.bias.grad
        gradient.data = torch.full_like(one.bias, 3.0)
        gradient.data = gradient.data
        gradient[1].data.mul_(2)
    assert torch.equal(both[0].bias.grad, both[1].bias.grad.clone())  # type: ignore[arg-type, union-attr]
    with pytest.raises(MisuseError, match=r"assign parameter\.grad"):
        both[1].bias.grad.data = torch.ones(2)  # type: ignore[union-attr]


@pytest.mark.parametrize("forget", ["optimizer", "model", "given"])
def test_a_gradient_that_was_kept_is_not_taken_for_the_next_one(store: TieredStore, forget: str) -> None:
    paged: Model = zero.page(build(), store)
    optimizer = zero.AdamW(paged.parameters(), lr=1e-2)
    paged.loss(0).backward()
    weight = paged.blocks[0].experts.down_proj
    kept, row = weight.grad, weight.grad[3]
    paged.loss(1).backward()  # is added to it
    assert torch.equal(kept.clone(), weight.grad.clone())
    if forget == "given":
        weight.grad = weight.grad.clone() * 3
    else:
        {"optimizer": optimizer, "model": paged}[forget].zero_grad()
        paged.loss(2).backward()
    assert weight.grad is not kept
    for use in (kept.norm, kept.clone, row.clone, lambda: kept.mul_(2), lambda: kept.copy_(weight), lambda: row.fill_(1.0)):
        with pytest.raises(MisuseError, match="gone"):
            use()
    with pytest.raises(MisuseError, match="gone"):
        weight.grad = kept


def test_experts_that_are_frozen_after_backward_have_their_step(store: TieredStore) -> None:
    """As in torch, which asks whether there is a gradient."""
    memory, paged = build(), zero.page(build(), store)
    first, second = in_memory(memory), zero.AdamW(paged.parameters(), lr=1e-2)
    for model, optimizer in ((memory, first), (paged, second)):
        for step in range(4):
            optimizer.zero_grad()
            model.loss(step).backward()  # type: ignore[no-untyped-call, operator]
            model.blocks[0].experts.requires_grad_(step % 2 == 0)  # type: ignore[union-attr, index]
            optimizer.step()
            model.blocks[0].experts.requires_grad_(True)  # type: ignore[union-attr, index]
    assert same(dict(memory.state_dict()), dict(paged.state_dict()))
    assert same(states(first), states(second))


def test_numbers_of_a_view_that_come_again(both: tuple[Experts, Experts]) -> None:
    """Their gradients add up in the order of the numbers."""
    weights = torch.randn(8, WIDTH, 2 * INNER, generator=torch.Generator().manual_seed(1))
    for one in both:
        numbers = torch.tensor([1, 2, 1, 1, 2, 1, 5, 1])
        (one.gate_up_proj.transpose(1, 2)[numbers] * weights).square().sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(both[0].gate_up_proj.grad, both[1].gate_up_proj.grad.clone())  # type: ignore[arg-type, union-attr]


def test_frozen(store: TieredStore) -> None:
    memory, paged = build(), zero.page(build(), store)
    for model in (memory, paged):
        model.blocks[0].experts.requires_grad_(False)  # type: ignore[union-attr, index]
    first, second = in_memory(memory), zero.AdamW(paged.parameters(), lr=1e-2)
    train(memory, first, range(3))
    train(paged, second, range(3))  # type: ignore[arg-type]
    for model in (memory, paged):
        model.blocks[0].experts.requires_grad_(True)  # type: ignore[union-attr, index]
    assert same(train(memory, first, range(3, 6)), train(paged, second, range(3, 6)))  # type: ignore[arg-type]
    assert same(dict(memory.state_dict()), dict(paged.state_dict()))


@pytest.mark.parametrize(
    "use",
    [
        lambda p: copy.deepcopy(p),
        lambda p: pickle.dumps(p),
        lambda p: p.register_hook(lambda gradient: None),
        lambda p: p[3].register_hook(lambda gradient: None),
        lambda p: p[3].requires_grad_(False),
        lambda p: p[3].retain_grad(),
        lambda p: p.resize_(3),
        lambda p: p.detach().t_(),
    ],
)
def test_what_cannot_be_raises(both: tuple[Experts, Experts], use: Callable[[Any], Any]) -> None:
    with pytest.raises(MisuseError):
        use(both[1].gate_up_proj)


def test_gathered(both: tuple[Experts, Experts]) -> None:
    with zero.gathered(both[1].bias, write=True), torch.no_grad():
        both[1].bias[3].fill_(4.0)
        assert both[1].bias[3, 0] == 4.0
    assert (both[1].bias[3] == 4.0).all()


def test_convolutions_are_not_taken_for_experts(store: TieredStore) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ConvTranspose1d(4, 8, 3), nn.Bilinear(4, 4, 8), nn.MultiheadAttention(8, 2))
    zero.page(model, store)
    assert all(isinstance(parameter._tiered, type(model[0].bias._tiered)) for parameter in model.parameters())  # type: ignore


def test_an_unknown_choice_is_named(store: TieredStore) -> None:
    with pytest.raises(MisuseError, match="'sliced' or 'whole'"):
        zero.page(build(), store, paging=zero.Paging(experts="some"))  # type: ignore[arg-type]


# -- large embeddings and linear layers ----------------------------------------------------------------------------------------

WORDS, COLUMNS = 2000, 64


class Words(nn.Module):
    """``kind``: "embedding" (a large one, which is trained), "head" (its weight is the embedding's), "apart" (two weights)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, COLUMNS, padding_idx=5, scale_grad_by_freq=kind == "embedding")
        self.middle = nn.Linear(COLUMNS, COLUMNS)
        self.head = nn.Linear(COLUMNS, 10 if kind == "embedding" else WORDS, bias=kind != "head")
        if kind == "head":
            self.head.weight = self.embedding.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.tanh(self.middle(self.embedding(index))))
        return result

    def loss(self, seed: int) -> torch.Tensor:
        index = torch.randint(0, WORDS, (3, 9), generator=torch.Generator().manual_seed(seed))
        index[0, :4] = torch.tensor([5, 7, 7, WORDS - 1])
        found = self(index).flatten(0, 1)
        return F.cross_entropy(found, index.flatten() % found.shape[1])


def words(kind: str) -> Any:
    torch.manual_seed(2)
    return Words(kind)


@pytest.mark.parametrize(
    ("kind", "update"),
    quick(
        [(kind, update) for kind in ("embedding", "head", "apart") for update in ("on_fetch", "in_backward")],
        [("embedding", "on_fetch"), ("head", "in_backward"), ("apart", "on_fetch")],
    ),
)
def test_weights_larger_than_a_third_of_the_budget(store: TieredStore, kind: str, update: str) -> None:
    """An embedding has the bits of memory. A linear layer adds up the gradient of its input in another order."""
    memory, paged = words(kind), zero.page(words(kind), store)
    first, second = in_memory(memory), zero.AdamW(paged.parameters(), lr=1e-2, update=update)
    seen = train(memory, first, range(4)), train(paged, second, range(4))  # type: ignore[arg-type]
    values = dict(paged.state_dict())
    if kind == "embedding":
        assert same(*seen)
        assert same(dict(memory.state_dict()), values)
        assert same(states(first), states(second))
    assert close(*seen)
    assert all(torch.allclose(values[name], value, atol=3e-4) for name, value in memory.state_dict().items())
    if kind != "head":  # the row of the padding, which gets no gradient
        assert torch.equal(values["embedding.weight"][5], memory.embedding.weight[5])


def test_rows_of_a_large_weight(store: TieredStore, tmp_path: Path) -> None:
    memory, paged = words("apart"), zero.page(words("apart"), store)
    left, right = memory.embedding.weight, paged.embedding.weight  # type: ignore[union-attr]
    numbers = torch.tensor([1999, 3, 0, -1, 3])
    reads: list[Callable[[Any], Any]] = [
        lambda p: p[numbers] * 1,
        lambda p: p[700] * 1,
        lambda p: p[-1, 3] * 1,
        lambda p: p[10:900:7] * 1,
        lambda p: p.t()[5] * 1,
        lambda p: p.sum(),
        lambda p: F.embedding(numbers % WORDS, p),
        lambda p: torch.stack([row.sum() for row in p.unbind()[:3]]),
        lambda p: len(p),
    ]
    assert all(same(read(left), read(right)) for read in reads)
    for p in (left, right):
        with torch.no_grad():
            p[500:1500].mul_(2)
            p[7] = 1.0
    assert torch.equal(left, right)
    with pytest.raises(IndexError):
        paged.embedding(torch.tensor([WORDS]))  # type: ignore[operator]
    zero.export(paged, tmp_path / "export")
    with TieredStore.open(tmp_path / "again", dram="2MiB") as other:  # where no weight is large
        again = zero.page(words("apart"), other, weights=tmp_path / "export")
        assert zero.statistics(again).units < zero.statistics(paged).units
        assert same(dict(again.state_dict()), dict(paged.state_dict()))


@pytest.mark.parametrize("budgets", [("1MiB", "2MiB"), ("2MiB", "1MiB"), ("1MiB", "1200KiB")])
def test_another_budget_has_other_slices(tmp_path: Path, budgets: tuple[str, str]) -> None:
    with TieredStore.open(tmp_path / "store", dram=budgets[0]) as store:
        paged = zero.page(words("embedding"), store)
        optimizer = zero.AdamW(paged.parameters(), lr=1e-2)
        train(paged, optimizer, range(2))  # type: ignore[arg-type]
        paged.loss(2).backward()  # type: ignore[operator]
        zero.commit(paged, optimizer)
    memory = words("embedding")
    first = in_memory(memory)
    train(memory, first, range(2))
    memory.loss(2).backward()
    with TieredStore.open(tmp_path / "other", dram=budgets[1]) as store:
        paged = zero.page(words("embedding"), store, existing="resume", source=tmp_path / "store")
        optimizer = zero.AdamW(paged.parameters(), lr=1e-2)
        zero.resume(paged, optimizer)
        optimizer.step()
        first.step()
        assert same(train(memory, first, range(3, 5)), train(paged, optimizer, range(3, 5)))  # type: ignore[arg-type]
        assert same(dict(memory.state_dict()), dict(paged.state_dict()))
        assert same(states(first), states(optimizer))


def test_what_needs_a_large_weight_whole_is_named(store: TieredStore) -> None:
    paged = zero.page(nn.Embedding(WORDS * 2, COLUMNS, max_norm=1.0), store)
    with pytest.raises(MisuseError, match="larger dram="):
        paged(torch.tensor([1]))


def test_ties_by_data_raise(store: TieredStore) -> None:
    one, other = (zero.page(build(), store, name=name).blocks[0].experts for name in ("one", "other"))  # type: ignore[union-attr, index]
    with pytest.raises(MisuseError, match="share its memory"):
        one.bias.data = other.bias.data  # type: ignore[union-attr]
    one.bias.data = other.bias.clone()  # type: ignore[union-attr, operator]
    assert torch.equal(one.bias, other.bias)  # type: ignore[union-attr, arg-type]


def test_a_state_loads_into_a_divided_layer_that_has_a_bias(tmp_path: Path) -> None:
    """The bias is whole, the weight is written slice by slice."""
    state = {"weight": torch.randn(4000, 64), "bias": torch.randn(4000)}
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = zero.page(nn.Linear(64, 4000), store)
        model.load_state_dict(state)
        assert all(torch.equal(value.clone(), state[name]) for name, value in model.state_dict().items())
        assert not any(tier.held for tier in store.statistics().tiers)
