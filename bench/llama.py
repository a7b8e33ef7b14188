"""A Llama with random weights, and the tokens that a model generates, each with what was looked at when it came."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["PROMPT", "VOCABULARY", "config_of", "generated", "quiet", "write_weights"]

VOCABULARY = 8192
PROMPT = "The quick brown fox jumps"

Seen = TypeVar("Seen")


def quiet() -> None:
    """Have transformers print nothing but errors."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def config_of(layers: int, width: int, vocabulary: int = VOCABULARY, dtype: str = "float32", **more: Any) -> Any:
    """Return the configuration of a Llama of these sizes; ``more``: other ones by their names there."""
    from transformers import LlamaConfig

    given: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": width * 11 // 4 // 256 * 256,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "architectures": ["LlamaForCausalLM"],
        "dtype": dtype,
    }
    return LlamaConfig(**given | more)


def write_weights(folder: Path, config: Any) -> int:
    """Write a model with random weights of the configuration's type, a tensor at a time. Returns the bytes of weights."""
    import torch
    from transformers import LlamaForCausalLM

    from tiered import TensorSpec
    from tiered.format.safetensors import entry_of
    from tiered.format.safetensors_writer import Shards

    stored = config.dtype if isinstance(config.dtype, torch.dtype) else getattr(torch, config.dtype)
    dtype = str(stored).removeprefix("torch.")
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(stored)
    entries = [entry_of(n, TensorSpec(dtype, tuple(p.shape), stored.itemsize)) for n, p in model.named_parameters()]
    generator = torch.Generator().manual_seed(0)

    def values(entry: Any) -> Any:
        shape = entry.spec.shape
        made = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        return made.to(stored).view(-1).view(torch.uint8).numpy().data

    weights: int = sum(p.nbytes for p in model.parameters())
    Shards(folder, entries, "500MB", "refuse").write(values(entry) for entry in entries)
    config.save_pretrained(folder)
    return weights


def generated(
    model: Any, prompt: Any, tokens: int, look: Callable[[], Seen], **options: Any
) -> tuple[list[int], list[Seen]]:
    """Generate so many tokens. Returns them, and what ``look`` returned when the prompt was taken and when each token came.
    ``options``: other ones of ``generate``."""
    import torch

    seen: list[Seen] = []

    class Streamer:
        put = staticmethod(lambda made: seen.append(look()))
        end = staticmethod(lambda: None)

    given = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, "streamer": Streamer}
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **given | options)
    return found[0, prompt.shape[1] :].tolist(), seen
