"""Checkpoints whose weights are packed in their files, beside the same models as transformers has them in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

from tests.four_bits import layers_as_elsewhere, values_of  # noqa: E402
from tests.integrations.test_quantised import IDS, LAYERS, LLAMA, gpt2, llama, tokens, trained  # noqa: E402
from tests.quick import quick  # noqa: E402
from tiered import MisuseError, TieredStore, zero  # noqa: E402
from tiered.integrations.kept import opening_of  # noqa: E402
from tiered.integrations.packed import STATE, united  # noqa: E402
from tiered.integrations.transformers import from_pretrained, import_model, open_model  # noqa: E402
from tiered.integrations.transformers.experts import expert_statistics  # noqa: E402
from tiered.packing import form  # noqa: E402
from tiered.packing.mxfp4 import Mxfp4  # noqa: E402
from tiered.packing.quantised import FORMS  # noqa: E402
from tiered.store.at_rest import StoreAtRest  # noqa: E402
from tiered.zero.checkpoint.safetensors import export_at_rest  # noqa: E402
from tiered.zero.construction.deferred import Files  # noqa: E402
from tiered.zero.paging.pager import pager_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
SIZES = LLAMA | {"intermediate_size": 192}
SHARDED = {"max_shard_size": "40KB"}
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)


def packed(
    folder: Path,
    dtype: torch.dtype,
    kind: str,
    double: bool,
    *,
    make: Callable[[], Any] = lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    cls: Any = AutoModelForCausalLM,
    how: dict[str, Any] = MappingProxyType({}),  # type: ignore[assignment]
    **options: Any,
) -> Any:
    """Save a model in ``folder / "packed"``, and return it as transformers and bitsandbytes have it in memory."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    make().to(dtype).save_pretrained(folder / "exact")
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=dtype, **how
    )
    made = cls.from_pretrained(folder / "exact", quantization_config=how, dtype=dtype, device_map="cpu")
    made.save_pretrained(folder / "packed", **options)
    return made


def matrices(model: Any) -> dict[str, torch.Tensor]:
    """Return the values of what is packed in a model of bitsandbytes."""
    found = {name: module.weight for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
    return {f"{name}.weight": values_of(one.data, one.quant_state) for name, one in found.items()}


@pytest.fixture(autouse=True)
def one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    layers_as_elsewhere(monkeypatch)


@pytest.mark.parametrize(
    ("dtype", "kind", "double", "options"),
    quick(
        product([torch.float32, torch.bfloat16, torch.float16], ["nf4", "fp4"], [True, False], [{}, SHARDED]),
        [(torch.float32, "nf4", True, {}), (torch.bfloat16, "fp4", False, SHARDED)],
    ),
)
def test_a_packed_checkpoint_is_as_in_memory(
    tmp_path: Path, dtype: torch.dtype, kind: str, double: bool, options: dict[str, str]
) -> None:
    """Logits have the bits of bitsandbytes' own layers, and the parts of each weight lie in the store as in the files."""
    reference = packed(tmp_path, dtype, kind, double, **options)
    expected = matrices(reference)
    with torch.no_grad():
        logits = reference(input_ids=IDS).logits
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = import_model(tmp_path / "packed", store, verify=True)
        assert "14 parameters and slices are packed as in the files" in opening_of(store, "model")["inexact"]
        assert all(torch.equal(model.get_parameter(name).detach(), value) for name, value in expected.items())
        with torch.no_grad():
            assert torch.equal(model(input_ids=IDS).logits, logits)
        stored = sum(one.stored_nbytes for one in pager_of(model).placements if one.packing is not None)
        assert stored < 0.5 * sum(value.numel() for value in expected.values()) + 14 * (1500 if double else 64) + stored / 6
        store.close()
    with TieredStore.open(tmp_path / "store", dram="1MiB", access="read") as store, torch.no_grad():
        assert torch.equal(open_model(store)(input_ids=IDS).logits, logits)
    if dtype is not torch.float32:
        with TieredStore.open(tmp_path / "wide", dram="1MiB") as store:
            model = import_model(tmp_path / "packed", store, compute=torch.float32)
            assert all(torch.equal(model.get_parameter(name).detach(), value.float()) for name, value in expected.items())


def test_an_adapter_is_trained_over_a_packed_checkpoint(tmp_path: Path) -> None:
    """As QLoRA does: losses and adapter have the bits of peft's own over bitsandbytes' layers."""
    peft = pytest.importorskip("peft")
    config = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.1}
    resident = packed(tmp_path, torch.float32, "nf4", True)

    def adapted(base: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(base, peft.LoraConfig(**config))

    reference = adapted(peft.prepare_model_for_kbit_training(resident, use_gradient_checkpointing=False))
    fused = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2, fused=True)
    reference.train()
    expected = trained(reference, fused, "plain", 8)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = from_pretrained(AutoModelForCausalLM, tmp_path / "packed", store, prepare=adapted)
        model.train()
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        assert trained(model, optimizer, "plain", 8) == expected
        adapters = {name: value for name, value in reference.state_dict().items() if "lora" in name}
        found = model.state_dict()
        assert len(adapters) == 12
        assert all(torch.equal(found[name], value) for name, value in adapters.items())
        zero.commit(model, optimizer)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = from_pretrained(AutoModelForCausalLM, tmp_path / "packed", store, prepare=adapted, existing="resume")
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        zero.resume(model, optimizer)
        model.train()
        assert trained(model, optimizer, "plain", 2) == trained(reference, fused, "plain", 2)
        store.close()


