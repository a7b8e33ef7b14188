"""Experts of a model that generates are fetched together and counted; tokens are those of memory, whatever happens."""

from __future__ import annotations

import copy
import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.quick import quick  # noqa: E402
from tiered import MisuseError, TieredStore, zero  # noqa: E402
from tiered.integrations.transformers import import_model, open_model, routed_experts  # noqa: E402
from tiered.zero.paging.pager import pager_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
EXPERTS, USED, LAYERS = 12, 3, 3
SIZES: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "num_experts_per_tok": USED,
    "initializer_range": 0.2,
}
PROMPT = torch.tensor([[1, 2, 3, 4]])


def made(family: str, **options: Any) -> Any:
    """Return a model in memory."""
    torch.manual_seed(0)
    if family == "mixtral":
        config = transformers.MixtralConfig(num_local_experts=EXPERTS, **SIZES)
    else:
        config = transformers.Qwen3MoeConfig(num_experts=EXPERTS, moe_intermediate_size=384, head_dim=64, **SIZES)
    return transformers.AutoModelForCausalLM.from_config(config, **options).eval()


class Imported:
    """A model in memory, and a folder with a store that has it; ``fresh`` returns a copy of that folder."""

    def __init__(self, folder: Path, family: str) -> None:
        self.reference = made(family)
        self.reference.save_pretrained(folder / "model")
        self.store = folder / "store"
        with TieredStore.open(self.store, dram="48MiB") as store:
            import_model(folder / "model", store, largest_unit=600_000)
            store.close()

    def fresh(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.store, folder / "store"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    return Imported(tmp_path_factory.mktemp("qwen"), "qwen3_moe")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    return Imported(tmp_path_factory.mktemp("mixtral"), "mixtral")


def generated(model: Any, tokens: int = 8, **options: Any) -> list[list[int]]:
    torch.manual_seed(5)
    asked = {"do_sample": True, "pad_token_id": 0, "attention_mask": torch.ones_like(PROMPT), **options}
    found: list[list[int]] = model.generate(PROMPT, max_new_tokens=tokens, **asked).tolist()
    return found


def chosen_by(model: Any) -> list[tuple[int, tuple[int, ...]]]:
    """Return a list to which each choice of the model's routers is added: layer, and experts."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for number, layer in enumerate(model.model.layers):

        def note(module: Any, args: Any, output: Any, number: int = number) -> None:
            found.append((number, tuple(torch.unique(output[2]).tolist())))

        layer.mlp.gate.register_forward_hook(note)
    return found


@pytest.mark.parametrize(
    ("family", "function", "dram"),
    quick(
        [
            (family, function, dram)
            for family in ("qwen", "mixtral")
            for function, dram in [
                *(("eager", "5MiB"), ("eager", "12MiB"), ("grouped_mm", "5MiB"), ("grouped_mm", "48MiB")),
                ("batched_mm", "12MiB"),
            ]
        ],
        [
            *(("qwen", "eager", "5MiB"), ("qwen", "grouped_mm", "48MiB"), ("mixtral", "grouped_mm", "5MiB")),
        ],
    ),
)
def test_tokens_and_counts(request: pytest.FixtureRequest, family: str, function: str, dram: str) -> None:
    """The reference is the model in memory with the same function of experts. Beside the counters: the routers' outputs, and
    what the store read."""
    found_here: Imported = request.getfixturevalue(family)
    reference = found_here.reference
    before = reference.config._experts_implementation
    reference.set_experts_implementation(function)
    expected = [generated(reference), generated(reference, num_beams=3), generated(reference, do_sample=False)]
    reference.set_experts_implementation(before)
    with TieredStore.open(found_here.store, dram=dram, access="read") as store:
        model = open_model(store, experts_implementation=function)
        assert model.config._experts_implementation == function, "the configuration says what is computed"
        experts, choices = routed_experts(model), chosen_by(model)
        experts.recorded = []
        with store.timeline() as timeline:
            found = [generated(model), generated(model, num_beams=3), generated(model, do_sample=False)]
        assert found == expected
        assert experts.recorded == choices
        counted = experts.statistics()
        assert counted.hits + counted.misses == sum(len(chosen) for _, chosen in choices)
        assert counted.hit_bytes + counted.missed_bytes == sum(experts.sizes[n][i] for n, chosen in choices for i in chosen)
        assert counted.hit_share == counted.hits / (counted.hits + counted.misses)
        assert counted.speculated == 0
        routed = {unit.key for unit in pager_of(model).units if unit.plan.of_expert}
        read = sum(one.key in routed for one in timeline.transfers)
        assert read >= counted.misses > 0
        assert counted.hits > 0
        if dram == "48MiB":
            assert read == counted.misses <= LAYERS * EXPERTS
            assert store.offload().stayed == ()


@pytest.mark.parametrize("function", quick(["eager", "grouped_mm"], ["grouped_mm"]))
def test_all_experts_of_a_layer_are_asked_for_at_once(qwen: Imported, function: str) -> None:
    with TieredStore.open(qwen.store, dram="24MiB", access="read") as store:
        model = open_model(store, experts_implementation=function)
        experts = routed_experts(model)
        experts.recorded = []
        keys = {
            unit.plan.placements[0].number: unit.key
            for unit in pager_of(model).units
            if unit.plan.of_expert and ".layers.1." in unit.key
        }
        with store.timeline() as timeline:
            generated(model)
        chosen = [tuple(keys[index] for index in indices) for layer, indices in experts.recorded if layer == 1]
        asked = [one.keys for one in timeline.leases if set(one.keys) <= set(keys.values()) and len(one.keys) > 1]
        assert asked == chosen
        for one in timeline.leases:
            if one.keys in chosen:  # what was missing was decided on before anything of it had arrived
                mine = [t for t in timeline.transfers if t.key in one.keys and one.asked <= t.queued and t.ended <= one.granted]
                assert not mine or max(t.queued for t in mine) <= min(t.ended for t in mine)


@pytest.mark.parametrize(("dram", "tokens"), quick([("5MiB", 10), ("5MiB", 30), ("9MiB", 30), ("14MiB", 30)], [("5MiB", 10)]))
def test_speculation_changes_no_token(qwen: Imported, dram: str, tokens: int) -> None:
    reference = qwen.reference
    expected = generated(reference, tokens, num_beams=2)
    with TieredStore.open(qwen.store, dram=dram, access="read") as store:
        model = open_model(store)
        experts = routed_experts(model)
        experts.speculate, experts.likely = "on", 0.01
        for _ in range(2):
            assert generated(model, tokens, num_beams=2) == expected
        counted = experts.statistics()
        assert counted.speculated >= counted.speculated_used + counted.speculated_unused
        assert store.offload().stayed == ()
        counted = experts.statistics()
        assert counted.speculated >= counted.speculated_used + counted.speculated_unused


@pytest.mark.parametrize("speculate", quick(["off", "on"], ["off"]))
def test_in_a_tier_above_host_memory(qwen: Imported, speculate: Any) -> None:
    """HBM that host memory stands for: hits are those of the tier where experts compute."""
    expected = generated(qwen.reference)
    with TieredStore.open(qwen.store, dram="12MiB", hbm="6MiB", device="cpu", access="read") as store:
        model = open_model(store)
        experts = routed_experts(model)
        experts.speculate, experts.likely = speculate, 0.01
        with store.timeline() as timeline:
            assert generated(model) == expected
        routed = {unit.key for unit in pager_of(model).units if unit.plan.of_expert}
        counted = experts.statistics()
        if speculate == "off":
            assert sum(one.key in routed and one.src == "hbm" for one in timeline.transfers) >= counted.misses > 0
        assert store.offload().stayed == ()


def test_another_type_to_compute_in(tmp_path: Path) -> None:
    reference = made("qwen3_moe").to(torch.bfloat16)
    reference.save_pretrained(tmp_path / "model")
    expected = generated(reference.float())
    with TieredStore.open(tmp_path / "store", dram="48MiB") as store:
        import_model(tmp_path / "model", store, compute=torch.float32)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="4MiB", access="read") as store:
        model = open_model(store)
        assert generated(model) == expected
        assert routed_experts(model).statistics().misses


def test_after_a_training_step(qwen: Imported, tmp_path: Path) -> None:
    """Updates that wait are applied when an expert is used; in training nothing is held together or counted."""
    reference = made("qwen3_moe")
    ids = torch.randint(0, 500, (2, 12), generator=torch.Generator().manual_seed(1))
    with TieredStore.open(qwen.fresh(tmp_path), dram="40MiB") as store:
        model = open_model(store)
        for parameter in model.parameters():
            parameter.requires_grad_()
        for one, optimizer in (
            (model, zero.AdamW(model.parameters(), lr=1e-3)),
            (reference, torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True)),
        ):
            for _ in range(2):
                one(ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        counted = routed_experts(model).statistics()
        assert counted.hits + counted.misses == 0
        assert any(unit.pending is not None for unit in pager_of(model).units)
        assert generated(model) == generated(reference)
        assert routed_experts(model).statistics().misses + routed_experts(model).statistics().hits > 0
        store.close()


@pytest.mark.parametrize("taken", [copy.deepcopy, zero.unpage], ids=["copy.deepcopy", "zero.unpage"])
def test_a_model_in_memory_computes_with_its_own_experts(qwen: Imported, tmp_path: Path, taken: Any) -> None:
    with TieredStore.open(qwen.fresh(tmp_path), dram="48MiB") as store:
        model = open_model(store)
        expected = generated(model)
        there = taken(model) or model
        assert generated(there) == expected
        with torch.no_grad():
            for name, parameter in there.named_parameters():
                if ".experts." in name:
                    parameter.mul_(-1)
            reference = type(there)(there.config)
            reference.load_state_dict(there.state_dict())
            assert torch.equal(there(torch.arange(5)[None]).logits, reference(torch.arange(5)[None]).logits)
    assert generated(there) == generated(reference)


@pytest.mark.parametrize("error", quick([KeyboardInterrupt, ValueError], [KeyboardInterrupt]))
def test_an_exception_among_experts(qwen: Imported, error: type[BaseException]) -> None:
    """Wherever it strikes, nothing stays held, and the next call makes the tokens of memory."""
    reference = qwen.reference
    expected = generated(reference)
    with TieredStore.open(qwen.store, dram="6MiB", access="read") as store:
        model = open_model(store)
        experts = routed_experts(model)
        experts.speculate = "on"
        for after in (0, 1, 4, 7):
            left = [after]

            def strike(module: Any, args: Any, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise error("struck")

            hook = model.model.layers[1].mlp.experts.act_fn.register_forward_pre_hook(strike)
            with pytest.raises(error, match="struck"):
                generated(model)
            hook.remove()
            assert generated(model) == expected
            assert store.offload().stayed == ()


def test_a_function_of_experts_that_is_changed_later(qwen: Imported) -> None:
    reference = qwen.reference
    before = reference.config._experts_implementation
    with TieredStore.open(qwen.store, dram="6MiB", access="read") as store:
        model = open_model(store, experts_implementation=before)
        for function in ("eager", "batched_mm", "grouped_mm", before):
            for one in model, reference:
                one.set_experts_implementation(function)
            assert generated(model) == generated(reference)


def test_who_has_no_experts(tmp_path: Path) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "num_experts_per_tok"}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "model")
    with TieredStore.open(tmp_path / "store", dram="24MiB") as store:
        model = import_model(tmp_path / "model", store)
        with pytest.raises(MisuseError, match="no experts that are read one by one"):
            routed_experts(model)
    with pytest.raises(MisuseError, match="no experts"):
        routed_experts(torch.nn.Linear(2, 2))


def test_statistics_of_a_model_that_is_gone(qwen: Imported) -> None:
    with TieredStore.open(qwen.store, dram="24MiB", access="read") as store:
        experts: Any = routed_experts(open_model(store))
        gc.collect()
        with pytest.raises(MisuseError, match="gone"):
            experts.statistics()
