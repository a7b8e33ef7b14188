"""Models in GGUF files, beside the same models as transformers has them in memory."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers, gguf = pytest.importorskip("transformers"), pytest.importorskip("gguf")

from tokenizers import pre_tokenizers  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tests.gguf_files import FAMILIES, HIDDEN, NEWER, WORDS, family, write  # noqa: E402
from tests.integrations.test_quantised import trained  # noqa: E402
from tiered import GgufError, MisuseError, TieredStore, zero  # noqa: E402
from tiered.cli.main import main  # noqa: E402
from tiered.integrations import importing  # noqa: E402
from tiered.integrations.kept import opening_of  # noqa: E402
from tiered.integrations.transformers import from_pretrained, import_model, open_model, open_tokenizer  # noqa: E402
from tiered.integrations.transformers.gguf import GgufModel, _Sources  # noqa: E402
from tiered.zero.construction import deferred  # noqa: E402
from tiered.zero.paging.pager import pager_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
FILE = "small-q4_k_m.gguf"
IDS = torch.arange(24).view(2, 12)


def made(folder: Path, architecture: str = "llama", dtype: torch.dtype = torch.float32, **options: int) -> Any:
    """Write a file in ``folder`` and return the model as transformers has it in memory."""
    tokens = [f"<{number}>" for number in range(WORDS)]
    write(folder / FILE, architecture, *family(architecture, **options), add_token_list=tokens)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=dtype)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits  # type: ignore[no-any-return]


def assert_alike(model: Any, reference: Any) -> None:
    values = model.state_dict()
    for name, value in reference.state_dict().items():
        assert torch.equal(values[name], value), name
    assert torch.equal(logits(model), logits(reference))


def forms(model: Any) -> dict[str, str]:
    return {one.name: one.form for one in pager_of(model).placements}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_model_is_as_in_memory(tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are permuted, norms less 1, tied and turned matrices, experts of which two tensors become one."""
    reference = made(tmp_path, architecture)
    monkeypatch.setattr(deferred, "READ_AT_ONCE", 100_000)
    with TieredStore.open(tmp_path / "store", dram="12MiB") as store:
        model = import_model(tmp_path, store, gguf_file=FILE, verify=True)
        assert_alike(model, reference)
        found = forms(model)
        store.close()
    layer = "transformer.h.1." if architecture == "gpt2" else "model.layers.1."
    packed = {name.removeprefix(layer): form for name, form in found.items() if name.startswith(layer) and "GGUF" in form}
    expected = {f"self_attn.{one}_proj.weight": form for one, form in zip("qkv", ("Q4_K", "Q6_K", "Q8_0"), strict=True)}
    if architecture == "gpt2":  # whose matrices lie the other way round
        expected = dict.fromkeys((f"{one}.weight" for one in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")), "Q4_K")
    elif architecture == "qwen3moe":  # gate and up are of two types in this layer, and of one in the other
        expected |= {f"mlp.experts.down_proj[{expert}]": "Q6_K" for expert in range(4)}
        assert found["model.layers.0.mlp.experts.gate_up_proj[3]"] == "GGUF Q4_K"
    else:
        expected |= {"mlp.gate_proj.weight": "Q4_K", "mlp.down_proj.weight": "Q6_K"}
    assert packed == {name: f"GGUF {form}" for name, form in expected.items()}
    with TieredStore.open(tmp_path / "store", dram="12MiB", access="read") as store:
        opened = open_model(store)
        assert torch.equal(logits(opened), logits(reference))
        options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(IDS), "pad_token_id": 0}
        assert torch.equal(opened.generate(IDS, **options), reference.generate(IDS, **options))


@pytest.mark.parametrize("architecture", NEWER)
def test_a_model_of_the_newer_loader_is_as_in_memory(tmp_path: Path, architecture: str) -> None:
    """Whose conversions permute some of the rows, or columns, of a matrix, and join experts."""
    pytest.importorskip("transformers.integrations.gguf")
    reference = made(tmp_path, architecture)
    with TieredStore.open(tmp_path / "store", dram="12MiB") as store:
        model = import_model(tmp_path, store, gguf_file=FILE, verify=True)
        assert_alike(model, reference)
        found = {name.removeprefix("model.layers."): form for name, form in forms(model).items()}
        store.close()
    expected = {"0.conv.in_proj.weight[0]": "GGUF Q4_K", "0.conv.out_proj.weight": "GGUF Q6_K"}
    if architecture == "qwen35moe":
        expected = {f"0.mlp.experts.gate_up_proj[{expert}]": "GGUF Q4_K" for expert in range(4)}
        expected |= {"0.linear_attn.in_proj_qkv.weight": "GGUF Q4_K", "0.linear_attn.in_proj_z.weight": "GGUF Q6_K"}
        expected |= {"0.linear_attn.out_proj.weight": "torch.float32", "1.self_attn.o_proj.weight": "GGUF Q5_K"}
    assert found == found | expected


def test_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    made(tmp_path)
    there = {one.name: one.data for one in gguf.GGUFReader(tmp_path / FILE).tensors}
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        model = import_model(tmp_path / FILE, store)
        assert "13 parameters and slices are packed as in the files" in opening_of(store, "model")["inexact"]
        for unit in pager_of(model).units:
            for one in unit.plan.placements:
                if one.name in names:
                    data = torch.from_numpy(there.pop(names.pop(one.name)).copy()).view(-1)
                    at = slice(one.stored_offset, one.stored_offset + len(data))
                    assert torch.equal(store.get(unit.key)[at], data), one.name
        store.close()
    assert not names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_weight_is_divided_at_rows(tmp_path: Path, dtype: torch.dtype) -> None:
    reference = made(tmp_path, dtype=dtype, inner=1536)
    with TieredStore.open(tmp_path / "store", dram="6MiB") as store:
        paging = zero.Paging(largest_unit=1 << 18, slice_weights=True)
        model = from_pretrained(AutoModelForCausalLM, tmp_path, store, gguf_file=FILE, dtype=dtype, paging=paging)
        packed = [one for one in pager_of(model).placements if one.packing is not None]
        assert {one.sliced.name for one in packed if one.sliced is not None} > {"model.layers.0.mlp.gate_proj.weight"}
        assert_alike(model, reference)
        store.close()


def test_an_adapter_is_trained_over_it(tmp_path: Path) -> None:
    """With the gradients, losses and adapter of the same training in memory; and goes on from its commit."""
    peft = pytest.importorskip("peft")
    reference = made(tmp_path)
    weights = reference.state_dict()
    base = transformers.LlamaForCausalLM(reference.config)  # a model from a GGUF file is not trainable to transformers
    base.load_state_dict(weights)

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))

    resident = adapted(base).train()
    fused = torch.optim.AdamW([one for one in resident.parameters() if one.requires_grad], lr=1e-2, fused=True)
    with TieredStore.open(tmp_path / "store", dram="6MiB") as store:
        model = from_pretrained(AutoModelForCausalLM, tmp_path, store, gguf_file=FILE, prepare=adapted)
        assert sum("GGUF" in form for form in forms(model).values()) == 13
        model.train()
        for one in (model, resident):
            one(input_ids=IDS, labels=IDS).loss.backward()
        found = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
        assert len(found) == 8
        assert all(torch.equal(grad, resident.get_parameter(name).grad) for name, grad in found.items())
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        for one in (optimizer, fused):
            one.zero_grad()
        assert trained(model, optimizer, "plain", 2) == trained(resident, fused, "plain", 2)
        zero.commit(model, optimizer)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="6MiB") as store:
        options: dict[str, Any] = {"gguf_file": FILE, "prepare": adapted, "existing": "resume"}
        model = from_pretrained(AutoModelForCausalLM, tmp_path, store, **options)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        zero.resume(model, optimizer)
        assert trained(model.train(), optimizer, "plain", 1) == trained(resident, fused, "plain", 1)
        store.close()


