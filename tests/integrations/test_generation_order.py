"""The order of a model that generates is known after one token, however it is asked: nothing is planned anew, and a token reads
what next-use eviction has to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from tests.quick import quick  # noqa: E402
from tiered import TieredStore  # noqa: E402
from tiered.engine.retention import room_for  # noqa: E402
from tiered.integrations.transformers import import_model, open_model  # noqa: E402
from tiered.zero.paging.pager import pager_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
SIZES = {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 2, "num_key_value_heads": 2}
SHORT, LONG = [[1, 2, 3]], [list(range(40))]


@pytest.mark.parametrize("embedding", quick(["whole", "sliced", "sliced and tied"], ["sliced and tied"]))
def test_no_way_of_asking_changes_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedding: str) -> None:
    """Nor does it matter which slice of an embedding has the rows of a token."""
    torch.manual_seed(0)
    sizes = SIZES | ({} if embedding == "whole" else {"vocab_size": 2600, "tie_word_embeddings": "tied" in embedding})
    reference = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, initializer_range=0.2, **sizes)).eval()
    assistant = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).eval()
    reference.save_pretrained(tmp_path / "llama")
    with TieredStore.open(tmp_path / "store", dram="16MiB") as store:
        import_model(tmp_path / "llama", store, largest_unit=80_000)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="3MiB", access="read") as store:
        followed: list[int] = []
        follow: Callable[..., Any] = store.follow

        def counted(order: Any, **options: Any) -> Any:
            followed.append(len(order))
            return follow(order, **options)

        monkeypatch.setattr(store, "follow", counted)
        model = open_model(store)
        forwards: list[int] = []
        model.register_forward_hook(lambda *given: forwards.append(store.statistics().links[-1].up.bytes))

        def generated(asked: Any, ids: list[list[int]], tokens: int, **options: Any) -> list[list[int]]:
            torch.manual_seed(7)
            given = {"attention_mask": torch.ones(len(ids), len(ids[0]), dtype=torch.int64), "pad_token_id": 0}
            found: list[list[int]] = asked.generate(torch.tensor(ids), max_new_tokens=tokens, **given, **options).tolist()
            return found

        assert generated(model, SHORT, 3, do_sample=False) == generated(reference, SHORT, 3, do_sample=False)
        begun, planned = len(forwards), len(followed)
        assert planned <= 2, "as the modules are, and as they ran"
        for ids, options in (
            (SHORT, {"do_sample": False}),
            (LONG, {"do_sample": False}),
            (LONG, {"do_sample": True}),
            (SHORT, {"do_sample": False, "num_beams": 3}),
            ([*SHORT, *SHORT], {"do_sample": True}),
            (SHORT, {"do_sample": False, "assistant_model": assistant}),
            (SHORT, {"do_sample": False, "cache_implementation": "static"}),
            (LONG, {"do_sample": False}),
        ):
            assert generated(model, ids, 4, **options) == generated(reference, ids, 4, **options), options
        assert len(followed) == planned, "nothing is planned anew"
        slices = [unit for unit in pager_of(model).units if "embed_tokens.weight[" in unit.plan.name]
        assert (len(slices) > 1) == (embedding != "whole")
        looked_up = max((unit.plan.stored_nbytes for unit in slices), default=0) if "tied" in embedding else 0
        sizes = [unit.plan.stored_nbytes for unit in pager_of(model).units]
        missing = sum(sizes) - store.statistics().tiers[0].capacity
        window = max(sizes) + room_for(store.statistics().tiers[0].capacity, missing, max(sizes))
        assert missing > 2 * window
        each = (forwards[-1] - forwards[begun]) / (len(forwards) - begun - 1)
        assert each <= 1.05 * (missing + window + looked_up), "a slice is used twice, and which is not known"


@pytest.mark.parametrize(
    ("family", "experts"),
    quick(
        [("qwen3_moe", "grouped_mm"), ("mixtral", "eager"), ("qwen3_moe", "eager"), ("mixtral", "grouped_mm")],
        [("qwen3_moe", "grouped_mm"), ("mixtral", "eager")],
    ),
)
def test_experts_are_no_part_of_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, experts: str) -> None:
    """What routers choose changes with each token, and the order does not."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 3, "num_experts_per_tok": 2, "initializer_range": 0.2, **SIZES}
    if family == "mixtral":
        config = transformers.MixtralConfig(num_local_experts=12, **sizes)
    else:
        config = transformers.Qwen3MoeConfig(num_experts=12, moe_intermediate_size=384, head_dim=64, **sizes)
    reference = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=experts).eval()
    reference.save_pretrained(tmp_path / "model")
    with TieredStore.open(tmp_path / "store", dram="48MiB") as store:
        import_model(tmp_path / "model", store, largest_unit=600_000)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="5MiB", access="read") as store:
        followed: list[set[str]] = []
        follow: Callable[..., Any] = store.follow

        def counted(order: Any, **options: Any) -> Any:
            followed.append({touch.key for touch in order})
            return follow(order, **options)

        monkeypatch.setattr(store, "follow", counted)
        model = open_model(store, experts_implementation=experts)
        routed = {unit.key for unit in pager_of(model).units if unit.plan.of_expert}
        assert len(routed) == 3 * 12
        for options in ({"do_sample": False}, {"do_sample": True}, {"do_sample": False, "num_beams": 3}):
            given = {"max_new_tokens": 6, "pad_token_id": 0, "attention_mask": torch.ones(1, 3, dtype=torch.int64), **options}
            found = []
            for one in model, reference:
                torch.manual_seed(5)
                found.append(one.generate(torch.tensor(SHORT), **given).tolist())
            assert found[0] == found[1], options
        assert len(followed) <= 2
        assert all(followed)
        assert not any(keys & routed for keys in followed)
