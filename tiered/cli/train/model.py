"""The model of ``tiered train``, a byte-level decoder-only GPT in plain PyTorch that knows nothing of the store, and the text
that it learns."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tiered import MisuseError

__all__ = [
    *("BYTES", "GPT", "GRADIENT_BYTES", "STATE_BYTES", "Block", "Shape", "Text", "build", "go_on", "in_parts", "initialiser"),
    *("open_text", "seeded_initialiser"),
]

BYTES = 256
STATE_BYTES = 12
"""Bytes per parameter: the fp32 value and the two moments of Adam."""
GRADIENT_BYTES = 4


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. ``context`` is in bytes of text, ``width`` a multiple of ``heads``. ``recompute``: backward
    recomputes the activations of each block."""

    layers: int
    width: int
    heads: int
    context: int
    recompute: bool = False

    @classmethod
    def of(cls, options: Any) -> Shape:
        """Return the shape that has the sizes of ``options``."""
        return cls(options.layers, options.width, options.heads, options.context, getattr(options, "recompute", False))

    @property
    def parameters(self) -> int:
        """Count the parameters of a model of this shape without building it."""
        block = 12 * self.width**2 + 13 * self.width
        return (BYTES + self.context + 2) * self.width + self.layers * block


class Residual(nn.Linear):
    """A linear layer whose result is added to the block's input; its initial values are smaller."""


class Positions(nn.Embedding):
    """The embedding of positions; its initial values are small, so that the bytes themselves are learnt first."""


@dataclass
class Past:
    """The ``length`` bytes of a text that a model was given before, and by block their keys and values, of shape (batch, heads,
    time, width / heads)."""

    length: int = 0
    kept: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def extended(self, block: nn.Module, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the keys and values of more bytes; returns those of all."""
        if block in self.kept:
            keys, values = self.kept[block]
            key, value = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
        self.kept[block] = key, value
        return key, value


class Block(nn.Module):
    """Pre-LN attention and MLP (Radford et al., 2019). (batch, time, width) -> the same. With a ``past`` that is not empty,
    time is 1."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = Residual(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = Residual(4 * width, width)

    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        batch, time, width = x.shape
        split = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = past.extended(self, key, value)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=time == key.shape[2])
        x = x + self.project(attended.transpose(1, 2).reshape(batch, time, width))
        hidden: torch.Tensor = self.contract(F.gelu(self.expand(self.norm_mlp(x))))
        return x + hidden


class GPT(nn.Module):
    """Bytes, shape (batch, time), int64 -> logits of the byte that follows each, shape (batch, time, 256). The bytes follow
    those that ``past`` has, to which they are added."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.recompute = shape.recompute
        self.embed = nn.Embedding(BYTES, shape.width)
        self.position = Positions(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, text: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        begin = 0 if past is None else past.length
        end = begin + text.shape[1]
        x = self.embed(text) + self.position(torch.arange(begin, end, dtype=torch.int64, device=text.device))
        for block in self.blocks:
            if past is not None:
                x = block(x, past)
            else:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if self.recompute else block(x)
        if past is not None:
            past.length = end
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@torch.no_grad()
def go_on(model: GPT, text: Sequence[int], temperature: float, top_p: float, seed: int) -> Iterator[int]:
    """Yield the bytes with which ``model`` goes on with ``text``, one after the other, without an end.

    With a ``temperature`` of 0 that is the most likely one, else one that is drawn from the likeliest of the share ``top_p``.
    A model knows as many positions as its context has: when they are used up, it reads the second half of them again."""
    context, device = model.position.num_embeddings, model.embed.weight.device
    generator = torch.Generator(device="cpu").manual_seed(seed)
    everything, past = [*text], Past()
    new = everything[-context:]
    while True:
        ids = torch.tensor([new], dtype=torch.int64, device=device)
        everything.append(_chosen(model(ids, past)[0, -1].float().cpu(), temperature, top_p, generator))
        yield everything[-1]
        new = everything[-1:]
        if past.length == context:
            past, new = Past(), everything[-max(1, context // 2) :]


def _chosen(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Return the byte that follows, by the logits of each."""
    if not temperature:
        return int(logits.argmax())
    likely, bytes_ = torch.softmax(logits / temperature, dim=0).sort(descending=True)
    likely[likely.cumsum(0) - likely > top_p] = 0
    return int(bytes_[torch.multinomial(likely, 1, generator=generator)])