def test_a_file_of_a_model_on_the_hub_is_fetched_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the hub's cache are links to others."""
    reference = made(tmp_path)
    (tmp_path / FILE).rename(tmp_path / "blob")
    (tmp_path / FILE).symlink_to(tmp_path / "blob")
    asked: list[object] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        assert_alike(import_model("org/small", store, gguf_file=FILE), reference)
        with pytest.raises(MisuseError, match=r"has no file 'other\.gguf'"):
            from_pretrained(AutoModelForCausalLM, "org/small", store, gguf_file="other.gguf")
        store.close()
    assert asked == [("org/small", [FILE]), ("org/small", ["other.gguf"])]


def test_what_prepare_writes_to_is_read_first(tmp_path: Path) -> None:
    """Where that is not packed. Weights that the file lacks are initialised, as a new head is."""
    reference = made(tmp_path)
    weight = reference.model.norm.weight.detach() * 2

    def doubled(model: Any) -> Any:
        with torch.no_grad():
            model.model.norm.weight.mul_(2)
        return model

    cls = transformers.AutoModelForSequenceClassification
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        with pytest.warns(UserWarning, match="LlamaForSequenceClassification of transformers does not take.*'output.weight'"):
            model = from_pretrained(cls, tmp_path, store, gguf_file=FILE, prepare=doubled)
        assert torch.equal(model.get_parameter("model.norm.weight").detach(), weight)
        assert model.get_parameter("score.weight").shape == (2, HIDDEN)
        assert "GGUF Q4_K" in forms(model).values()
        store.close()

    def emptied(model: Any) -> Any:
        model.model.layers[0].mlp.gate_proj.weight.data.zero_()
        return model

    says = r"prepare= writes to packed weights of .*small-q4_k_m\.gguf"
    with TieredStore.open(tmp_path / "other", dram="4MiB") as store, pytest.raises(MisuseError, match=says):
        from_pretrained(AutoModelForCausalLM, tmp_path / FILE, store, prepare=emptied)


