"""What is planned for: a model on the meta device, what its forward is given, and its loss.

From an ``nn.Module``, from a folder with a ``config.json`` of Hugging Face, or from numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tiered.errors import MisuseError, meant, one_of, path_of, quoted, shown, whole_number
from tiered.integrations.hub import folder_of
from tiered.planning.dry_run import Loss, TrainingSetup, on_meta
from tiered.planning.layers import train
from tiered.planning.notes import StepNotes
from tiered.zero.paging.units import experts_of

__all__ = [
    *("Numbers", "Subject", "Workload", "adapted", "beyond_positions", "model_of_folder", "packed_by", "subject_of"),
]


@dataclass(frozen=True)
class Numbers:
    """A decoder-only transformer by its numbers: pre-norm blocks of attention and MLP, as GPT's, or as Llama's with ``gated``
    (three matrices in the MLP, no biases). ``inner``: width within the MLP (default: 4 times ``width``); ``kv_heads``: heads of
    keys and values (default: ``heads``). ``tied``: the output layer has the weights of the embedding.

    Raises MisuseError for a number below 1, and a width that is no multiple of the heads.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    inner: int | None = None
    kv_heads: int | None = None
    gated: bool = False
    tied: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary", "inner", "kv_heads"):
            value = getattr(self, name)
            if value is not None or name not in ("inner", "kv_heads"):
                whole_number(f"{name} is a count", value)
        if self.width % self.heads or self.heads % (self.kv_heads or self.heads):
            raise MisuseError(
                f"width {self.width} is a multiple of {self.heads} heads, and these of {self.kv_heads or self.heads} heads "
                "of keys and values"
            )
        one_of("the dtype of parameters", self.dtype, ("float32", "bfloat16", "float16", "float64"))

    @property
    def parameters(self) -> int:
        """Count the parameters."""
        return sum(parameter.numel() for parameter in self.build().parameters())

    def build(self) -> nn.Module:
        """Return the model, on the meta device."""
        with torch.device("meta"):
            return _Decoder(self).to(getattr(torch, self.dtype))


class _Block(nn.Module):
    def __init__(self, numbers: Numbers) -> None:
        super().__init__()
        width, inner, bias = numbers.width, numbers.inner or 4 * numbers.width, not numbers.gated
        self.heads, self.kv_heads = numbers.heads, numbers.kv_heads or numbers.heads
        self.of_head = width // numbers.heads
        self.norm_attention, self.norm_mlp = (_norm(numbers) for _ in range(2))
        self.qkv = nn.Linear(width, width + 2 * self.kv_heads * self.of_head, bias=bias)
        self.project = nn.Linear(width, width, bias=bias)
        self.gate = nn.Linear(width, inner, bias=bias) if numbers.gated else None
        self.expand, self.contract = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        mine, theirs = self.heads * self.of_head, self.kv_heads * self.of_head
        query, key, value = (
            part.view(batch, length, -1, self.of_head).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).split((mine, theirs, theirs), dim=-1)
        )
        if self.kv_heads != self.heads:
            key, value = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        hidden = self.norm_mlp(x)
        wide = F.gelu(self.expand(hidden)) if self.gate is None else F.silu(self.gate(hidden)) * self.expand(hidden)
        result: torch.Tensor = x + self.contract(wide)
        return result


class _Decoder(nn.Module):
    """Tokens, shape (batch, length), to logits, shape (batch, length, vocabulary)."""

    def __init__(self, numbers: Numbers) -> None:
        super().__init__()
        self.embed = nn.Embedding(numbers.vocabulary, numbers.width)
        self.blocks = nn.ModuleList(_Block(numbers) for _ in range(numbers.layers))
        self.norm = _norm(numbers)
        self.head = nn.Linear(numbers.width, numbers.vocabulary, bias=False)
        if numbers.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _norm(numbers: Numbers) -> nn.Module:
    return nn.RMSNorm(numbers.width) if numbers.gated else nn.LayerNorm(numbers.width)