@pytest.mark.parametrize("double", [True, False])
def test_a_large_weight_is_divided_as_it_is_packed(tmp_path: Path, double: bool) -> None:
    monkey = pytest.MonkeyPatch()
    monkey.setitem(SIZES, "intermediate_size", 2048)
    try:
        reference = packed(tmp_path, torch.float32, "nf4", double)
    finally:
        monkey.undo()
    with TieredStore.open(tmp_path / "store", dram="2MiB") as store:
        model = import_model(tmp_path / "packed", store, largest_unit=1 << 18, verify=True)
        assert any(one.packing is not None and one.number > 0 for one in pager_of(model).placements)
        with torch.no_grad():
            for name, value in matrices(reference).items():
                assert torch.equal(model.state_dict()[name], value), name
            assert torch.equal(model(input_ids=IDS).logits, reference(input_ids=IDS).logits)
        store.close()


Floats = tuple[torch.dtype, tuple[int | None, int | None], torch.dtype]
"""Type of codes, rows and columns that have a scale (None: all), and the type of scales."""
SQUARES: Floats = (torch.float8_e4m3fn, (128, 128), torch.float32)


def large() -> Any:
    return LlamaForCausalLM(LlamaConfig(**LLAMA | {"hidden_size": 256, "intermediate_size": 640}))