def test_the_command_imports_and_exports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields, tensors = family("llama")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {
        "add_tokenizer_model": "gpt2",
        "add_token_list": [*letters, "ab", *(f"<{n}>" for n in range(WORDS - len(letters) - 1))],
        "add_token_merges": ["a b"],
        "add_token_types": [1] * WORDS,
    }
    write(tmp_path / FILE, "llama", fields, tensors, **tokens)
    (tmp_path / "tokenizer.json").write_text("another model's")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=FILE)
    assert main(["import", str(tmp_path / FILE), str(tmp_path / "store"), "--dram", "6MiB", "--verify"]) == 0
    assert "LlamaForCausalLM of " in capsys.readouterr().out
    with TieredStore.open(tmp_path / "store", dram="6MiB", access="read") as store:
        assert_alike(open_model(store), reference)
        assert open_tokenizer(store)("ab b")["input_ids"] == [256, letters.index("Ġ"), letters.index("b")]
    assert main(["export", str(tmp_path / "store"), "--out", str(tmp_path / "folder")]) == 0
    assert_alike_values(AutoModelForCausalLM.from_pretrained(tmp_path / "folder"), reference)


def test_a_tokenizer_that_lacks_a_field_is_told_by_it(tmp_path: Path) -> None:
    tokens = {"add_tokenizer_model": "llama", "add_token_list": [f"<{n}>" for n in range(WORDS)]}
    write(tmp_path / FILE, "llama", *family("llama"), **tokens)
    with pytest.warns(UserWarning, match=r"the store keeps none: the file has no tokenizer\.ggml\.scores$"):
        assert GgufModel(tmp_path / FILE).tokenizer_files() == {}


def assert_alike_values(model: Any, reference: Any) -> None:
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in reference.state_dict().items())


