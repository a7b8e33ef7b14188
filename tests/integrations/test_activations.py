"""Activations in the store, for the model families of transformers at random weights: losses, gradients and parameters are
those of memory, bit for bit, with dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.store.saved import nothing_is_left
from tiered import TieredStore, zero

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 96, 32, 2, 4, 24
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": LAYERS, "num_heads": HEADS}
BART = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "max_position_embeddings": 64,
}  # fmt: skip
OPT = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "word_embed_proj_dim": WIDTH, "ffn_dim": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": 64,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "attention_dropout": 0.1}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**LLAMA, "sliding_window": 8, "attention_dropout": 0.1}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**LLAMA, "attention_dropout": 0.1}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**LLAMA, "head_dim": 8}),
    "phi": ("PhiConfig", "PhiForCausalLM", {**LLAMA, "num_key_value_heads": HEADS, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**BERT, "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "opt": ("OPTConfig", "OPTForCausalLM", OPT),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "attention_dropout": 0.1},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", BERT),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART),
}
QUICK = ("gpt2", "llama")
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES]
STEPS = 3
Around = Callable[[], Any]


def built(name: str, checkpoints: bool) -> nn.Module:
    config, model, values = FAMILIES[name]
    torch.manual_seed(0)
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**values))
    if checkpoints:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return made.train()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, around: Around) -> list[object]:
    """Losses, the gradients of the last step, and the parameters after it."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    numbers: list[object] = []
    options = {} if model.config.model_type == "bert" else {"use_cache": False}
    for step in range(STEPS):
        tokens = torch.randint(1, VOCABULARY, (4, LENGTH), generator=generator)
        optimizer.zero_grad()
        with around():
            loss = model(input_ids=tokens, labels=tokens.roll(-1, 1), **options).loss
        loss.backward()
        numbers.append(loss.item())
        if step == STEPS - 1:
            numbers += [None if p.grad is None else (p.grad + 0).detach().clone() for p in model.parameters()]
        optimizer.step()
    return numbers + [value.clone() for value in model.state_dict().values()]


def same(found: list[object], wanted: list[object]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            assert isinstance(one, torch.Tensor)
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("checkpoints", [False, True], ids=["all", "checkpoints"])
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_memory(name: str, checkpoints: bool, tmp_path: Path) -> None:
    plain = built(name, checkpoints)
    paged, around = copy.deepcopy(plain), copy.deepcopy(plain)
    wanted = trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True), nullcontext)
    with TieredStore.open(tmp_path / "store", dram="1MiB", durability="none") as store:
        blocks: list[tiered.offload_activations] = []

        def block() -> tiered.offload_activations:
            blocks.append(tiered.offload_activations(store, keep=0, min_bytes=1))
            return blocks[-1]

        same(trained(around, torch.optim.AdamW(around.parameters(), lr=1e-3, fused=True), block), wanted)
        assert all(one.statistics().restored > 0 for one in blocks)
        nothing_is_left(store)
    with TieredStore.open(tmp_path / "paged", dram="2MiB", durability="none") as store:
        zero.page(paged, store, activations="store", paging=zero.Paging(experts="whole"))
        same(trained(paged, zero.AdamW(paged.parameters(), lr=1e-3), nullcontext), wanted)
        nothing_is_left(store)


@pytest.mark.parametrize("unit", [None, 24 << 10], ids=["one unit", "layers of several units"])
@pytest.mark.parametrize("name", CASES)
def test_computed_again_they_are_too(name: str, unit: int | None, tmp_path: Path) -> None:
    plain = built(name, checkpoints=False)
    paged = copy.deepcopy(plain)
    wanted = trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True), nullcontext)
    with TieredStore.open(tmp_path / "paged", dram="2MiB", durability="none") as store:
        zero.page(paged, store, activations="recompute", paging=zero.Paging(experts="whole", largest_unit=unit))
        same(trained(paged, zero.AdamW(paged.parameters(), lr=1e-3), nullcontext), wanted)
        assert zero.statistics(paged).computed_again > 0
        nothing_is_left(store)