def floats(
    folder: Path, kind: Floats = SQUARES, method: str = "fp8", make: Callable[[], Any] = large
) -> dict[str, torch.Tensor]:
    """Save a model whose matrices are floats of 8 bits with scales; return the values of its matrices in float32."""
    torch.manual_seed(0)
    element, block, scale_type = kind
    make().to(torch.bfloat16).save_pretrained(folder)
    made: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if value.dim() != 2 or "layers" not in name or "mlp.gate.weight" in name:
            made[name] = value
            continue
        down, along = (size or whole for size, whole in zip(block, value.shape, strict=True))
        rows, columns = value.shape
        filled = torch.nn.functional.pad(value.float(), (0, -columns % along, 0, -rows % down))
        blocks = filled.view(-(-rows // down), down, -(-columns // along), along)
        whole = element is torch.int8
        scales = (blocks.abs().amax((1, 3)) / (127 if whole else 448)).log2().ceil().exp2()
        scales *= 1 if scale_type.itemsize == 1 else 1.75
        spread = scales.repeat_interleave(down, 0)[:rows].repeat_interleave(along, 1)[:, :columns]
        codes = value.float() / spread
        codes = (codes.round() if whole else codes).to(element)
        stored = scales.log2().add(127).to(torch.uint8) if scale_type is torch.uint8 else scales.to(scale_type)
        made |= {name: codes, f"{name}_scale_inv" if method == "fp8" else f"{name}_scale": stored}
        if scales.numel() == 1:
            made[f"{name}_scale_inv" if method == "fp8" else f"{name}_scale"] = stored.view(() if method == "fp8" else (1,))
        values[name] = codes.float() * spread
    made["model.layers.0.mlp.up_proj.input_scale"] = torch.ones(1)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    how: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    if block == (None, None):
        how["weight_block_size"] = None
    if method != "fp8":
        strategy = {(None, None): "tensor", (1, None): "channel", (1, 32): "group"}.get(block, "block")
        numbers = ("int", "int-quantized") if element is torch.int8 else ("float", "float-quantized")
        weights = {"num_bits": 8, "type": numbers[0], "strategy": strategy, "symmetric": True, "dynamic": False}
        more = {"group": {"group_size": 32}, "block": {"block_structure": list(block)}}.get(strategy, {})
        group = {"targets": ["Linear"], "weights": weights | more, "input_activations": None, "output_activations": None}
        how = {"quant_method": method, "format": numbers[1], "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = how | {"modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return values


@pytest.mark.parametrize(
    ("kind", "unit"),
    quick(
        product(
            [
                SQUARES, (torch.float8_e5m2, (32, 64), E8M0), (torch.float8_e4m3fn, (1, 32), torch.uint8),
                (torch.float8_e4m3fn, (None, None), torch.bfloat16),
            ],
            [None, 1 << 17],
        ),
        [
            (SQUARES, 1 << 17), ((torch.float8_e5m2, (32, 64), E8M0), None),
            ((torch.float8_e4m3fn, (1, 32), torch.uint8), 1 << 17),
        ],
    ),
)  # fmt: skip
def test_a_checkpoint_of_floats_of_8_bits(tmp_path: Path, kind: Floats, unit: int | None) -> None:
    """Values are those that transformers dequantises; in float32 they are not rounded to the type of the configuration."""
    exact = floats(tmp_path / "packed", kind)
    given = {"quantization_config": FineGrainedFP8Config(dequantize=True), "dtype": torch.bfloat16, "device_map": "cpu"}
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", **given)
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        model = import_model(tmp_path / "packed", store, largest_unit=unit, verify=True)
        packed = [one for one in pager_of(model).placements if one.packing is not None]
        assert any(one.number > 0 for one in packed)
        most = 1.14 if kind[1] == (1, 32) else 1.01
        assert sum(one.stored_nbytes for one in packed) < most * sum(one.numel for one in packed)
        values = model.state_dict()
        assert all(torch.equal(values[name], value) for name, value in reference.state_dict().items())
        store.close()
    with TieredStore.open(tmp_path / "wide", dram="4MiB") as store:
        found = import_model(tmp_path / "packed", store, compute=torch.float32, largest_unit=unit).state_dict()
        assert len(exact) == 14
        assert all(torch.equal(found[name], value) for name, value in exact.items())


@pytest.mark.parametrize(
    "kind",
    [
        (torch.float8_e4m3fn, (1, None), torch.bfloat16), (torch.float8_e4m3fn, (None, None), torch.float32),
        (torch.float8_e4m3fn, (128, 128), torch.bfloat16), (torch.int8, (1, None), torch.bfloat16),
        (torch.int8, (None, None), torch.float32),
    ],
)  # fmt: skip
def test_a_checkpoint_of_compressed_tensors(tmp_path: Path, kind: Floats) -> None:
    """An adapter over it has the gradients of one over the values in memory."""
    peft = pytest.importorskip("peft")
    exact = floats(tmp_path / "packed", kind, "compressed-tensors")

    def adapted(base: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))

    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        model = from_pretrained(AutoModelForCausalLM, tmp_path / "packed", store, prepare=adapted)
        assert sum(one.packing is not None for one in pager_of(model).placements) == 14
        found = model.state_dict().items()
        values = {name.replace("base_model.model.", "").replace("base_layer.", ""): value for name, value in found}
        assert all(torch.equal(values[name], value.to(torch.bfloat16)) for name, value in exact.items())
        reference = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
        reference.load_state_dict({name: value for name, value in values.items() if "lora" not in name})
        reference = adapted(reference)
        fused = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2, fused=True)
        assert trained(model, zero.AdamW(model.parameters(), lr=1e-2), "plain", 2) == trained(reference, fused, "plain", 2)
        expected = reference.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        store.close()


def test_values_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    compressors, quantization = (pytest.importorskip(f"compressed_tensors.{name}") for name in ("compressors", "quantization"))
    blocks, elements = {"channel": (1, None), "tensor": (None, None)}, {"float": torch.float8_e4m3fn, "int": torch.int8}
    for number, (strategy, kind) in enumerate(product(blocks, elements)):
        folder = tmp_path / str(number)
        exact = floats(folder, (elements[kind], blocks[strategy], torch.bfloat16), "compressed-tensors")
        args = quantization.QuantizationArgs(num_bits=8, type=kind, strategy=strategy)
        scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
        files = load_file(folder / "model.safetensors")
        for name, value in exact.items():
            parts = {"weight": files[name], "weight_scale": files[f"{name}_scale"]}
            found = compressors.NaiveQuantizationCompressor.decompress(parts, scheme)["weight"]
            assert torch.equal(found, value.to(torch.bfloat16))


def mixture() -> Any:
    sizes = LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 32}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))