def in_parts(model: nn.Module, names: Iterable[str], parts: int) -> None:
    """Make the named modules process the batch in ``parts``, one after the other, and recompute each part in backward, as
    ``zero.page(..., micro_batch=parts)`` does in a store."""

    def divided(original: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            pieces = torch.tensor_split(x, min(parts, x.shape[0]))
            return torch.cat([checkpoint(original, piece, use_reentrant=False) for piece in pieces])

        return forward

    for name in names:
        module = model.get_submodule(name)
        module.forward = divided(module.forward)


def build(shape: Shape) -> GPT:
    """Build a model on the meta device, without memory. ``initialiser`` gives values to its parameters module by module."""
    with torch.device("meta"):
        return GPT(shape)


def initialiser(shape: Shape) -> Callable[[nn.Module], None]:
    """Make the initialiser of GPT-2: normal with deviation 0.02, divided by sqrt(2 layers) in ``Residual``; biases zero."""
    small = 0.02 / math.sqrt(2 * shape.layers)

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=small if isinstance(module, Residual) else 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Positions):
            nn.init.normal_(module.weight, std=0.002)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        else:
            raise TypeError(f"no initial values for a {type(module).__name__}")

    return initialise


def seeded_initialiser(model: GPT, shape: Shape) -> Callable[[nn.Module], None]:
    """Make that initialiser with values that do not depend on the order of the modules."""
    numbers = {module: number for number, module in enumerate(model.modules())}
    numbers[model.head] = numbers[model.embed]  # one and the same parameter
    initialise = initialiser(shape)

    def seeded(module: nn.Module) -> None:
        torch.manual_seed(numbers[module])
        with torch.no_grad():
            initialise(module)

    return seeded


class Text:
    """A file of bytes to learn, which is read batch by batch."""

    def __init__(self, path: str, context: int) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise MisuseError(f"cannot read the text {path}: {error.strerror}; name a file with --text") from error
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise MisuseError(f"the text {path} is not a file; name one with --text")
            if found.st_size <= context:
                what = f"has {found.st_size:,} bytes" if found.st_size else "is empty"
                raise MisuseError(
                    f"the text {path} {what}, a context of {context} needs {context + 1:,}: name a longer one, or "
                    "lower --context"
                )
        except BaseException:
            os.close(self._fd)
            raise
        self.path, self.nbytes, self._context = path, found.st_size, context

    def batch(
        self, size: int, generator: torch.Generator, rank: int = 0, ranks: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read bytes at random places, and the bytes that follow each: two int64 tensors of shape (size, context).

        All ``ranks`` draw the same places, and each reads its own part of them."""
        last = self.nbytes - self._context
        starts = torch.randint(0, last, (ranks * size,), generator=generator, dtype=torch.int64, device="cpu")
        rows = []
        for start in starts[rank * size : (rank + 1) * size].tolist():
            row = os.pread(self._fd, self._context + 1, start)
            if len(row) <= self._context:
                raise MisuseError(f"the text {self.path} became shorter while it was read; leave it alone until the end")
            rows.append(torch.frombuffer(bytearray(row), dtype=torch.uint8))
        whole = torch.stack(rows).long()
        return whole[:, :-1], whole[:, 1:]

    def close(self) -> None:
        os.close(self._fd)


def open_text(path: str | None, context: int, stack: ExitStack) -> Text:
    """Open the text in the file ``path`` (None: the text of this package), and close it with ``stack``. Raises MisuseError."""
    if path is None:
        path = str(stack.enter_context(as_file(files("tiered.data") / "shakespeare.txt")))
    text = Text(path, context)
    stack.callback(text.close)
    return text