def test_an_import_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = made(tmp_path)
    monkeypatch.setattr(importing, "COMMIT_SECONDS", 0.0)
    told: list[str] = []

    def stop(what: str, share: float) -> None:
        told.append(what)
        if what.startswith("imported") and share > 0.4:
            raise KeyboardInterrupt

    with TieredStore.open(tmp_path / "store", dram="4MiB") as store, pytest.raises(KeyboardInterrupt):
        import_model(tmp_path, store, gguf_file=FILE, progress=stop)
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        with pytest.raises(MisuseError, match="is not finished"):
            open_model(store)
        os.utime(tmp_path / FILE, (1, 1))
        with pytest.raises(MisuseError, match=f"'{FILE}' is not what it was begun with"):
            import_model(tmp_path, store, gguf_file=FILE)
        assert_alike(import_model(tmp_path, store, gguf_file=FILE, existing="overwrite"), reference)
        store.close()


def test_a_file_of_floats_of_16_bits_stays_so(tmp_path: Path) -> None:
    fields, tensors = family("llama")
    half = {name: (shape, "F32" if len(shape) == 1 else "BF16") for name, (shape, _) in tensors.items()}
    write(tmp_path / FILE, "llama", fields, half)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=FILE, dtype=torch.bfloat16)
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        model = import_model(tmp_path, store, gguf_file=FILE)
        assert set(forms(model).values()) == {"torch.bfloat16"}
        assert_alike(model, reference)
        store.close()
    with TieredStore.open(tmp_path / "int8", dram="4MiB") as store:
        assert "int8" in str(set(forms(import_model(tmp_path, store, gguf_file=FILE, quantize="int8")).values()))
        store.close()


def refused(tmp_path: Path, error: type[Exception], match: str, **options: Any) -> None:
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        with pytest.raises(error, match=match):
            import_model(tmp_path, store, gguf_file=FILE, **options)
        assert list(store) == []