def test_experts_that_are_joined_stay_packed(tmp_path: Path) -> None:
    """transformers stacks the matrices of experts, and puts two of each together: these are one packed matrix, where the first
    ends with a block. Else they are unpacked."""
    for number, (block, slices) in enumerate({(32, 32): 16, (64, 32): 8}.items()):
        folder = tmp_path / str(number)
        exact = floats(folder, (torch.float8_e4m3fn, block, torch.float32), make=mixture)
        values = {name: value.to(torch.bfloat16) for name, value in exact.items()}
        with TieredStore.open(folder / "store", dram="1MiB") as store:
            model = import_model(folder, store, verify=True)
            packed = [one for one in pager_of(model).placements if one.packing is not None and one.sliced is not None]
            assert len(packed) == slices, block
            found = model.state_dict()
            for layer, expert in product(range(2), range(4)):
                name = f"model.layers.{layer}.mlp.experts"
                gate, up, down = (values[f"{name}.{expert}.{one}_proj.weight"] for one in ("gate", "up", "down"))
                assert torch.equal(found[f"{name}.gate_up_proj"][expert], torch.cat((gate, up)))
                assert torch.equal(found[f"{name}.down_proj"][expert], down)
            if number == 0:
                reference = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
                reference.load_state_dict(found)
                assert tokens(model) == tokens(reference)
            store.close()


@pytest.mark.parametrize("block", [(64, 64), (1, None), (None, None)])
def test_matrices_that_are_joined_are_divided_anywhere(tmp_path: Path, block: tuple[int | None, int | None]) -> None:
    exact = floats(tmp_path, (torch.float8_e5m2, block, torch.float32), "compressed-tensors")
    how = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    names = [f"model.layers.0.{name}.weight" for name in ("mlp.up_proj", "self_attn.q_proj", "mlp.gate_proj")]
    expected = torch.cat([exact[name] for name in names])
    with Files() as files:
        weights = united(files.open(tmp_path), how, "")
        joined: Any = torch.cat([weights[name] for name in names])
        if block == (None, None):  # each has a scale of its own
            assert joined.form is None
            return
        assert joined.form == weights[names[0]].form
        assert joined[1:].form is None
        assert torch.cat([joined, weights["lm_head.weight"]], 0).form is None  # type: ignore[attr-defined]
        together = FORMS[joined.form].rows_together(256)
        for first, last in ((0, 1536), (0, 640), (600, 1000), (640, 896), (832, 1500), (1472, 1536)):
            first -= first % together
            last = last if last == 1536 else last - last % together
            packing = FORMS[joined.form].of(last - first, 256)
            assert packing is not None
            packed, found = torch.empty(packing.nbytes, dtype=torch.uint8), torch.empty((last - first) * 256)
            joined.write_packed(packing, packed, first * 256)
            packing.unpack(packed, found)
            assert torch.equal(found.view(-1, 256), expected[first:last])


def test_floats_of_8_bits_with_other_scales_are_named(tmp_path: Path) -> None:
    floats(tmp_path)
    weight, scales = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight_scale_inv"
    for change, says in (
        (lambda tensors: tensors.update({scales: torch.ones(1, 1)}), r"scales of shape \[1, 1\] of torch\.float"),
        (lambda tensors: tensors.update({scales: torch.ones(2, 5, dtype=torch.int32)}), r"torch\.int32; known .*float32"),
        (lambda tensors: tensors.pop(scales), "it lacks '_scale_inv'"),
        (lambda tensors: tensors.update({weight: tensors[weight].to(torch.float8_e4m3fnuz)}), "known are matrices of"),
        (lambda tensors: tensors.update({weight: tensors[weight].float().to(torch.int8)}), "of torch.int8; known are"),
        (lambda tensors: tensors.pop(weight), "it lacks the tensor of that name, which has its codes"),
    ):
        before = (tmp_path / "model.safetensors").read_bytes()
        changed(tmp_path, change)  # type: ignore[arg-type]
        with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
            with pytest.raises(MisuseError, match=rf"weight '{weight}' in .* is packed in a way that is not known: .*{says}"):
                import_model(tmp_path, store)
            store.close()
        (tmp_path / "model.safetensors").write_bytes(before)


