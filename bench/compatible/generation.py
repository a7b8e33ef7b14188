"""Rows that generate with a model in a store that is open for reading, after one import: token for token."""

from __future__ import annotations

from typing import Any

import torch

from bench.compatible.families import EXPERTS, GPT, GROUPED, LATENT, SEQUENCES, SIZES
from bench.compatible.side import Side, row, tokens

GROUP = "generation"
NEEDS = ("transformers", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
NEW = 8
WIDER = {
    "hidden_size": 128, "intermediate_size": 512, "n_embd": 128, "d_model": 128, "d_ff": 512, "d_kv": 32, "head_dim": 32,
    "ffn_dim": 512, "word_embed_proj_dim": 128, "moe_intermediate_size": 256,
}  # fmt: skip
"""Sizes at which a model is larger than the smallest store."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "tie_word_embeddings": True},
    "qwen3": GROUPED,
    "gemma3_text": {**GROUPED, "sliding_window": 8},
    "phi3": GROUPED,
    "olmo2": GROUPED,
    "gpt2": GPT,
    "gpt_neox": SIZES,
    "opt": {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "deepseek_v3": {name: size for name, size in LATENT.items() if name != "head_dim"},
    "t5": SEQUENCES,
}

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "beams": {"num_beams": 3},
    "assisted": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "a batch with padding": {},
}


EAGER = ("mixtral", "qwen3_moe", "deepseek_v3")
"""Experts whose usual function counts in a way that the device that stands for another one does not know."""


def made(family: str, **changes: Any) -> Any:
    """Return a model with random weights, whose answers differ from token to token."""
    import transformers

    sizes = FAMILIES[family] | {name: size for name, size in WIDER.items() if name in FAMILIES[family]}
    config = transformers.AutoConfig.for_model(family, **{**sizes, "initializer_range": 0.4, **changes})
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    return auto.from_config(config).eval()


def answer(side: Side, family: str, mode: str) -> None:
    elsewhere = side.device.type != "cpu" and family in EAGER
    model = side.answering(made(family), **({"experts_implementation": "eager"} if elsewhere else {}))
    given = {"do_sample": False, **MODES[mode]}
    padded = mode == "a batch with padding"
    ids = tokens(1, 3 if padded else 1, 7, below=250) + 3
    mask = torch.ones_like(ids)
    if padded:
        for place, length in enumerate((0, 2, 5)):
            mask[place, :length] = 0
            ids[place, :length] = 0
    if mode == "assisted":
        torch.manual_seed(1)
        fewer = {"num_layers": 1} if family == "t5" else {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
        given["assistant_model"] = made(family, **fewer)
    for seed in range(2):  # the second time the order is known
        torch.manual_seed(seed)
        found = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, return_dict_in_generate=True, output_logits=True,
            pad_token_id=0, **given,
        )  # fmt: skip
        side.show(f"sequences {seed}", found.sequences)
        side.show(f"logits {seed}", found.logits)


for _family in FAMILIES:
    for _mode in MODES:

        @row(GROUP, f"{_family}, {_mode}", needs=NEEDS, slow=3)
        def _(side: Side, family: str = _family, mode: str = _mode) -> None:
            answer(side, family, mode)
