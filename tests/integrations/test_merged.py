"""Exports of models whose adapters are merged: the values of ``merge_and_unload`` in memory, and what transformers loads."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file  # noqa: E402

from tests.integrations.test_quantised import IDS, experts, gpt2, llama, saved, tied  # noqa: E402
from tiered import MisuseError, TieredStore, zero  # noqa: E402
from tiered.integrations.transformers import export_merged, from_pretrained  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

LINEAR = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[Any, dict[str, Any], str | None]] = {
    "nf4": (llama, LINEAR, "nf4"),
    "int8, DoRA, a trained head": (llama, LINEAR | {"use_dora": True, "modules_to_save": ["lm_head"]}, "int8"),
    "int4, the other way round": (gpt2, LINEAR | {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}, "int4"),
    "exact, embedding, biases": (llama, LINEAR | {"target_modules": ["embed_tokens", "q_proj"], "bias": "lora_only"}, None),
    "exact, slices of experts": (experts, LINEAR | {"target_modules": ["v_proj"], "target_parameters": EXPERTS}, None),
    "VeRA, whose matrices are shared": (llama, {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_weights": False}, "int8"),
    "VBLoRA, whose vectors are shared": (
        *(llama, {"r": 4, "num_vectors": 8, "vector_length": 32, "topk": 2, "target_modules": ["q_proj", "v_proj"]}),
        "int4",
    ),
    "tied, both trained as one": (
        tied,
        LINEAR | {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"], "ensure_weight_tying": True},
        None,
    ),
    "tied, tokens of both": (tied, LINEAR | {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}, None),
    "a table of tokens": (llama, LINEAR | {"trainable_token_indices": {"embed_tokens": [1, 3]}}, None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_values_are_those_of_merging_in_memory(tmp_path: Path, case: str, dtype: torch.dtype | None) -> None:
    make, options, quantize = CASES[case]
    if dtype is not None and quantize is None:
        pytest.skip("rounded in the same way as the others")
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes")
    if "ensure_weight_tying" in options and not hasattr(peft.LoraConfig(), "ensure_weight_tying"):
        pytest.skip("this peft has two copies")
    config = {"VeRA": peft.VeraConfig, "VBLoRA": peft.VBLoRAConfig}.get(case.partition(",")[0], peft.LoraConfig)
    folder = saved(make, tmp_path / "model")
    kind = type(make())

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        found = peft.get_peft_model(model, config(**options))
        with torch.no_grad():
            for name, parameter in found.named_parameters():
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        return found

    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        policy = zero.Policy(quantize=quantize)  # type: ignore[arg-type]
        model = from_pretrained(kind, folder, store, prepare=adapted, policy=policy)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        in_memory = copy.deepcopy(model)
        assert not any(hasattr(one, "_tiered") for one in in_memory.parameters())
        expected = in_memory.merge_and_unload().to(dtype or torch.float32)
        files = export_merged(model, tmp_path / "merged", dtype=dtype, shard="100KB")
        assert len(files) > 2
        shards = [load_file(tmp_path / "merged" / file) for file in files if file.endswith(".safetensors")]
        written = {name: value for shard in shards for name, value in shard.items()}
        there = {name: value for name, value in expected.state_dict().items() if name in written}
        assert written.keys() == there.keys()
        assert all(torch.equal(value, there[name]) for name, value in written.items())
        now = model.state_dict()
        assert now.keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in now.items())
        with pytest.raises(MisuseError, match="existing"):
            export_merged(model, tmp_path / "merged")
    loaded, told = kind.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(told.values()), told
    assert loaded.dtype is (dtype or torch.float32)
    values = loaded.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in expected.state_dict().items() if name in values)
    assert dtype is not None or torch.equal(loaded(IDS).logits, expected(IDS).logits)


def test_what_cannot_be_merged_is_named(tmp_path: Path) -> None:
    folder = saved(tied, tmp_path / "model")
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        options = LINEAR | {"target_modules": ["embed_tokens"]}
        config = peft.LoraConfig(**options)
        model = from_pretrained(type(tied()), folder, store, prepare=lambda base: peft.get_peft_model(base, config))
        with pytest.raises(MisuseError, match=r"'lm_head' and 'model.embed_tokens' share a weight"):
            export_merged(model, tmp_path / "merged")
        with pytest.raises(MisuseError, match=r"what is merged is a peft\.PeftModel"):
            export_merged(model.get_base_model(), tmp_path / "merged")
    with TieredStore.open(tmp_path / "other", dram="2MiB") as store:
        poly = peft.PolyConfig(r=4, target_modules=["q_proj"], n_tasks=2)
        model = from_pretrained(type(tied()), folder, store, prepare=lambda base: peft.get_peft_model(base, poly))
        with pytest.raises(MisuseError, match=r"peft does not merge adapters of type peft\.tuners\.poly\.layer\.Linear"):
            export_merged(model, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