def eight_bits(folder: Path, make: Callable[[], Any], dtype: torch.dtype, **options: Any) -> dict[str, torch.Tensor]:
    """Save a model in ``folder / "packed"`` as bitsandbytes has it in 8 bits, and return the values of its matrices."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    make().to(dtype).save_pretrained(folder / "exact")
    how = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True, **options), "dtype": dtype, "device_map": "cpu"}
    made = AutoModelForCausalLM.from_pretrained(folder / "exact", **how)
    made.save_pretrained(folder / "packed")
    layers = {name: one.weight for name, one in made.named_modules() if type(one).__name__ == "Linear8bitLt"}
    dequantise = bitsandbytes.functional.int8_vectorwise_dequant
    return {f"{name}.weight": dequantise(one.data, one.SCB).to(dtype) for name, one in layers.items()}


@pytest.mark.parametrize(
    ("make", "dtype"), [(llama, torch.bfloat16), (gpt2, torch.float32)]
)  # GPT-2's layers are packed the other way round
def test_a_checkpoint_of_bitsandbytes_in_8_bits(tmp_path: Path, make: Callable[[], Any], dtype: torch.dtype) -> None:
    """The model computes with the dequantised weights, and an adapter has the gradients of one over these in memory."""
    peft = pytest.importorskip("peft")
    values = eight_bits(tmp_path, make, dtype)
    count, conv = len(values), make is gpt2
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=dtype)
    with torch.no_grad():
        for name, value in values.items():
            reference.get_parameter(name).copy_(value.t() if conv else value)
        logits = reference(input_ids=IDS).logits
        with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
            model = import_model(tmp_path / "packed", store, verify=True)
            assert sum(one.packing is not None for one in pager_of(model).placements) == count
            found = model.state_dict()
            assert all(torch.equal(found[name], value) for name, value in reference.state_dict().items())
            assert torch.equal(model(input_ids=IDS).logits, logits)
            store.close()
        with TieredStore.open(tmp_path / "store", dram="1MiB", access="read") as store:
            assert torch.equal(open_model(store)(input_ids=IDS).logits, logits)

    def adapted(base: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=LAYERS[make], fan_in_fan_out=conv)).eval()

    with TieredStore.open(tmp_path / "trained", dram="1MiB") as store:
        model = from_pretrained(AutoModelForCausalLM, tmp_path / "packed", store, prepare=adapted)
        reference = adapted(reference)
        fused = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2, fused=True)
        assert trained(model, zero.AdamW(model.parameters(), lr=1e-2), "plain", 2) == trained(reference, fused, "plain", 2)
        expected = reference.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        store.close()


def test_8_bits_of_bitsandbytes_that_are_damaged_are_named(tmp_path: Path) -> None:
    eight_bits(tmp_path, llama, torch.bfloat16)
    layer = "model.layers.1.mlp.up_proj"
    weight, largest, order = f"{layer}.weight", f"{layer}.SCB", f"{layer}.weight_format"
    before = (tmp_path / "packed" / "model.safetensors").read_bytes()
    for change, says in (
        (lambda tensors: tensors.pop(weight), r"it lacks '\.weight'"),
        (lambda tensors: tensors.pop(largest), r"it lacks '\.SCB'"),
        (lambda tensors: tensors.update({largest: tensors[largest][1:].clone()}), r"largest values of shape \[159\]"),
        (lambda tensors: tensors.update({weight: tensors[weight].float()}), "of torch.float32; known are matrices of int8"),
        (lambda tensors: tensors.update({order: torch.tensor(2, dtype=torch.uint8)}), "its '.weight_format' is not 0"),
    ):
        changed(tmp_path / "packed", change)  # type: ignore[arg-type]
        with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
            with pytest.raises(MisuseError, match=rf"weight '{weight}' in .* is packed in a way that is not known: .*{says}"):
                import_model(tmp_path / "packed", store)
            store.close()
        (tmp_path / "packed" / "model.safetensors").write_bytes(before)


GPT_OSS = LLAMA | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
GPT_OSS |= {"num_local_experts": 4, "num_experts_per_tok": 2}


def gpt_oss(folder: Path) -> Any:
    """Save a model as gpt-oss is published, whose experts are floats of 4 bits; return it as transformers dequantises it."""
    torch.manual_seed(0)
    transformers.GptOssForCausalLM(transformers.GptOssConfig(**GPT_OSS)).to(torch.bfloat16).save_pretrained(folder)
    made = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if value.dim() != 3:
            made[name] = value
            continue
        experts, columns, rows = value.shape
        made[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        made[f"{name}_scales"] = torch.randint(121, 126, (experts, rows, columns // 32), dtype=torch.uint8)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    given = {"quantization_config": transformers.Mxfp4Config(dequantize=True), "dtype": torch.bfloat16, "device_map": "cpu"}
    return AutoModelForCausalLM.from_pretrained(folder, **given)


@pytest.mark.parametrize("kernels", ["C", "torch"])
def test_floats_of_4_bits_have_the_values_of_transformers(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every code with every scale: those whose product is subnormal, and 255, which is more than any float."""
    if kernels == "torch":
        monkeypatch.setattr(form, "lib", None)
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | codes.flip(0) << 4).expand(1, 256, 1, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    packing = Mxfp4(256, 32)
    packed = torch.zeros(packing.nbytes, dtype=torch.uint8)
    for part, given in zip(packing.parts(packed), (blocks, scales), strict=True):
        part.copy_(given.view(part.shape))
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0].t()
        found = torch.empty(256, 32, dtype=dtype)
        packing.unpack(packed, found.view(-1))
        assert torch.equal(found, expected)
        assert torch.equal(found.signbit(), expected.signbit())