def test_what_cannot_be_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(tmp_path, MisuseError, f"has no file '{FILE}'")
    made(tmp_path)
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store, pytest.raises(MisuseError, match=f"gguf_file='{FILE}'"):
        from_pretrained(AutoModelForCausalLM, tmp_path, store)
    assert main(["import", str(tmp_path), str(tmp_path / "other")]) == 1
    assert f"has GGUF files: name one of them, such as '{FILE}'" in capsys.readouterr().err
    refused(tmp_path, MisuseError, "has weights that are packed already: leave quantize out", quantize="int8")
    fields, tensors = family("llama")
    write(tmp_path / FILE, "llama", fields, {name: one for name, one in tensors.items() if name != "blk.1.attn_k.weight"})
    refused(tmp_path, MisuseError, r"lack 'model\.layers\.1\.self_attn\.k_proj\.weight'")
    write(tmp_path / FILE, "llama", fields | {"embedding_length": 128}, tensors)
    refused(tmp_path, MisuseError, f"weight '.*' in .*{FILE} is of shape .* by its header")
    write(tmp_path / FILE, "llama", fields | {"attention.head_count": 0}, tensors)
    refused(tmp_path, MisuseError, rf"transformers .*{tmp_path}/{FILE}")
    write(tmp_path / FILE, "llama", fields | {"embedding_length": float(HIDDEN)}, tensors)
    refused(tmp_path, MisuseError, f"transformers cannot read the configuration in {tmp_path}/{FILE}: .*hidden_size")
    write(tmp_path / FILE, "qwen35", fields, tensors)
    refused(tmp_path, MisuseError, r"transformers does not read .*qwen35\.ssm\.time_step_rank")
    write(tmp_path / FILE, "rwkv6", fields, tensors)
    refused(tmp_path, MisuseError, f"transformers does not read .*{FILE}: .*rwkv6")
    fields, tensors = family("qwen3moe")
    del tensors["blk.1.ffn_up_exps.weight"]
    write(tmp_path / FILE, "qwen3moe", fields, tensors)
    refused(tmp_path, MisuseError, r"lacks a part of 'model\.layers\.1\.mlp\.experts\.gate_up_proj'")
    fields, tensors = family("llama")
    write(tmp_path / FILE, "llama", fields | {"block_count": 20_000}, tensors)
    refused(tmp_path, MisuseError, f"{FILE} has 20,000 for 'num_hidden_layers'; the limit is 10,000")
    write(tmp_path / FILE, "llama", fields, tensors | {"rope_freqs.weight": ((HIDDEN // 8,), "F32")})
    with TieredStore.open(tmp_path / "more", dram="4MiB") as store:
        with pytest.warns(UserWarning, match=r"tensors that LlamaForCausalLM of transformers does not take.*rope_freqs"):
            import_model(tmp_path, store, gguf_file=FILE)
        store.close()
    write(tmp_path / FILE, "llama", fields, tensors, parts=3)
    refused(tmp_path, MisuseError, "is one of several parts of a model: join them with llama-gguf-split --merge")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(tmp_path, MisuseError, "is read with the library gguf: pip install gguf")


def test_what_transformers_makes_of_tensors_is_known_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two other processors, as a later release may have them: halves of a tensor, and values of another shape."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, GGUFTensor, TensorProcessor

    made(tmp_path)

    class Halves(TensorProcessor):  # type: ignore[misc]
        def process(self, weights: Any, name: str, **options: Any) -> Any:
            if "ffn_up" in name:
                half = torch.tensor(weights[:, : weights.shape[1] // 2])
                options["parsed_parameters"]["tensors"]["model.layers.0.mlp.up_proj.weight"] = half
                name = "none"
            return GGUFTensor(weights, name, {})

    class Sums(TensorProcessor):  # type: ignore[misc]
        def process(self, weights: Any, name: str, **options: Any) -> Any:
            return GGUFTensor(weights.sum(0, keepdims=True) if "ffn_up" in name else weights, name, {})

    monkeypatch.setitem(TENSOR_PROCESSORS, "llama", Halves)
    refused(tmp_path, MisuseError, r"'model\.layers\.0\.mlp\.up_proj\.weight' of tensor 'blk\.0\.ffn_up\.weight' .* not known")
    monkeypatch.setitem(TENSOR_PROCESSORS, "llama", Sums)
    refused(tmp_path, MisuseError, r"'blk\.0\.ffn_up\.weight' in .* becomes one of shape \[1, 256\], and .* has \[512, 256\]")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, 0.0, -7.0, 2.0**70])
def test_numbers_of_no_rows_are_told(value: float) -> None:
    """What a function makes of numbers of rows may be anything, as that of an exponential."""
    sources = _Sources()
    numbers = sources.add(torch.zeros(4, 256), (4, 256))  # type: ignore[arg-type]
    for made in (np.full_like(numbers, value), np.where(numbers > numbers[0, 0], numbers, value)):
        assert sources.moved(made, (4, 256)) is None


def test_a_type_that_the_library_does_not_unpack_is_named(tmp_path: Path) -> None:
    made(tmp_path)
    data = bytearray((tmp_path / FILE).read_bytes())
    at = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    data[at : at + 4] = int(gguf.GGMLQuantizationType.I32).to_bytes(4, "little")
    (tmp_path / FILE).write_bytes(data)
    refused(tmp_path, MisuseError, "'output_norm.weight' in .* is of type I32, which the library gguf does not unpack")


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    made(tmp_path)
    data = (tmp_path / FILE).read_bytes()
    for nbytes in (0, 3, 20, 400, 1500, len(data) - 1):
        (tmp_path / FILE).write_bytes(data[:nbytes])
        refused(tmp_path, GgufError, f"{FILE}.*(ends within its header|is not a GGUF file|cut short)")


def test_a_file_that_becomes_shorter_leaves_nothing_finished(tmp_path: Path) -> None:
    made(tmp_path)

    def cut(what: str, share: float) -> None:
        if what.startswith("imported"):
            os.truncate(tmp_path / FILE, 20_000)

    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        with pytest.raises(GgufError, match=f"{FILE} became shorter while it was read"):
            import_model(tmp_path, store, gguf_file=FILE, progress=cut)
        with pytest.raises(MisuseError):
            open_model(store)
        store.close()
