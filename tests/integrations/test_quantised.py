"""Quantised imports: tokens of the same dequantised weights in memory, fewer bytes at rest and a token, and what is refused."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.quick import quick  # noqa: E402
from tiered import ManifestError, MisuseError, QuantizedWarning, TieredStore, zero  # noqa: E402
from tiered.cli.main import main  # noqa: E402
from tiered.integrations.kept import opening_of, put_file  # noqa: E402
from tiered.integrations.transformers import from_pretrained, import_model, open_model  # noqa: E402
from tiered.zero.paging.pager import pager_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
LLAMA = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32}
IDS = torch.arange(10).view(2, 5)


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**LLAMA))


def tied() -> Any:
    return LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True))


def experts() -> Any:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**LLAMA, **MOE))


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=2, n_positions=32, initializer_range=0.2))


def saved(make: Callable[[], Any], folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    make().to(dtype).save_pretrained(folder)
    return folder


def tokens(model: Any, **options: Any) -> list[list[int]]:
    given = {"attention_mask": torch.ones_like(IDS), "do_sample": False, "pad_token_id": 0, "max_new_tokens": 8}
    found: list[list[int]] = model.generate(IDS, **given | options).tolist()
    return found


def in_memory(folder: Path, model: Any, dtype: torch.dtype) -> Any:
    """Return the model of ``folder`` in memory, with the values that ``model`` shows."""
    reference = type(model).from_pretrained(folder, dtype=dtype)
    reference.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return reference


@pytest.mark.parametrize(
    ("make", "quantize"),
    quick(
        product([llama, tied, experts, gpt2], ["int8", "int4"]),
        [(llama, "int4"), (tied, "int8"), (experts, "int4"), (gpt2, "int8")],
    ),
)
def test_tokens_are_those_of_the_dequantised_weights(tmp_path: Path, make: Callable[[], Any], quantize: Any) -> None:
    folder = saved(make, tmp_path / "model")
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        model = import_model(folder, store, quantize=quantize)
        sliced = pager_of(model).sliced
        assert bool(sliced) is (make is experts)
        reference = in_memory(folder, model, torch.float32)
        given = type(model).from_pretrained(folder).state_dict()
        for name, value in reference.state_dict().items():
            assert torch.equal(value, given[name]) is (value.dim() == 1 or value.numel() < 1024), name
        expected = tokens(reference)
        assert tokens(model) == expected
        store.close()
    with TieredStore.open(tmp_path / "store", dram="2MiB", access="read") as store:
        model = open_model(store)
        assert tokens(model) == expected
        assert tokens(model, num_beams=2) == tokens(reference, num_beams=2)
        with torch.inference_mode():
            assert tokens(model) == expected
        sampling = {"do_sample": True, "temperature": 2.0}
        torch.manual_seed(1)
        drawn = tokens(reference, **sampling)
        torch.manual_seed(1)
        assert tokens(model, **sampling) == drawn
        stored = sum(store.spec(key).nbytes for key in store if "/param/" in key)
        full = 4 * sum(parameter.numel() for parameter in model.parameters())
        assert full / stored > {"int8": 3.6, "int4": 6.1}[quantize]


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("compute", [None, torch.float32])
def test_a_narrow_checkpoint(tmp_path: Path, quantize: Any, compute: torch.dtype | None) -> None:
    folder = saved(llama, tmp_path / "model", torch.bfloat16)
    dtype = compute or torch.bfloat16
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        import_model(folder, store, quantize=quantize, compute=compute)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="2MiB", access="read") as store:
        model = open_model(store)
        assert model.dtype is dtype
        assert tokens(model) == tokens(in_memory(folder, model, dtype))
        stored = sum(store.spec(key).nbytes for key in store if "/param/" in key)
        assert 2 * sum(parameter.numel() for parameter in model.parameters()) / stored > {"int8": 1.85, "int4": 3.2}[quantize]


def test_bytes_of_a_token(tmp_path: Path) -> None:
    """With a quarter of the fp32 weights as memory all but the embedding is read for each token, or none of int4's."""
    deep = {**LLAMA, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 12}
    folder = saved(lambda: LlamaForCausalLM(LlamaConfig(**deep)), tmp_path / "model")
    read = {}
    for quantize in (None, "int8", "int4"):
        with TieredStore.open(tmp_path / str(quantize), dram="8MiB") as store:
            import_model(folder, store, quantize=quantize, largest_unit=1 << 18)  # type: ignore[arg-type]
            store.close()
        with TieredStore.open(tmp_path / str(quantize), dram="2MiB", access="read") as store:
            model = open_model(store)
            tokens(model, max_new_tokens=3)
            before = sum(link.up.bytes for link in store.statistics().links)
            tokens(model, max_new_tokens=5)
            read[quantize] = sum(link.up.bytes for link in store.statistics().links) - before
            store.close()
    assert read["int8"] < 0.4 * read[None]
    assert read["int4"] < 0.5 * read["int8"]