def test_experts_of_floats_of_4_bits(tmp_path: Path) -> None:
    """Each expert lies in the store as in the files, and is read by itself."""
    reference = gpt_oss(tmp_path / "packed")
    values = reference.state_dict()
    with torch.no_grad():
        logits = reference(input_ids=IDS).logits
    expected = tokens(reference)

    def same(model: Any, slices: int) -> None:
        packed = [one for one in pager_of(model).placements if one.packing is not None]
        assert len(packed) == slices
        assert sum(one.stored_nbytes for one in packed) < 0.54 * sum(one.numel for one in packed)
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in values.items())
        with torch.no_grad():
            assert torch.equal(model(input_ids=IDS).logits, logits)
        assert tokens(model) == expected

    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = import_model(tmp_path / "packed", store, verify=True)
        same(model, 16)
        for implementation in ("eager", "batched_mm"):
            with torch.no_grad():
                for one in (model, reference):
                    one.set_experts_implementation(implementation)
                assert torch.equal(model(input_ids=IDS).logits, reference(input_ids=IDS).logits), implementation
        store.close()
    with TieredStore.open(tmp_path / "store", dram="1MiB", access="read") as store:
        model = open_model(store)
        same(model, 16)
        found = expert_statistics(model)
        assert found is not None
        assert found.hits + found.misses > 0
    with TieredStore.open(tmp_path / "whole", dram="2MiB") as store:
        model = from_pretrained(AutoModelForCausalLM, tmp_path / "packed", store, paging=zero.Paging(experts="whole"))
        same(model, 4)
        zero.commit(model)
        same(from_pretrained(AutoModelForCausalLM, tmp_path / "packed", store, existing="resume"), 4)
        store.close()
    with Files() as files:
        for name, value in united(files.open(tmp_path / "packed"), {"quant_method": "mxfp4"}, "").items():
            assert torch.equal(value.to(torch.bfloat16).clone().whole(), values[name])  # type: ignore[attr-defined]
            rows = torch.empty(value.shape[-1], dtype=torch.bfloat16)
            value[(1,) * (value.dim() - 1)].to(torch.bfloat16).write_to(rows)  # type: ignore[attr-defined]
            assert torch.equal(rows, values[name][(1,) * (value.dim() - 1)])
    with TieredStore.open(tmp_path / "store", dram="1MiB", access="read") as store:
        zero.export(open_model(store), tmp_path / "of the model")
    with StoreAtRest(tmp_path / "store") as at_rest:
        export_at_rest(at_rest, tmp_path / "at rest")
    for folder in "of the model", "at rest":
        exported = load_file(tmp_path / folder / "model.safetensors")
        assert exported.keys() == values.keys()
        assert all(torch.equal(value, values[name]) for name, value in exported.items())


def test_an_adapter_is_trained_over_experts_of_floats_of_4_bits(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = gpt_oss(tmp_path / "packed")
    base.config.quantization_config = None

    def adapted(base: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))

    reference = adapted(AutoModelForCausalLM.from_config(base.config, dtype=torch.bfloat16))
    reference.base_model.model.load_state_dict(
        {name.replace("q_proj.", "q_proj.base_layer.").replace("o_proj.", "o_proj.base_layer."): value
         for name, value in base.state_dict().items()}, strict=False
    )  # fmt: skip
    fused = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2, fused=True)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = from_pretrained(AutoModelForCausalLM, tmp_path / "packed", store, prepare=adapted)
        assert sum(one.packing is not None for one in pager_of(model).placements) == 16
        model.eval(), reference.eval()
        assert trained(model, zero.AdamW(model.parameters(), lr=1e-2), "plain", 2) == trained(reference, fused, "plain", 2)
        expected = reference.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        store.close()


