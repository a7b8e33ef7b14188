"""GGUF files of small models with random weights, written by the library ``gguf``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

__all__ = ["FAMILIES", "NEWER", "Tensors", "family", "write"]

Tensors = dict[str, tuple[tuple[int, ...], str]]
"""Shape, the innermost dimension last, and type of tensors by name."""

SCALES = {"Q4_K": (0, 2), "Q6_K": (208,), "Q5_K": (0, 2)}
"""Where the scales of a block are, for types that the library does not quantise."""

HIDDEN, INNER, WORDS, LAYERS, HEADS, GROUPS, EXPERTS = 256, 512, 288, 2, 4, 2, 4
FAMILIES = ("llama", "qwen2", "gpt2", "qwen3moe", "gemma2")
NEWER = ("qwen35moe", "lfm2")
"""Families that transformers reads with its newer loader."""


def _values(shape: tuple[int, ...], kind: str, seed: int) -> Any:
    gguf, np = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    random = np.random.default_rng(seed)
    if kind not in SCALES:
        mean = -1.0 if shape == (4,) else 1.0 if len(shape) == 1 else 0.0
        return gguf.quants.quantize(random.normal(mean, 0.05, shape).astype(np.float32), gguf.GGMLQuantizationType[kind])
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // elements, nbytes), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = random.normal(0, 1e-4, (*blocks.shape[:-1], 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(
    path: Path, architecture: str, fields: Mapping[str, Any], tensors: Tensors, parts: int = 1, **more: Any
) -> None:
    """Write a file. ``fields``: metadata of the architecture; ``more``: methods of the writer, and what they are given."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("small")
    for name, value in fields.items():
        add = {list: writer.add_array, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{architecture}.{name}", value)
    writer.add_uint16("split.count", parts)
    for method, value in more.items():
        getattr(writer, method)(value)
    for seed, (name, (shape, kind)) in enumerate(tensors.items()):
        writer.add_tensor(name, _values(shape, kind, seed), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def family(architecture: str, *, inner: int = INNER) -> tuple[dict[str, Any], Tensors]:
    """Return metadata and tensors of a model of one of ``FAMILIES`` or ``NEWER``, which have all types that stay packed."""
    fields: dict[str, Any] = {
        "context_length": 64,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": inner,
        "attention.head_count": HEADS,
    }
    tensors: Tensors = {"token_embd.weight": ((WORDS, HIDDEN), "Q6_K"), "output_norm.weight": ((HIDDEN,), "F32")}
    if architecture == "gpt2":
        fields["attention.layer_norm_epsilon"] = 1e-5
        inner = fields["feed_forward_length"] = 4 * HIDDEN  # transformers has these for it, whatever the file says
        tensors |= {"position_embd.weight": ((1024, HIDDEN), "F16"), "output_norm.bias": ((HIDDEN,), "F32")}
    else:
        fields |= {
            "attention.head_count_kv": GROUPS,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 10000.0,
            "attention.key_length": HIDDEN // HEADS,
            "vocab_size": WORDS,
        }
    if architecture == "qwen35moe":
        fields |= {
            "ssm.time_step_rank": 4,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 32,
            "ssm.group_count": 2,
            "ssm.inner_size": 256,
            "full_attention_interval": 2,
            "rope.dimension_count": 32,
            "expert_shared_feed_forward_length": 256,
            "rope.dimension_sections": [8, 4, 4, 0],
        }
    if architecture == "lfm2":
        fields |= {"shortconv.l_cache": 3, "attention.head_count_kv": [0, GROUPS]}
        tensors |= {"token_embd_norm.weight": tensors.pop("output_norm.weight")}
    if architecture not in ("qwen2", "gemma2"):
        tensors["output.weight"] = ((WORDS, HIDDEN), "Q8_0")
    if architecture.endswith("moe"):
        inner = 768 if architecture == "qwen3moe" else 256  # as above
        fields |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": inner}
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}": one for name, one in _layer(architecture, layer, inner).items()}
    return fields, tensors


def _layer(architecture: str, layer: int, inner: int) -> Tensors:
    norm = (HIDDEN,), "F32"
    keys = HIDDEN // HEADS * GROUPS
    if architecture in NEWER:
        return _newer(architecture, layer, inner)
    found: Tensors = {"attn_norm.weight": norm, "ffn_norm.weight": norm}
    if architecture == "gpt2":
        for name, rows, columns in (
            ("attn_qkv", 3 * HIDDEN, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_up", inner, HIDDEN),
            ("ffn_down", HIDDEN, inner),
        ):
            found |= {f"{name}.weight": ((rows, columns), "Q4_K"), f"{name}.bias": ((rows,), "F32")}
        return found | {"attn_norm.bias": norm, "ffn_norm.bias": norm}
    found |= {
        "attn_q.weight": ((HIDDEN, HIDDEN), "Q4_K"),
        "attn_k.weight": ((keys, HIDDEN), "Q6_K"),
        "attn_v.weight": ((keys, HIDDEN), "Q8_0"),
        "attn_output.weight": ((HIDDEN, HIDDEN), "BF16" if layer else "F32"),
    }
    if architecture == "qwen3moe":
        heads = (HIDDEN // HEADS,), "F32"
        return found | {
            "attn_q_norm.weight": heads,
            "attn_k_norm.weight": heads,
            "ffn_gate_inp.weight": ((EXPERTS, HIDDEN), "F32"),
            "ffn_gate_exps.weight": ((EXPERTS, inner, HIDDEN), "Q4_K"),
            "ffn_down_exps.weight": ((EXPERTS, HIDDEN, inner), "Q6_K"),
            "ffn_up_exps.weight": ((EXPERTS, inner, HIDDEN), "Q6_K" if layer else "Q4_K"),
        }
    if architecture == "qwen2":
        found |= {f"attn_{one}.bias": ((HIDDEN if one == "q" else keys,), "F32") for one in "qkv"}
    if architecture == "gemma2":
        found |= {"post_attention_norm.weight": norm, "post_ffw_norm.weight": norm}
    return found | {
        "ffn_gate.weight": ((inner, HIDDEN), "Q4_K"),
        "ffn_up.weight": ((inner, HIDDEN), "Q4_0" if layer else "Q5_K"),
        "ffn_down.weight": ((HIDDEN, inner), "Q6_K"),
    }


def _newer(architecture: str, layer: int, inner: int) -> Tensors:
    """The first layer is one of linear attention, or a convolution."""
    norm, head, keys = ((HIDDEN,), "F32"), ((HIDDEN // HEADS,), "F32"), HIDDEN // HEADS * GROUPS
    doubled = 1 if architecture == "lfm2" else 2  # with a gate
    found: Tensors = {
        "attn_norm.weight": norm,
        "attn_q.weight": ((doubled * HIDDEN, HIDDEN), "Q4_K"),
        "attn_k.weight": ((keys, HIDDEN), "Q6_K"),
        "attn_v.weight": ((keys, HIDDEN), "Q8_0"),
        "attn_output.weight": ((HIDDEN, HIDDEN), "Q5_K"),
        "attn_q_norm.weight": head,
        "attn_k_norm.weight": head,
    }
    if architecture == "lfm2":
        if not layer:
            found = {
                "attn_norm.weight": norm,
                "shortconv.conv.weight": ((HIDDEN, 3), "F32"),
                "shortconv.in_proj.weight": ((3 * HIDDEN, HIDDEN), "Q4_K"),
                "shortconv.out_proj.weight": ((HIDDEN, HIDDEN), "Q6_K"),
            }
        return found | {
            "ffn_norm.weight": norm,
            "ffn_gate.weight": ((inner, HIDDEN), "Q4_K"),
            "ffn_up.weight": ((inner, HIDDEN), "Q8_0"),
            "ffn_down.weight": ((HIDDEN, inner), "Q6_K"),
        }
    if not layer:
        mixed = 2 * 2 * 32 + 256  # queries and keys of two heads of 32, values
        found = {
            "attn_norm.weight": norm,
            "attn_qkv.weight": ((mixed, HIDDEN), "Q4_K"),
            "attn_gate.weight": ((256, HIDDEN), "Q6_K"),
            "ssm_alpha.weight": ((4, HIDDEN), "Q8_0"),
            "ssm_beta.weight": ((4, HIDDEN), "F32"),
            "ssm_conv1d.weight": ((mixed, 4), "F32"),
            "ssm_norm.weight": ((64,), "F32"),
            "ssm_out.weight": ((HIDDEN, 256), "Q5_K"),
            "ssm_a": ((4,), "F32"),
            "ssm_dt.bias": ((4,), "F32"),
        }
    return found | {
        "post_attention_norm.weight": norm,
        "ffn_gate_inp.weight": ((EXPERTS, HIDDEN), "F32"),
        "ffn_gate_exps.weight": ((EXPERTS, inner, HIDDEN), "Q4_K"),
        "ffn_up_exps.weight": ((EXPERTS, inner, HIDDEN), "Q4_K"),
        "ffn_down_exps.weight": ((EXPERTS, HIDDEN, inner), "Q6_K"),
        "ffn_gate_inp_shexp.weight": ((HIDDEN,), "F32"),
        "ffn_gate_shexp.weight": ((256, HIDDEN), "Q8_0"),
        "ffn_up_shexp.weight": ((256, HIDDEN), "Q4_K"),
        "ffn_down_shexp.weight": ((HIDDEN, 256), "Q6_K"),
    }