def test_the_store_says_that_it_is_inexact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(llama, tmp_path / "model")
    command = ["import", str(folder), str(tmp_path / "store"), "--dram", "4MiB", "--quantize", "int4"]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "inexact: 16 of 21 parameters and slices are int4; relative error 8." in told
    assert "% at most (model.layers." in told
    with TieredStore.open(tmp_path / "store", dram="2MiB", access="read") as store:
        opening = opening_of(store, "model")
        assert opening["quantize"] == "int4"
        assert opening["inexact"] in told
        store.close()
    assert main(["verify", str(tmp_path / "store")]) == 0
    assert main(["ls", str(tmp_path / "store")]) == 0
    assert f"{sum(p.numel() for p in llama().parameters()):,}" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "store"), "--out", str(tmp_path / "out")]) == 0
    with TieredStore.open(tmp_path / "store", dram="2MiB", access="read") as store:
        values = open_model(store).state_dict()
        exported = load_file(tmp_path / "out" / "model.safetensors")
        assert all(torch.equal(exported[name], value) for name, value in values.items())


def test_help_names_it_inexact(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"x": torch.ones(3)}, "x.safetensors")
    assert main(["import", "--help"]) == 0
    assert "INEXACT" in capsys.readouterr().out
    assert main(["import", "x.safetensors", "store", "--quantize", "int8"]) == 2
    assert "--quantize and --verify are for models: x.safetensors is tensors" in capsys.readouterr().err


def test_it_is_for_reading_only(tmp_path: Path) -> None:
    folder = saved(experts, tmp_path / "model")
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        model = import_model(folder, store, quantize="int8")
        expected = tokens(model)
        sliced = next(iter(pager_of(model).sliced.values())).parameter
        calls = [
            lambda: zero.AdamW(model.parameters()),
            lambda: model.requires_grad_(True),
            lambda: sliced.requires_grad_(True),
            lambda: sliced.data.zero_(),
            lambda: sliced[1].data.zero_(),
            lambda: model.load_state_dict(model.state_dict()),
            lambda: model.lm_head.weight.data.add_(1),
        ]
        for call in calls:
            with pytest.raises(MisuseError, match="for reading only"):
                call()
        assert tokens(model) == expected


def test_weights_that_cannot_be_quantised(tmp_path: Path) -> None:
    folder = saved(llama, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        with pytest.raises(MisuseError, match=r"parameter 'model\.layers\.1\.mlp\.up_proj\.weight' has infinity or NaN"):
            import_model(folder, store, quantize="int8")
        assert store.generation == 0
    small = {**LLAMA, "vocab_size": 10, "hidden_size": 16, "intermediate_size": 16}
    saved(lambda: LlamaForCausalLM(LlamaConfig(**small)), tmp_path / "small")
    with TieredStore.open(tmp_path / "small-store", dram="2MiB") as store:
        with pytest.raises(MisuseError, match="no parameter of this model is large enough to be quantised as int8"):
            import_model(tmp_path / "small", store, quantize="int8")
        assert store.generation == 0


def test_an_unknown_form_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(llama, tmp_path / "model")
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        with pytest.raises(MisuseError, match="quantize is 'int8', 'int4', 'nf4' or None, not 'int3'"):
            import_model(folder, store, quantize="int3")  # type: ignore[arg-type]
        import_model(folder, store, quantize="int8")
        opening = opening_of(store, "model") | {"quantize": "int3"}
        put_file(store, "model", "opening.json", json.dumps(opening).encode())
        with pytest.raises(ManifestError, match=r"model 'model' in .* is quantised as 'int3', which this release"):
            open_model(store)


# Adapters that are trained over a quantised base


def qwen2() -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA))


