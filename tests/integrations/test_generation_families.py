"""A model that is imported and opened for reading, in less memory than it takes, says what the model in memory says: many
families of transformers, in all ways of generating, exact and quantised, and over a stand-in of a device's memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from tests.quick import quick  # noqa: E402
from tiered import TieredStore  # noqa: E402
from tiered.integrations.transformers import import_model, open_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

IDS = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SIZES = IDS | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.15,  # so that tokens differ
    "max_position_embeddings": 256,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
OLD = IDS | {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256, "initializer_range": 0.15}
HEADS_OF_V3 = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
GROUPS_OF_V3 = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Mistral": GROUPED | {"sliding_window": 16},
    "Qwen2": GROUPED | {"tie_word_embeddings": True},
    "Qwen3": GROUPED | {"head_dim": 32},
    "Gemma": GROUPED | {"head_dim": 32},
    "Gemma2": GROUPED | {"head_dim": 32, "sliding_window": 16},
    "Gemma3": GROUPED | {"head_dim": 32, "sliding_window": 16},
    "GPT2": OLD,
    "GPTJ": OLD | {"rotary_dim": 16},
    "GPTNeoX": SIZES,
    "Phi": SIZES,
    "Phi3": GROUPED,
    "Olmo2": GROUPED,
    "OPT": SIZES | {"ffn_dim": 256, "init_std": 0.15, "word_embed_proj_dim": 64},
    "Bloom": IDS | {"hidden_size": 128, "n_layer": 4, "n_head": 4, "initializer_range": 0.15},
    "Falcon": IDS | {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "initializer_range": 0.15},
    "StableLm": GROUPED,
    "Starcoder2": GROUPED,
    "Cohere": GROUPED,
    "Granite": GROUPED,
    "Glm4": GROUPED | {"head_dim": 32},
    "SmolLM3": GROUPED,
    "Mixtral": GROUPED | {"num_local_experts": 8, "intermediate_size": 64},
    "Olmoe": GROUPED | {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
    "GraniteMoe": GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
    "Qwen2Moe": GROUPED | EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 64},
    "Qwen3Moe": GROUPED | EXPERTS | {"num_experts": 8, "head_dim": 32},
    "GptOss": GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16},
    "DeepseekV3": SIZES | EXPERTS | HEADS_OF_V3 | GROUPS_OF_V3,
}
Names = Collection[str]
FP32_IN_16 = ("GptOss", "DeepseekV3")
"""Families of which transformers computes some parameters in fp32, whatever the type of the others."""


def made(family: str) -> Any:
    config = getattr(transformers, family + ("TextConfig" if family == "Gemma3" else "Config"))(**FAMILIES[family])
    torch.manual_seed(3)
    return getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM"))(config).eval()


def prompt(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 300, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def said(model: Any, ids: torch.Tensor, *, tokens: int = 10, mask: torch.Tensor | None = None, **options: Any) -> Any:
    torch.manual_seed(5)
    given = {"attention_mask": torch.ones_like(ids) if mask is None else mask, "pad_token_id": 0, "do_sample": False} | options
    return model.generate(ids, max_new_tokens=tokens, **given).tolist()


def ways() -> dict[str, Callable[[Any], Any]]:
    one, batch, drawn = prompt(9), prompt(12, 3, 1), {"do_sample": True, "temperature": 1.3, "top_p": 0.9}
    mask = torch.ones_like(batch)
    mask[0, :7] = mask[2, :3] = 0
    draft = made("Llama")
    return {
        "greedy": lambda model: said(model, one),
        "drawn": lambda model: said(model, one, **drawn),
        "beams": lambda model: said(model, one, num_beams=3, num_return_sequences=2),
        "beams that are drawn": lambda model: said(model, one, num_beams=2, do_sample=True),
        "a batch with padding": lambda model: said(model, batch * mask, mask=mask),
        "its beams": lambda model: said(model, batch * mask, mask=mask, num_beams=2),
        "prompt lookup": lambda model: said(model, torch.cat([one, one], 1), prompt_lookup_num_tokens=3),
        "assisted": lambda model: said(model, one, assistant_model=draft),
        "static cache": lambda model: said(model, one, cache_implementation="static"),
        "a long prompt": lambda model: said(model, prompt(57, 1, 2), tokens=6),
        "a short one": lambda model: said(model, prompt(1, 1, 3), tokens=14),
        "the first one again": lambda model: said(model, one),
        "no cache": lambda model: said(model, one, tokens=5, use_cache=False),
    }


SOME = ("greedy", "its beams", "prompt lookup", "a long prompt", "the first one again")


@pytest.fixture
def chosen(request: pytest.FixtureRequest) -> Names:
    """A few ways in every run, and all of them in the long one."""
    return ways() if request.node.get_closest_marker("soak") else SOME


def compared(store: TieredStore, reference: Any, chosen: Names) -> None:
    model, there = open_model(store), ways()
    texts = set()
    for way in chosen:
        expected = there[way](reference)
        texts.add(str(expected))
        assert there[way](model) == expected, way
    assert len(texts) > 3 * len(chosen) // 7
    assert store.statistics().links[-1].up.bytes > 0


@pytest.mark.parametrize("family", ["DeepseekV3", *quick(FAMILIES, [])])
def test_each_family_says_in_less_memory_what_it_says_in_memory(family: str, chosen: Names, tmp_path: Path) -> None:
    made(family).save_pretrained(tmp_path / "model", max_shard_size="500KB")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with TieredStore.open(tmp_path / "state", dram="8MiB") as store:
        import_model(tmp_path / "model", store, largest_unit=128 << 10)
    weights = sum(parameter.nbytes for parameter in reference.parameters())
    with TieredStore.open(tmp_path / "state", dram="1300KiB", access="read") as store:
        assert weights > 1.3 * (1300 << 10)
        compared(store, reference, chosen)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("GptOss", torch.float16), *quick(product(["Llama", "Mixtral", *FP32_IN_16], [torch.bfloat16, torch.float16]), [])],
)
def test_16_bits_on_the_disk_that_compute_in_float32(family: str, dtype: torch.dtype, chosen: Names, tmp_path: Path) -> None:
    """Also where transformers keeps some parameters in fp32, as long as the files have all in 16 bits."""
    made(family).to(dtype).save_pretrained(tmp_path / "model")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with TieredStore.open(tmp_path / "state", dram="8MiB") as store:
        import_model(tmp_path / "model", store, largest_unit=128 << 10, compute=torch.float32)
        stored = sum(store.spec(key).nbytes for key in store if "/param/" in key)
        assert stored < 0.51 * sum(parameter.nbytes for parameter in reference.parameters()) + (64 << 10)
    with TieredStore.open(tmp_path / "state", dram="1200KiB", access="read") as store:
        compared(store, reference, chosen)


@pytest.mark.parametrize("quantize", quick(["int8", "int4"], []))
@pytest.mark.parametrize("family", ["Llama", "GPT2", "Qwen3Moe", "DeepseekV3"])
def test_quantised_it_says_what_its_weights_say_in_memory(family: str, quantize: Any, chosen: Names, tmp_path: Path) -> None:
    made(family).save_pretrained(tmp_path / "model")
    with TieredStore.open(tmp_path / "state", dram="8MiB") as store:
        model = import_model(tmp_path / "model", store, largest_unit=128 << 10, quantize=quantize)
        reference = made(family)
        reference.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    with TieredStore.open(tmp_path / "state", dram="1MiB", access="read") as store:
        compared(store, reference, chosen)


@pytest.mark.parametrize("family", ["Llama", *quick(["Llama", "Gemma3", "Mixtral"], [])])
def test_over_the_memory_of_a_device(family: str, chosen: Names, tmp_path: Path) -> None:
    made(family).save_pretrained(tmp_path / "model")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with TieredStore.open(tmp_path / "state", dram="8MiB") as store:
        import_model(tmp_path / "model", store, largest_unit=128 << 10)
    with TieredStore.open(tmp_path / "state", dram="1500KiB", hbm="1300KiB", device="cpu", access="read") as store:
        compared(store, reference, chosen)
