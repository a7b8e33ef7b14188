"""GGUF files of small models with random weights, written by the library ``gguf``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

__all__ = ["FAMILIES", "Tensors", "family", "write"]

Tensors = dict[str, tuple[tuple[int, ...], str]]
"""Shape, the innermost dimension last, and type of tensors by name."""

SCALES = {"Q4_K": (0, 2), "Q6_K": (208,), "Q5_K": (0, 2)}
"""Where the scales of a block are, for types that the library does not quantise."""

HIDDEN, INNER, WORDS, LAYERS, HEADS, GROUPS, EXPERTS = 256, 512, 288, 2, 4, 2, 4
FAMILIES = ("llama", "qwen2", "gpt2", "qwen3moe", "gemma2")


def _values(shape: tuple[int, ...], kind: str, seed: int) -> Any:
    gguf, np = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    random = np.random.default_rng(seed)
    if kind not in SCALES:
        mean = 1.0 if len(shape) == 1 else 0.0
        return gguf.quants.quantize(random.normal(mean, 0.05, shape).astype(np.float32), gguf.GGMLQuantizationType[kind])
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // elements, nbytes), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = random.normal(0, 1e-4, (*blocks.shape[:-1], 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(
    path: Path, architecture: str, fields: Mapping[str, int | float], tensors: Tensors, parts: int = 1, **more: Any
) -> None:
    """Write a file. ``fields``: metadata of the architecture; ``more``: methods of the writer, and what they are given."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("small")
    for name, value in fields.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{name}", value)
    writer.add_uint16("split.count", parts)
    for method, value in more.items():
        getattr(writer, method)(value)
    for seed, (name, (shape, kind)) in enumerate(tensors.items()):
        writer.add_tensor(name, _values(shape, kind, seed), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def family(architecture: str, *, inner: int = INNER) -> tuple[dict[str, int | float], Tensors]:
    """Return metadata and tensors of a model of one of ``FAMILIES``, which have all types that stay packed."""
    fields: dict[str, int | float] = {
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
    if architecture not in ("qwen2", "gemma2"):
        tensors["output.weight"] = ((WORDS, HIDDEN), "Q8_0")
    if architecture == "qwen3moe":
        inner = 768  # as above
        fields |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": inner}
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}": one for name, one in _layer(architecture, layer, inner).items()}
    return fields, tensors


def _layer(architecture: str, layer: int, inner: int) -> Tensors:
    norm = (HIDDEN,), "F32"
    keys = HIDDEN // HEADS * GROUPS
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