@dataclass
class Subject:
    """What is planned for: ``model``, on the meta device; the arguments of its forward; and its loss, which is given the output
    and ``target``."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Loss
    target: Any
    name: str

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def train(self, training: TrainingSetup) -> StepNotes:
        """Return what a step of a training asks of its store. Raises as ``dry_run``."""
        return train(self.model, self.args, self.kwargs, self.loss, self.target, training)


@dataclass(frozen=True)
class Workload:
    """What a step of a training computes, for ``tiered.plan``.

    ``batch``, ``sequence``: the model is given tokens, int64 of shape (batch, sequence). ``inputs``: other arguments of its
    forward, in place of these: a tensor, or a tuple of positional or a mapping of keyword arguments, of any values and device;
    only shapes count. ``target``: what ``loss(output, target)`` compares with, by default the tokens. Without ``loss`` it is
    the cross-entropy of logits against tokens where there are tokens, and the mean of squares otherwise. ``accumulate``:
    forwards and backwards of a step, each of them with such a batch.

    Raises MisuseError for a number below 1, and a loss that cannot be called.
    """

    batch: int = 1
    sequence: int = 1024
    inputs: Any = None
    target: Any = None
    loss: Loss | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        whole_number("batch is a number of sequences", self.batch)
        whole_number("sequence is a number of tokens", self.sequence)
        whole_number("accumulate is how many forwards and backwards a step has", self.accumulate)
        if self.loss is not None and not callable(self.loss):
            raise MisuseError(f"loss is called with the output and the target, and {quoted(self.loss)} cannot be")


def subject_of(
    what: nn.Module | str | os.PathLike[str] | Numbers | Mapping[str, Any], workload: Workload
) -> Subject:
    """Return what is planned for: a model, and what it is given."""
    if isinstance(what, Mapping):
        try:
            what = Numbers(**what)
        except TypeError as error:
            raise MisuseError(f"numbers of a model are those of tiered.Numbers: {error}") from error
    if isinstance(what, Numbers):
        model, name = what.build(), f"{what.layers} layers of width {what.width}"
    elif isinstance(what, nn.Module):
        model, name = on_meta(what), type(what).__name__
    else:
        folder = path_of(what, "what is planned for, if no torch.nn.Module and no numbers,")
        model, name = model_of_folder(folder), os.path.basename(os.path.abspath(folder))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise MisuseError(f"{name} has no parameter that is trained, and a plan is of a training: see requires_grad_")
    args, kwargs = _arguments(workload)
    tokens = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
    target = workload.target
    if target is not None:
        target = _on_meta(target)
    elif tokens is not None and not tokens.is_floating_point():
        target = tokens
    return Subject(model, args, kwargs, _loss if workload.loss is None else workload.loss, target, name)


def _arguments(workload: Workload) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = workload.inputs
    if inputs is None:
        return (torch.zeros(workload.batch, workload.sequence, dtype=torch.int64, device="meta"),), {}
    if isinstance(inputs, Mapping):
        return (), {name: _on_meta(value) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_on_meta(value) for value in inputs), {}
    return (_on_meta(inputs),), {}


def _on_meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def _loss(output: Any, target: Any) -> torch.Tensor:
    """Return a loss of what a model gave: of its ``loss``, of its logits, or of its first tensor."""
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    value = getattr(output, "logits", output)
    if not isinstance(value, torch.Tensor):
        found = value.values() if isinstance(value, Mapping) else value
        value = next(one for one in found if isinstance(one, torch.Tensor) and one.is_floating_point())
    if isinstance(target, torch.Tensor) and not target.is_floating_point() and value.shape[:-1] == target.shape:
        return F.cross_entropy(value.flatten(0, -2), target.flatten())
    return value.float().square().mean()


def model_of_folder(what: str) -> nn.Module:
    """Return the model of a folder with a config.json of transformers, or of a name on the hub, on the meta device. Raises
    MisuseError where there is none."""
    folder = folder_of(what, "config")
    if not os.path.lexists(folder):
        near = meant(folder.name, sorted(one.name for one in folder.parent.glob("*") if one.is_dir()))
        wanted = ": name one of a transformers model, or org/name on the Hugging Face hub"
        raise MisuseError(f"there is no folder {shown(what, 1000)}{near or wanted}")
    if Path(folder).is_file() and Path(folder).suffix == ".gguf":
        raise MisuseError(
            f"{what} is a GGUF file, of which there are no plans yet: name the model that it was made of, a folder with a "
            "config.json or org/name on the Hugging Face hub"
        )
    if not Path(folder, "config.json").is_file():
        if any(Path(folder).glob("manifest.*")):
            raise MisuseError(f"{what} is a store, and a plan is made of shapes: name the folder that its model was read from")
        if Path(folder).is_file():
            here = Path(folder).parent
            which = f", {shown(str(here), 1000)}" if Path(here, "config.json").is_file() else ""
            raise MisuseError(f"{what} is a file: name the folder with the model's config.json{which}")
        raise MisuseError(
            f"{what} has no config.json: name a folder of a transformers model, org/name on the Hugging Face hub, or give "
            "numbers of the model"
        )
    try:
        from tiered.integrations.transformers.shapes import model_of
    except ImportError as error:
        raise MisuseError(f"a folder with config.json needs transformers ({error}): pip install 'tiered[hf]'") from error
    return model_of(str(folder))


def beyond_positions(model: nn.Module, tokens: int) -> str | None:
    """Return a note where sequences of so many tokens are longer than a model of transformers has positions; else None."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(config, "max_position_embeddings", None)
    if type(most) is not int or not 0 < most < tokens:
        return None
    return f"sequences of {tokens:,} tokens are longer than the {most:,} positions of the model (max_position_embeddings)"


def packed_by(what: str) -> str | None:
    """Return by which method the files of a folder, or of a name on the hub, have packed weights, as the config.json says;
    None where they have not."""
    from tiered.integrations.transformers.shapes import method_of

    return method_of(folder_of(what, "config"))


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """Return ``model``, of transformers and on the meta device, with adapters of that rank on all linear layers, which alone
    are trained. Raises MisuseError without peft, and for a mixture of experts."""
    if any(experts_of(module) for module in model.modules()):
        raise MisuseError("adapters of a mixture of experts are not planned: plan a dense model, or train a few steps")
    try:
        from tiered.integrations.transformers.shapes import with_adapters
    except ImportError as error:
        raise MisuseError(f"adapters need peft ({error}): pip install peft") from error
    return with_adapters(model, rank)
