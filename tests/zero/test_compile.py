"""torch.compile of a paged model gives the bits of the compiled model in memory, compiles nothing anew, and keeps nothing.

Compared with ``aot_eager`` mostly, which compiles as inductor does up to the kernels, and takes a tenth of the time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from tests.versions import COMPILES
from tests.zero.harness import equal
from tests.zero.models import Tied
from tiered import Eviction, MisuseError, TieredStore, zero

pytestmark = [pytest.mark.filterwarnings("ignore"), COMPILES]
AOT: dict[str, Any] = {"backend": "aot_eager"}


@pytest.fixture(autouse=True)
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile anew, in this process, into the test's folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


def batch(number: int, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(number))


def entropy(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), tokens.roll(-1, 1).flatten())


def compilations() -> tuple[int, int]:
    """Return how many frames dynamo looked at so far, and how many graphs it made."""
    return sum(counters["frames"].values()), counters["stats"]["unique_graphs"]


Step = Callable[[int], torch.Tensor]
Way = Callable[[Any, torch.optim.Optimizer], Step]
"""Makes of a model and its optimizer a function that makes one training step and returns its loss."""


def calling(compiled: Callable[[Any], Any]) -> Way:
    """Train with what ``compiled`` returns in the model's place."""

    def way(model: Any, optimizer: torch.optim.Optimizer) -> Step:
        called = compiled(model)

        def step(number: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = entropy(called(batch(number)), batch(number))
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    return way


def each_block(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        block.compile(**{**AOT, **options})
    return model


def replaced(model: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, **AOT)
    return model


def small(layers: int = 2, mode: str = "plain") -> Any:
    """Return a model whose blocks are units in a pool of 1 MiB."""
    torch.manual_seed(0)
    return Tied(width=48, layers=layers, mode=mode)


def compare(store: TieredStore, way: Way, *, steps: int = 4, model: Any = None, stance: Any = "force_eager") -> tuple[int, int]:
    """Train a model in memory and its paged twin in the same way; equal losses and parameters. The last steps compile nothing.
    Returns ``compilations`` of the paged one. ``stance``: of the compiler for the one in memory, which ``aot_eager`` gives the
    same bits as not to compile it does."""
    reference: Any = model or small()
    paged: Any = zero.page(copy.deepcopy(reference), store)
    adam = torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True)
    with torch.compiler.set_stance(stance):
        step = way(reference, adam)
        expected = [step(number) for number in range(steps)]
    torch._dynamo.reset()
    counters.clear()
    step = way(paged, zero.AdamW(paged.parameters(), lr=1e-3))
    found = []
    for number in range(steps):
        if number == 2:
            warm = compilations()
        found.append(step(number))
        assert store.statistics().tiers[0].held == 0, "something keeps memory of a unit"
    assert [loss.item() for loss in found] == [loss.item() for loss in expected]
    assert equal(paged.state_dict(), reference.state_dict())
    assert compilations() == warm, "something is compiled again and again"
    return warm


WAYS: dict[str, Way] = {
    "torch.compile(model)": calling(lambda model: torch.compile(model, **AOT)),
    "blocks, replaced": calling(replaced),
    "checkpoint": calling(each_block),
    "reentrant": calling(each_block),
}


QUICK = ("torch.compile(model)",)


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in QUICK else pytest.mark.soak) for way in WAYS])
def test_a_compiled_model_trains_as_in_memory(store: TieredStore, way: str) -> None:
    model = small(mode=way if way in ("checkpoint", "reentrant") else "plain")
    _, graphs = compare(store, WAYS[way], model=model, stance="force_eager" if model.mode == "plain" else "default")
    assert graphs


def test_a_block_is_compiled_in_one_piece_and_once_for_all_blocks(store: TieredStore) -> None:
    _, graphs = compare(store, calling(lambda model: each_block(model, fullgraph=True)), model=small(layers=6))
    assert graphs == 2, "one block has frozen parameters"