def phi() -> Any:
    return transformers.PhiForCausalLM(transformers.PhiConfig(**LLAMA, pad_token_id=0))


def opt() -> Any:
    sizes = {"ffn_dim": 160, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32, "init_std": 0.2}
    return transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=300, hidden_size=64, word_embed_proj_dim=64, **sizes))


LAYERS = {llama: ["q_proj", "down_proj"], tied: ["q_proj", "v_proj"], experts: ["q_proj", "o_proj"], gpt2: ["c_attn", "c_proj"]}
LAYERS |= {qwen2: ["k_proj", "up_proj"], phi: ["dense", "fc2"], opt: ["out_proj", "fc1"]}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"lora_dropout": 0.2},
    "dora": {"use_dora": True},
    "recomputed": {},
    "accumulated and clipped": {},
}


def trained(model: Any, optimizer: torch.optim.Optimizer, way: str, steps: int) -> list[float]:
    """Train, and return the losses."""
    torch.manual_seed(3)
    losses = []
    passes = 2 if way.startswith("accumulated") else 1
    for step in range(steps):
        for number in range(passes):
            ids = (IDS + 7 * step + number) % 64
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
        if passes > 1:
            adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            losses.append(float(torch.nn.utils.clip_grad_norm_(adapters, 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("make", "quantize", "way", "dram"),
    quick(
        product(LAYERS, ["int8", "int4", "nf4"], WAYS, ["1MiB", "64MiB"]),
        [
            (qwen2, "nf4", "dropout", "1MiB"), (tied, "int8", "plain", "1MiB"), (experts, "int4", "plain", "1MiB"),
            (gpt2, "int8", "recomputed", "1MiB"), (phi, "int4", "dora", "64MiB"),
            (opt, "int8", "accumulated and clipped", "1MiB"),
        ],
    ),
)  # fmt: skip
def test_an_adapter_is_trained_over_it(tmp_path: Path, make: Callable[[], Any], quantize: Any, way: str, dram: str) -> None:
    """Losses and the adapter have the bits of the same training over the dequantised weights in memory, and the base is only
    read."""
    peft = pytest.importorskip("peft")
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes")
    config = peft.LoraConfig(r=4, target_modules=LAYERS[make], fan_in_fan_out=make is gpt2, **WAYS[way])
    folder, steps = saved(make, tmp_path / "model"), 20
    options = {"existing": "refuse", "policy": zero.Policy(quantize=quantize)}

    def adapted(base: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(base, config)

    with TieredStore.open(tmp_path / "store", dram=dram) as store:
        model = from_pretrained(type(make()), folder, store, prepare=adapted, **options)
        reference = adapted(type(make()).from_pretrained(folder))
        given = {name: value.clone() for name, value in reference.state_dict().items()}
        base = {name: value.clone() for name, value in model.state_dict().items()}
        reference.load_state_dict(base)
        packed = [unit for unit in pager_of(model).units if unit.plan.read_only]
        before = {unit.key: store.get(unit.key) for unit in packed}
        for name, value in base.items():
            exact = "lora" in name or value.dim() == 1 or value.numel() < 1024
            assert torch.equal(value, given[name]) is exact or "embed_positions" in name or "wpe" in name, name
        if way == "recomputed":
            for one in (model, reference):
                one.gradient_checkpointing_enable()
                one.enable_input_require_grads()
        fused = torch.optim.AdamW((p for p in reference.parameters() if p.requires_grad), lr=1e-2, fused=True)
        expected = trained(reference, fused, way, steps)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        assert trained(model, optimizer, way, steps) == expected
        after = model.state_dict()
        for name, value in reference.state_dict().items():
            assert torch.equal(after[name], value), name
        assert all(torch.equal(store.get(key), value) for key, value in before.items())
        zero.commit(model, optimizer)
        store.close()
    with TieredStore.open(tmp_path / "store", dram=dram) as store:
        model = from_pretrained(type(make()), folder, store, prepare=adapted, **options | {"existing": "resume"})
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        zero.resume(model, optimizer)
        if way == "recomputed":
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        assert trained(model, optimizer, way, 2) == trained(reference, fused, way, 2)
        store.close()


def test_an_adapter_in_memory_over_it(tmp_path: Path) -> None:
    """peft around a model that was imported, and its preparation, which casts what is narrow and freezes all."""
    peft = pytest.importorskip("peft")
    folder = saved(llama, tmp_path / "model")
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        import_model(folder, store, quantize="int4")
        store.close()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        losses = []
        for base in (open_model(store), in_memory(folder, open_model(store, name="model"), torch.float32)):
            torch.manual_seed(1)
            config = peft.LoraConfig(r=4, target_modules=LAYERS[llama])
            model = peft.get_peft_model(peft.prepare_model_for_kbit_training(base), config)
            adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            losses.append(trained(model, torch.optim.AdamW(adapters, lr=1e-2), "plain", 4))
            if len(losses) == 1:
                assert config.base_model_name_or_path == str(tmp_path / "store")
        assert losses[0] == losses[1]
        store.close()


def test_an_adapter_that_is_frozen_stays_exact(tmp_path: Path) -> None:
    """A second one, which is switched to later, and one that is only used."""
    peft = pytest.importorskip("peft")
    folder = saved(llama, tmp_path / "model")
    config = peft.LoraConfig(r=32, target_modules=LAYERS[llama], init_lora_weights=False)

    def adapted(base: Any) -> Any:
        torch.manual_seed(1)
        model = peft.get_peft_model(base, config)
        model.add_adapter("other", config)
        return model

    given = {name: value.clone() for name, value in adapted(LlamaForCausalLM.from_pretrained(folder)).state_dict().items()}
    for frozen in (False, True):
        with TieredStore.open(tmp_path / str(frozen), dram="2MiB") as store:
            policy = zero.Policy(quantize="int4")
            prepare = (lambda base: adapted(base).requires_grad_(False)) if frozen else adapted
            model = from_pretrained(LlamaForCausalLM, folder, store, prepare=prepare, policy=policy)
            found = model.state_dict()
            assert all(torch.equal(found[name], value) for name, value in given.items() if "lora" in name)
            assert sum(one.packing is not None for one in pager_of(model).placements) == 16
            model.set_adapter("other")
            before = {name: value.clone() for name, value in found.items() if "lora" in name}
            optimizer = zero.AdamW(model.parameters(), lr=1e-2)
            trained(model, optimizer, "plain", 2)
            after = model.state_dict()
            changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
            assert changed == {name for name in before if ".other." in name}
            store.close()


def test_what_is_frozen_is_packed_where_that_is_most(tmp_path: Path) -> None:
    """Where most parameters are to be trained, or all are frozen, nobody said which: all are packed, and a warning says so
    where somebody may have meant to train some."""
    for frozen, packed in (((), 3), ((0, 1, 2), 3), ((1,), 3), ((0, 1), 2), ((1, 2), 2)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        for number in frozen:
            model[number].requires_grad_(False)
        with TieredStore.open(tmp_path / f"{frozen}", dram="1MiB") as store:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                zero.page(model, store, policy=zero.Policy(quantize="int8"))
            if frozen == (1,):
                assert [one.category for one in said] == [QuantizedWarning]
                says = "4 parameters that need a gradient ('0.weight' first) are packed, and frozen from here on: 33 % of all"
                assert says in str(said[0].message)
                assert said[0].filename == __file__
            else:
                assert said == []
            assert sum(placement.packing is not None for placement in pager_of(model).placements) == packed
            left = [number for number in range(3) if packed == 2 and number not in frozen]
            trained_here = {f"{number}.{name}" for number in left for name in ("weight", "bias")}
            assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained_here
            if left:
                optimizer = zero.SGD(model.parameters(), lr=0.1)
                values = model.state_dict()
                model(torch.randn(3, 64)).square().mean().backward()
                optimizer.step()
                changed = {name for name, value in model.state_dict().items() if not torch.equal(value, values[name])}
                assert changed == trained_here
                with pytest.raises(MisuseError, match="for reading only: train an adapter over it"):
                    model[frozen[0]].requires_grad_(True)
            store.close()


def test_positions_that_are_never_trained_mark_nothing(tmp_path: Path) -> None:
    """Their maker freezes them; the files that fill a model say nothing of that."""
    sizes = {"vocab_size": 64, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 32}
    parts = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.PegasusConfig(**sizes, **parts)
    transformers.PegasusForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        model = import_model(tmp_path / "model", store, cls=transformers.AutoModelForSeq2SeqLM, quantize="int8")
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        store.close()
    with TieredStore.open(tmp_path / "store", dram="2MiB", access="read") as store:
        model = open_model(store)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
