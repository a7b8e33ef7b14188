"""Layers that are alike: the notes of a model that four of its layers were trained for are those of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.quick import quick
from tiered.planning import layers
from tiered.planning.dry_run import TrainingSetup, dry_run
from tiered.planning.layers import KEPT, train
from tiered.planning.machine import Machine
from tiered.planning.notes import slices_in_groups, slices_of
from tiered.planning.plan import Choice, Planner
from tiered.planning.rehearsal import rehearse
from tiered.planning.sources import Numbers, Subject, Workload, subject_of
from tiered.planning.timing import Timing
from tiered.zero.paging.units import Limits, Policy
from tiered.zero.rules.known import CHOICES

LAYERS = 9
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": 300,
    "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 2,
}  # fmt: skip


def of_transformers(kind: str, **more: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind.partition('For')[0]}Config")(**SHAPE | more)
    with torch.device("meta"):
        made: nn.Module = getattr(transformers, kind)(config)
    return made


def gpt(gated: bool = False) -> nn.Module:
    return Numbers(layers=LAYERS, width=64, heads=4, vocabulary=256, gated=gated).build()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "gated": lambda: gpt(gated=True),
    "llama": lambda: of_transformers("LlamaForCausalLM", num_key_value_heads=2),
    "llama without a cache": lambda: of_transformers("LlamaForCausalLM", num_key_value_heads=2, use_cache=False),
    "bert": lambda: of_transformers("BertForMaskedLM"),
    "experts": lambda: of_transformers("Qwen3MoeForCausalLM", **EXPERTS),
    "experts without a cache": lambda: of_transformers("Qwen3MoeForCausalLM", **EXPERTS, use_cache=False),
    "experts after dense layers": lambda: of_transformers("DeepseekV3ForCausalLM", num_key_value_heads=4, **DEEPSEEK),
}  # fmt: skip
SETUP = TrainingSetup(1 << 20, Limits.of(1 << 20), CHOICES["adamw"].usual)
LARGER = replace(SETUP, pool=4 << 20, limits=Limits.of(4 << 20))
SETUPS = {
    "on fetch": SETUP,
    "in backward": replace(SETUP, update="in_backward"),
    "accumulates": replace(LARGER, passes=2),
    "recompute": replace(LARGER, activations="recompute"),
    "in two parts": replace(LARGER, micro_batch=2),
    "divided and recomputed": replace(SETUP, activations="recompute"),
    "cut": replace(SETUP, pool=256 << 10, limits=Limits.of(256 << 10)),
}
PAIRS = [(model, setup) for model in MODELS for setup in SETUPS]
AGAIN = ("recompute", "divided and recomputed")
OTHERS = {(model, setup) for model in ("llama", "experts") for setup in AGAIN}
"""Whose forward, computed again, adds to a cache of keys and values: the whole model is trained."""
REFUSED = {(model, "in two parts") for model in ("llama", "experts")} | {
    (model, setup) for model in MODELS for setup in (*AGAIN, "in two parts") if model.startswith("experts after")
}
"""What cannot be divided because of such a cache, or computed again without values."""


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers of each model that was trained."""
    seen: list[int] = []

    def noting(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(max(len(module) for module in model.modules() if isinstance(module, nn.ModuleList)))
        return dry_run(model, *args, **kwargs)

    monkeypatch.setattr(layers, "dry_run", noting)
    return seen


def subject(model: nn.Module) -> Subject:
    return subject_of(model, Workload(batch=2, sequence=16))


def both(what: Subject, setup: TrainingSetup) -> tuple[Any, Any]:
    asked = (what.model, what.args, what.kwargs, what.loss, what.target, setup)
    return train(*asked), dry_run(*asked)


@pytest.mark.parametrize(
    ("model", "setup"),
    quick(
        [pair for pair in PAIRS if pair not in REFUSED],
        [
            *(("gpt", "on fetch"), ("llama without a cache", "recompute"), ("experts", "in backward")),
            ("experts without a cache", "divided and recomputed"),
        ],
    ),
)
def test_notes_of_four_layers_are_those_of_all(trained: list[int], model: str, setup: str) -> None:
    found, whole = both(subject(MODELS[model]()), SETUPS[setup])
    assert found == whole
    assert list(found.initial) == list(whole.initial)
    if (model, setup) not in OTHERS:
        first = 2 if model == "experts after dense layers" else 0
        assert trained == [first + KEPT, first + KEPT - 1]


class Loop(nn.Module):
    """Layers that are alike, or nearly."""

    def __init__(self, change: Callable[[nn.ModuleList], None], order: Callable[[Any], Any] = list) -> None:
        super().__init__()
        self.before = nn.Linear(64, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)) for _ in range(LAYERS))
        self.order = order
        change(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.order(self.layers):
            x = x + layer(x)
        return x


def test_a_loop_over_layers_is_trained_with_four(trained: list[int]) -> None:
    found, whole = both(subject_of(Loop(lambda _: None), Workload(inputs=torch.zeros(4, 64))), SETUPS["cut"])
    assert found == whole
    assert trained == [KEPT, KEPT - 1]


def shares(found: nn.ModuleList) -> None:
    for layer in found[1:]:
        layer[0].weight = found[0][0].weight


def differs(found: nn.ModuleList) -> None:
    found[4][1].p = 0.2


def is_frozen(found: nn.ModuleList) -> None:
    found[4][0].weight.requires_grad_(False)


def twice(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output @ torch.ones(64, 64, device=output.device)


def has_a_hook(found: nn.ModuleList) -> None:
    found[4].register_forward_hook(twice)


@pytest.mark.parametrize("change", [shares, differs, is_frozen, has_a_hook])
def test_what_differs_from_layer_to_layer_is_trained_as_it_is(trained: list[int], change: Any) -> None:
    what = subject_of(Loop(change), Workload(inputs=torch.zeros(4, 64)))
    found, whole = both(what, SETUPS["cut"])
    assert found == whole
    assert trained[-1] == LAYERS


class Gathers(Loop):
    """Computes with what all layers gave, together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, x = [], self.before(x)
        for layer in self.layers:
            found.append(x := x + layer(x))
        return torch.stack(found).sum(0)


class Counts(Loop):
    """Computes with as many numbers as there are layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x) * torch.ones(len(self.layers), 64, device=x.device).mean(0)
        return found


@pytest.mark.parametrize("kind", [Gathers, Counts])
def test_what_depends_on_the_number_of_layers_is_trained_as_it_is(trained: list[int], kind: type[Loop]) -> None:
    what = subject_of(kind(lambda _: None), Workload(inputs=torch.zeros(4, 64)))
    found, whole = both(what, SETUPS["cut"])
    assert found == whole
    assert trained[-1] == LAYERS


def every_second(found: nn.ModuleList) -> list[nn.Module]:
    return [*found[::2], *found[1::2]]


def test_layers_in_another_order_are_trained_as_they_are(trained: list[int]) -> None:
    what = subject_of(Loop(lambda _: None, every_second), Workload(inputs=torch.zeros(4, 64)))
    found, whole = both(what, SETUPS["cut"])
    assert found == whole
    assert trained == [KEPT, KEPT - 1, LAYERS]


def test_where_activations_wait_in_the_store_the_whole_model_says_which(trained: list[int]) -> None:
    found, whole = both(subject(gpt()), replace(LARGER, activations="store"))
    assert found == whole
    assert trained == [LAYERS]


def test_slices_that_are_taken_together_move_as_many_bytes() -> None:
    planned = subject(MODELS["experts"]())
    machine = Machine(read=1e9, write=1e9, lease=1e-3)
    step = Planner(planned, machine, CHOICES["adamw"].usual, Policy(), 1).step(Choice(dram=1 << 20))
    assert slices_of(step)[1] == 8
    assert slices_in_groups(step, 1) == step
    one, four = (
        rehearse(slices_in_groups(step, together), 1 << 20, machine.drive, Timing(machine), warm_up=2, counted=1)
        for together in (1, 4)
    )
    assert four.touches < 0.5 * one.touches
    assert four.read + four.written == pytest.approx(one.read + one.written, rel=0.05)
    assert four.by_work == pytest.approx(one.by_work)
    assert sum(slices_in_groups(step, 4).initial.values()) == sum(step.initial.values())


def test_slices_that_are_taken_together_have_room_with_all_of_their_states() -> None:
    larger = EXPERTS | {"num_experts": 32, "moe_intermediate_size": 512, "num_hidden_layers": 2}
    planned, choice = subject(of_transformers("Qwen3MoeForCausalLM", **larger)), Choice("in_backward", "memory", 3 << 20)
    whole, coarse = (
        Planner(planned, None, CHOICES["adamw"].usual, Policy(), 1, rehearsed=touches).predict(choice)
        for touches in (10_000, 10)
    )
    assert coarse.touches == whole.touches
    assert coarse.read + coarse.written == pytest.approx(whole.read + whole.written, rel=0.1)