@pytest.mark.soak
def test_blocks_larger_than_a_unit_are_compiled_around_their_layers(store: TieredStore) -> None:
    compare(store, calling(each_block), model=Tied(width=128, layers=2))


@pytest.mark.soak  # a C++ compiler takes a minute
def test_inductor_gives_the_bits_of_the_same_blocks_in_memory(store: TieredStore) -> None:
    model = small().requires_grad_(True)  # with frozen parameters a block would be another graph
    compare(store, calling(lambda model: each_block(model, backend="inductor")), model=model, stance="default")


@pytest.mark.soak
def test_lengths_that_change(store: TieredStore) -> None:
    def way(model: Any, optimizer: torch.optim.Optimizer) -> Step:
        each_block(model, dynamic=True)

        def step(number: int) -> torch.Tensor:
            optimizer.zero_grad()
            tokens = batch(number, 16 - number)
            loss = entropy(model(tokens), tokens)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    compare(store, way)


@pytest.mark.soak
def test_a_compiled_train_step(store: TieredStore) -> None:
    def way(model: Any, optimizer: torch.optim.Optimizer) -> Step:
        @torch.compile(**AOT)
        def step(tokens: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = entropy(model(tokens), tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            return loss

        return lambda number: step(batch(number)).detach()

    compare(store, way)


@pytest.mark.soak
def test_gradients_that_are_stored_when_a_model_is_first_compiled(store: TieredStore) -> None:
    def way(model: Any, optimizer: torch.optim.Optimizer) -> Step:
        entropy(model(batch(7)), batch(7)).backward()
        each_block(model)

        def step(number: int) -> torch.Tensor:
            loss = entropy(model(batch(number)), batch(number))
            loss.backward()
            if number % 2:
                optimizer.step()
            return loss.detach()

        return step

    compare(store, way)


def test_a_compiled_function_reads_parameters_that_are_out(store: TieredStore) -> None:
    """It reads one by name, all of them, their gradients, and one of another block within a graph."""

    def way(model: Any, optimizer: torch.optim.Optimizer) -> Step:
        @torch.compile(**AOT)
        def named(x: torch.Tensor) -> torch.Tensor:
            return (x.sin() @ model.head.weight.t() + 1).square().mean()

        @torch.compile(**AOT)
        def penalty(x: torch.Tensor) -> torch.Tensor:
            return x.mean() + sum(p.square().sum() for p in model.parameters())

        @torch.compile(**AOT)
        def norm() -> torch.Tensor:
            return sum((p.grad.square().sum() for p in model.parameters() if p.grad is not None), torch.zeros(()))

        @torch.compile(**AOT)
        def mixed(x: torch.Tensor) -> torch.Tensor:
            return (model.blocks[0](x) * model.blocks[1].norm.weight + x @ model.blocks[1].out.weight).cos().mean()

        def step(number: int) -> torch.Tensor:
            optimizer.zero_grad()
            x = torch.full((2, 3, 48), 0.1 * number)
            losses = [function(x) for function in (named, penalty, mixed)]
            for loss in losses:  # apart, because a sum of three gradients depends on their order
                loss.backward()
            found = torch.stack([*(loss.detach() for loss in losses), norm()])
            optimizer.step()
            return found.sum()

        return step

    compare(store, way)


def test_a_module_is_compiled_again_when_its_parameters_are_out(store: TieredStore) -> None:
    """What was compiled while a block held them has no hooks of the layers within."""
    reference: Any = small()
    paged: Any = zero.page(copy.deepcopy(reference), store)
    x = torch.randn(2, 3, 48)
    expected = reference.blocks[0].mlp(x)
    called = torch.compile(lambda module: module(x) * 2, **AOT)
    with zero.gathered(paged.blocks[0]):
        assert torch.equal(called(paged.blocks[0].mlp), 2 * expected)
    for _ in range(2):
        assert torch.equal(called(paged.blocks[0].mlp), 2 * expected)
        assert paged.blocks[0].mlp[1].weight.__class__ is not nn.Parameter
    assert store.statistics().tiers[0].held == 0


@pytest.mark.soak
def test_evaluation_between_steps(store: TieredStore) -> None:
    def way(model: Any, optimizer: torch.optim.Optimizer) -> Step:
        called = torch.compile(model, **AOT)

        def step(number: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = entropy(called(batch(number)), batch(number))
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                first = called(batch(9)).sum()
            with torch.inference_mode():
                return loss.detach() + first + called(batch(8)).sum()

        return step

    compare(store, way)


def test_what_a_graph_saves_of_parameters_is_no_memory(store: TieredStore) -> None:
    model: Any = zero.page(each_block(small()), store)
    unit = model.blocks[0].out.weight._tiered.resolve()[1]
    loss = entropy(model(batch(0)), batch(0))
    assert unit.references, "the compiled graph saved its parameters in another way"
    assert store.statistics().tiers[0].held == 0
    loss.backward()
    assert not unit.references


def test_a_graph_of_before_a_step_raises_in_backward(store: TieredStore) -> None:
    model: Any = zero.page(each_block(small()), store)
    optimizer = zero.AdamW(model.parameters())
    stale, loss = (entropy(model(batch(number)), batch(number)) for number in range(2))
    loss.backward()
    optimizer.step()
    with pytest.raises(MisuseError, match="were updated, or written to, after this graph was made"):
        stale.backward()


def test_an_exception_within_a_compiled_forward(store: TieredStore) -> None:
    class Struck(Exception):
        pass

    def strike(*_: object) -> None:
        raise Struck

    def way(model: Any, optimizer: torch.optim.Optimizer) -> Step:
        called = torch.compile(model, **AOT)

        def step(number: int) -> torch.Tensor:
            if number == 0:
                handle = model.norm.register_forward_pre_hook(strike)
                with suppress(Struck):
                    called(batch(number))
                handle.remove()
            with suppress(RuntimeError):
                called(batch(number, 40))  # more than there are positions
            optimizer.zero_grad()
            loss = entropy(called(batch(number)), batch(number))
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    compare(store, way)


@pytest.mark.soak
@pytest.mark.parametrize("what", ["in_backward", "micro_batch"])
def test_options_of_paging(tmp_path: Path, what: str) -> None:
    """Beside a paged model that is not compiled. The modules that are split are not compiled."""
    models = []
    for number in range(2):
        with TieredStore.open(tmp_path / str(number), dram="1MiB", eviction=Eviction(deadline=20)) as store:
            model: Any = zero.page(small(), store, micro_batch=2 if what == "micro_batch" else 1)
            optimizer = zero.AdamW(model.parameters(), update="in_backward" if what == "in_backward" else "on_fetch")
            called = torch.compile(each_block(model), **AOT) if number else model
            for step in range(3):
                optimizer.zero_grad()
                entropy(called(batch(step)), batch(step)).backward()
                optimizer.step()
            models.append(model.state_dict())
    assert equal(*models)


@pytest.mark.soak
def test_two_models_in_one_function(tmp_path: Path, store: TieredStore) -> None:
    references: list[Any] = [small(), small()]
    with TieredStore.open(tmp_path / "another", dram="1MiB", eviction=Eviction(deadline=20)) as another:
        paged = [zero.page(copy.deepcopy(one), into) for one, into in zip(references, (store, another), strict=True)]
        for models in (references, paged):
            called = torch.compile(lambda tokens, models=models: models[0](tokens) * models[1](tokens), **AOT)
            torch._dynamo.reset()
            for step in range(2):
                called(batch(step)).square().mean().backward()
        for model, reference in zip(paged, references, strict=True):
            for ours, its in zip(model.parameters(), reference.parameters(), strict=True):
                assert (ours.grad is None) is (its.grad is None)
                assert its.grad is None or torch.equal(ours.grad, its.grad)
            del model
        del paged


def test_gathered_and_state_dict_in_a_compiled_function(store: TieredStore) -> None:
    model: Any = zero.page(small(), store)

    @torch.compile(**AOT)
    def read(x: torch.Tensor) -> torch.Tensor:
        with zero.gathered(model.blocks[0]):
            y = x.sin() + model.blocks[0].out.weight.sum()
        return y * 2 + model.state_dict()["blocks.0.out.weight"].sum()

    value = model.state_dict()["blocks.0.out.weight"].sum()
    assert torch.equal(read(torch.ones(3)), (torch.ones(3).sin() + value) * 2 + value)
    assert store.statistics().tiers[0].held == 0


def test_a_model_that_was_compiled_before_it_is_paged(store: TieredStore) -> None:
    model: Any = small()
    called = torch.compile(model, **AOT)
    with torch.no_grad():
        expected = called(batch(0))
        zero.page(model, store)
        assert torch.equal(called(batch(0)), expected)


def test_what_is_compiled_is_compiled_in_evaluation_too(store: TieredStore) -> None:
    """Where nothing is recorded, layers of torch may get parameters that dynamo cannot see through."""
    made = []
    for way in (torch.enable_grad, torch.no_grad):
        torch._dynamo.reset()
        counters.clear()
        with way():
            model = each_block(zero.page(small(), store, name=way.__name__))
            expected = model(batch(0)).detach()
            made.append(compilations()[1])
            assert torch.equal(model(batch(0)).detach(), expected)
    assert made[0] == made[1] > 0


class Scaled(nn.Module):
    """Its number is an input of what dynamo makes for any shape, made a tensor by ``torch.as_tensor``."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin() * self.scale


def test_numbers_of_modules_in_graphs_of_any_shape(store: TieredStore) -> None:
    model: Any = zero.page(nn.Sequential(Scaled(0.5), Scaled(0.25)), store)
    called = torch.compile(model, backend="eager", dynamic=True)
    for rows in (2, 3, 4):
        x = torch.linspace(-1, 1, rows * 8).view(rows, 8)
        assert torch.equal(called(x), model(x))


@pytest.mark.soak
def test_compiled_autograd(store: TieredStore) -> None:
    def way(model: Any, optimizer: torch.optim.Optimizer) -> Step:
        each_block(model)

        def step(number: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = entropy(model(batch(number)), batch(number))
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    compare(store, way)


def test_a_whole_model_in_one_graph_is_refused_with_a_reason(store: TieredStore) -> None:
    model: Any = zero.page(small(), store)
    expected = model(batch(0))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave out fullgraph=True"):
        torch.compile(model, fullgraph=True, **AOT)(batch(0))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave out fullgraph=True"):
        torch.export.export(model, (batch(0),), strict=True)
    assert torch.equal(model(batch(0)), expected)


def test_constants_are_refused(store: TieredStore) -> None:
    model: Any = zero.page(each_block(small(), backend="inductor"), store)
    refused = pytest.raises(MisuseError, match="freezing keeps copies of all parameters")
    with torch._inductor.config.patch(freezing=True), torch.no_grad(), refused:
        model(batch(0))
    assert store.statistics().tiers[0].held == 0


def test_dynamo_leaves_code_beside_paging_as_it_is() -> None:
    """Hooks of ours in torch are seen through where no parameter is paged: torch's functions compile in one piece."""
    square = torch.compile(torch.func.vmap(lambda x: x.square().sum()), fullgraph=True, **AOT)
    assert square(torch.ones(3, 2)).tolist() == [2, 2, 2]
    gradient = torch.compile(torch.func.grad(lambda x: x.square().sum()), fullgraph=True, **AOT)
    assert gradient(torch.ones(3)).tolist() == [2, 2, 2]
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    torch.compile(optimizer.step, **AOT)()
    assert parameter.tolist() == [0.5, 0.5, 0.5]