def test_experts_of_floats_of_4_bits_that_are_damaged_are_named(tmp_path: Path) -> None:
    gpt_oss(tmp_path)
    weight = "model.layers.1.mlp.experts.down_proj"
    blocks, scales = f"{weight}_blocks", f"{weight}_scales"
    before = (tmp_path / "model.safetensors").read_bytes()
    for change, says in (
        (lambda tensors: tensors.pop(scales), "it lacks '_scales'"),
        (lambda tensors: tensors.pop(blocks), "it lacks '_blocks'"),
        (lambda tensors: tensors.update({scales: tensors[scales][:, :-1].clone()}), r"blocks of shape \[4, 128, 8, 16\]"),
        (lambda tensors: tensors.update({blocks: tensors[blocks].to(torch.int16)}), "known are 16 bytes in a block"),
    ):
        changed(tmp_path, change)  # type: ignore[arg-type]
        with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
            with pytest.raises(MisuseError, match=rf"weight '{weight}' in .* is packed in a way that is not known: .*{says}"):
                import_model(tmp_path, store)
            store.close()
        (tmp_path / "model.safetensors").write_bytes(before)


def test_other_models_have_the_values_of_bitsandbytes(tmp_path: Path) -> None:
    """GPT-2's layers are packed the other way round; BERT's loading assigns data; codes may be there as another type; a head
    with one output, and rows that a group of slices does not end with."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    gpt2 = transformers.GPT2Config(vocab_size=64, n_embd=64, n_inner=64, n_layer=1, n_head=2, n_positions=32)
    bert = transformers.BertConfig(vocab_size=64, **sizes)
    cut = LlamaConfig(**SIZES | {"hidden_size": 80, "intermediate_size": 4096})
    classes, left = transformers.AutoModelForSequenceClassification, ["c_attn", "lm_head"]
    one = LlamaConfig(**SIZES, num_labels=1, pad_token_id=0)
    cases: list[tuple[Callable[[], Any], Any, dict[str, Any], dict[str, Any]]] = [
        (lambda: transformers.GPT2LMHeadModel(gpt2), AutoModelForCausalLM, {}, {}),
        (lambda: transformers.GPT2LMHeadModel(gpt2), AutoModelForCausalLM, {"llm_int8_skip_modules": left}, {}),
        (lambda: transformers.BertForSequenceClassification(bert), classes, {}, {}),
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), AutoModelForCausalLM, {"bnb_4bit_quant_storage": torch.bfloat16}, {}),
        (lambda: transformers.LlamaForSequenceClassification(one), classes, {"llm_int8_skip_modules": []}, {}),
        (lambda: LlamaForCausalLM(cut), AutoModelForCausalLM, {}, {"largest_unit": 1 << 18}),
    ]
    for number, (make, cls, how, options) in enumerate(cases):
        folder = tmp_path / str(number)
        reference = packed(folder, torch.float32, "nf4", True, make=make, cls=cls, how=how)
        expected = {name: value for name, value in matrices(reference).items() if name != "score.weight" or value.dim() == 2}
        assert expected
        with TieredStore.open(folder / "store", dram="4MiB") as store, torch.no_grad():
            model = import_model(folder / "packed", store, cls=cls, verify=True, **options)
            for name, value in expected.items():
                found = model.state_dict()[name]
                conv = "transformer.h" in name
                assert torch.equal(found, value.t() if conv else value), (number, name)
            kept = sum(one.packing is not None and one.number == 0 for one in pager_of(model).placements)
            assert kept == sum(len(value) > 1 for value in expected.values()), number
            ids = IDS % 64
            if any(value.shape[-1] % 64 for value in expected.values()):  # bitsandbytes' own may compute with wrong ones
                reference = make()
                reference.load_state_dict(model.state_dict())
            assert torch.equal(model(input_ids=ids).logits, reference(input_ids=ids).logits), number
            store.close()


def test_what_would_cast_packed_weights_is_named(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    packed(tmp_path, torch.bfloat16, "nf4", True)
    given: dict[str, Any] = {"prepare": peft.prepare_model_for_kbit_training, "existing": "overwrite"}
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        with pytest.raises(MisuseError, match=r"prepare= writes to packed weights of .*leave out what casts or freezes them"):
            from_pretrained(AutoModelForCausalLM, tmp_path / "packed", store, **given)
        model = from_pretrained(AutoModelForCausalLM, tmp_path / "packed", store, dtype=torch.float32, **given)
        assert sum(one.packing is not None for one in pager_of(model).placements) == 14
        store.close()


def test_packed_weights_are_not_packed_again(tmp_path: Path) -> None:
    packed(tmp_path, torch.float32, "nf4", True)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        for call in (
            lambda: import_model(tmp_path / "packed", store, quantize="int8"),
            lambda: from_pretrained(AutoModelForCausalLM, tmp_path / "packed", store, policy=zero.Policy(quantize="nf4")),
        ):
            with pytest.raises(MisuseError, match="has weights that are packed already: leave quantize out"):
                call()
        assert list(store) == []


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


WEIGHT = "model.layers.1.mlp.up_proj.weight"


def test_parts_of_a_weight_may_be_in_several_files(tmp_path: Path) -> None:
    expected = matrices(packed(tmp_path, torch.float32, "nf4", True))
    folder = tmp_path / "packed"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + number % 3}-of-00003.safetensors" for number, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = import_model(folder, store, verify=True)
        assert all(torch.equal(model.get_parameter(name).detach(), value) for name, value in expected.items())


def other_state(**values: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        state = json.loads(bytes(tensors[f"{WEIGHT}{STATE}nf4"].tolist())) | values
        tensors[f"{WEIGHT}{STATE}nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


WRONG: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no largest values": (lambda tensors: tensors.pop(f"{WEIGHT}.absmax"), r"lacks '\.absmax'"),
    "no codes": (lambda tensors: tensors.pop(WEIGHT), "it lacks the tensor of that name"),
    "fewer codes": (lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT][:-1].clone()}), "'of codes' has 6,143 elements"),
    "other blocks": (other_state(blocksize=128), "in blocks of 128; known are blocks of 64"),
    "another shape": (other_state(shape=[192, 128]), "elements of torch.uint8"),
    "no shape": (other_state(shape=None), "Expected `array`, got `null`"),
    "a type of no weights": (other_state(dtype="int8"), "of int8 in blocks"),
    "other nested blocks": (other_state(nested_blocksize=128), "largest values in blocks of 128"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_packed_otherwise_is_named(tmp_path: Path, wrong: str) -> None:
    change, says = WRONG[wrong]
    packed(tmp_path, torch.float32, "nf4", True)
    changed(tmp_path / "packed", change)  # type: ignore[arg-type]
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        with pytest.raises(MisuseError, match=rf"weight '{WEIGHT}' in .* is packed in a way that is not known: .*{says}"):
            import_model(tmp_path / "packed", store)
        assert list(store) == []


def test_a_configuration_alone_is_no_packed_checkpoint(tmp_path: Path) -> None:
    packed(tmp_path, torch.float32, "nf4", True)
    (tmp_path / "exact" / "config.json").write_bytes((tmp_path / "packed" / "config.json").read_bytes())
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        with pytest.raises(MisuseError, match=r"has no weight that is packed, and its config\.json"):
            import_model(tmp_path / "exact", store)
        assert list(store) == []


FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel"}
REFUSED: dict[str, dict[str, Any]] = {
    "of 'gptq'": {"quant_method": "gptq", "bits": 4},
    "of 'bitsandbytes'": {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": True},
    "of 'fp8', 100 x 128": {"quant_method": "fp8", "weight_block_size": [100, 128]},
    "of 'fp8'": {"quant_method": "fp8", "expert_dtype": "fp4"},
    "of 'fp8', a list x 128": {"quant_method": "fp8", "weight_block_size": [[128], 128]},
    "of 'compressed-tensors', 'int-quantized'": {
        "format": "int-quantized", "config_groups": {"a": {"weights": FLOAT | {"type": "int", "strategy": "token"}}}
    },
    "of 'compressed-tensors', 'pack-quantized'": {
        "format": "pack-quantized", "config_groups": {"a": {"weights": FLOAT | {"num_bits": 4, "type": "int"}}}
    },
    "of 'compressed-tensors', 'float-quantized'": {
        "format": "float-quantized", "config_groups": {"a": {"weights": FLOAT}}, "transform_config": {"config_groups": {}}
    },
    "of 'compressed-tensors', 'naive-quantized'": {
        "format": "naive-quantized", "config_groups": {"a": {"weights": FLOAT | {"symmetric": False}}}
    },
    "of 'compressed-tensors'": {"config_groups": {"a": {"weights": None}}},
}  # fmt: skip


def test_what_others_packed_is_refused(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for named, how in REFUSED.items():
        given = {"quant_method": "compressed-tensors"} | how
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": given}))
        with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
            with pytest.raises(MisuseError, match=f"{named}: what is packed otherwise than by bitsandbytes"):
                import_model(tmp_path, store)
            store.close()
