"""Write a row once and run it twice: on a model in memory, and on the same model paged.

A row is a function of a ``Side``. It takes its model through ``side.page`` and its optimizer from ``side.adamw``, does what its
name says, and gives each result to ``side.show``. Nothing else in it depends on the side.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tiered import CapacityError, Eviction, TieredStore, zero

__all__ = ["ROWS", "TIERS", "Dense", "Row", "Side", "Toy", "row"]

TIERS = ("dram", "hbm", "fake device", "cuda")
"""Where parameters compute: in DRAM; in HBM, for which host memory stands; in HBM that torch takes for another device; on a
CUDA device, where they are also updated, because the same kernels give the same bits only there."""

BUDGET = 1 << 20
"""Bytes of DRAM that a paged model has, unless it needs more."""

IMPORTING = 16 << 20
"""Bytes of DRAM that an import has."""
LARGEST_UNIT = 200_000
"""Bytes of parameters that are read together in a model that generates."""

DEADLINE = 10.0
"""Seconds after which a store says that there is no room: before a row's time is over."""

Loss = Callable[[nn.Module, int], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One thing that people do with a model.

    ``depends``: whether the result depends on the values of parameters (a check of the row perturbs them). ``needs``: modules
    that it imports. ``slow``: how many times the ordinary time it may take. ``limit``: for a row that shows no numbers, but
    what kind of object something is: what ``docs/limits.md`` says of it, if the sides differ there.
    """

    group: str
    name: str
    function: Callable[[Side], object]
    depends: bool = True
    needs: tuple[str, ...] = ()
    slow: float = 1.0
    limit: str = ""


ROWS: list[Row] = []
"""All rows of the modules that were imported, in order."""


def row(
    group: str, name: str, *, depends: bool = True, needs: tuple[str, ...] = (), slow: float = 1.0, limit: str = ""
) -> Callable[[Callable[[Side], object]], Callable[[Side], object]]:
    """Register the decorated function as a row of ``group``."""

    def register(function: Callable[[Side], object]) -> Callable[[Side], object]:
        if any((known.group, known.name) == (group, name) for known in ROWS):
            raise ValueError(f"there are two rows {name!r} in {group!r}")
        ROWS.append(Row(group, name, function, depends, needs, slow, limit))
        return function

    return register


class Side:
    """Run a row on one side, and keep what it shows.

    ``paged``: which side it is. ``folder``: an empty one for files of the row. ``planted``: whether parameters are multiplied
    by 1.01 to begin with, which the comparison must notice. ``tier``: where the parameters of the paged side compute; those of
    the other are on the same device.
    """

    def __init__(self, paged: bool, folder: Path, *, planted: bool = False, tier: str = "dram") -> None:
        self.paged, self.folder, self.planted, self.tier = paged, folder, planted, tier
        self.device = _device(tier)
        torch.set_default_device(self.device if self.device.type != "cpu" else None)
        self.shown: list[tuple[str, object]] = []
        self._stores: list[TieredStore] = []
        folder.mkdir(parents=True, exist_ok=True)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    # -- what rows call ----------------------------------------------------------------------------------------------------

    def page(self, model: Any, **options: Any) -> Any:
        """Page ``model`` with the smallest budget that it allows where this is the paged side. Returns ``model``."""
        self._plant(model)
        if not self.paged:
            return model.to(self.device) if self.device.type != "cpu" else model
        if self.tier == "cuda":
            options.setdefault("update_tier", "hbm")
        return self._in_smallest(BUDGET, lambda budget: zero.page(model, self._opened(budget), **options))

    def answering(self, model: Any, **options: Any) -> Any:
        """Return the model of ``transformers`` that a checkpoint of ``model`` gives: on the paged side it is imported into a
        store, and opened for reading with the smallest budget that it allows. ``options``: as in ``from_pretrained``."""
        self._plant(model)
        folder, kind = self.folder / "checkpoint", type(model)
        model.to("cpu").save_pretrained(folder)
        del model
        if not self.paged:
            loaded = kind.from_pretrained(folder, **options).eval().to(self.device)
            for tensor in loaded.parameters():  # from a file it is aligned to 8 bytes, which changes last bits of a product
                tensor.data = tensor.data.clone()
            return loaded
        from tiered.integrations.transformers import import_model, open_model

        with TieredStore.open(self.folder / "imported", dram=IMPORTING) as store, torch.device("cpu"):
            import_model(folder, store, cls=kind, largest_unit=LARGEST_UNIT)
            store.close()
        reading = {"folder": "imported", "access": "read", "durability": "commit"}
        return self._in_smallest(BUDGET, lambda budget: open_model(self._opened(budget, **reading), **options))

    def _plant(self, model: nn.Module) -> None:
        if self.planted:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)

    def _in_smallest(self, budget: int, make: Callable[[int], Any]) -> Any:
        """Return what ``make`` makes of ``budget`` bytes, or of as many as its CapacityError asks for."""
        try:
            return make(budget)
        except CapacityError as error:
            needed = re.search(r"the smallest that works is ([\d,]+) bytes", str(error))
            if needed is None:
                raise
        self._stores.pop().close()
        return make(int(needed[1].replace(",", "")))

    def adamw(self, params: Any, **options: Any) -> Any:
        """Make the optimizer of this side: ``zero.AdamW``, or torch's with ``fused=True``."""
        if self.paged:
            return zero.AdamW(params, **options)
        return torch.optim.AdamW(params, **{"fused": True, **options})

    def toy(self, **options: Any) -> tuple[Any, Any]:
        """Return a paged ``Toy`` and its optimizer."""
        model = self.page(Toy())
        return model, self.adamw(model.parameters(), **{"lr": 1e-3, **options})

    def show(self, what: str, value: object) -> None:
        """Have ``value`` compared with the other side's: tensors, numbers, texts, and containers of them, as they are now."""
        self.shown.append((what, frozen(value)))

    def show_model(self, model: nn.Module) -> None:
        """Have all parameters and buffers compared, as ``state_dict`` gives them."""
        self.show("state_dict", model.state_dict())

    def train(
        self,
        model: Any,
        optimizer: Any,
        steps: int = 2,
        *,
        loss: Loss | None = None,
        backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
        between: Callable[[], object] | None = None,
        scheduler: Any = None,
        first: int = 0,
    ) -> None:
        """Make ``steps`` steps, and show their losses and the model after them. ``between`` is called before each step."""
        for number in range(first, first + steps):
            optimizer.zero_grad()
            found = model.loss(number) if loss is None else loss(model, number)
            backward(found)
            self.show(f"loss {number}", found.detach())
            if between is not None:
                between()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
                self.show(f"lr {number}", [float(group["lr"]) for group in optimizer.param_groups])
        self.show_model(model)

    @property
    def store(self) -> TieredStore:
        """Return the store of the model that was paged last."""
        return self._stores[-1]

    # -- what the comparison calls -----------------------------------------------------------------------------------------

    def bytes_read(self) -> int:
        """Return how many bytes came from the disk for models of this side."""
        return sum(store.statistics().links[-1].up.bytes for store in self._stores)

    def close(self) -> None:
        """Close the stores."""
        for store in self._stores:
            store.close()

    def _opened(self, budget: int, folder: str = "", **options: Any) -> TieredStore:
        store = TieredStore.open(
            self.folder / (folder or f"store{len(self._stores)}-{budget}"),
            **{"durability": "none", "eviction": Eviction(deadline=DEADLINE), **options, **self._memory(budget)},
        )
        self._stores.append(store)
        return store

    def _memory(self, budget: int) -> dict[str, Any]:
        if self.tier == "dram":
            return {"dram": budget}
        return {"hbm": budget, "dram": budget, "device": self.device.type}


def _device(tier: str) -> torch.device:
    if tier == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)  # sums by atomic additions differ from one call to the next
        return torch.device("cuda", 0)
    if tier != "fake device":
        return torch.device("cpu")
    from tests import fake_device  # a device that is built on demand, for tests

    return torch.device(fake_device.NAME, 0)


def frozen(value: object) -> object:
    """Return a copy of ``value`` that later changes leave alone. Raises TypeError for what cannot be compared."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            return torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value.detach())
    if isinstance(value, np.ndarray | np.generic):
        return frozen(torch.from_numpy(np.array(value)))
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, torch.Size | torch.dtype | torch.device | torch.layout):
        return str(value)
    if isinstance(value, dict):
        return {str(key): frozen(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [frozen(item) for item in value]
    raise TypeError(f"cannot compare {type(value).__name__}")


def drawn(number: int, *shape: int) -> torch.Tensor:
    """Return normal numbers that depend on ``number`` only."""
    made = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(number), device="cpu")
    return made.to(torch.empty(0).device)  # get_default_device of torch 2.6 fails after set_default_device(None)


def tokens(number: int, *shape: int, below: int = 64) -> torch.Tensor:
    """Return token numbers that depend on ``number`` only."""
    made = torch.randint(below, shape, generator=torch.Generator("cpu").manual_seed(number), device="cpu")
    return made.to(torch.empty(0).device)  # get_default_device of torch 2.6 fails after set_default_device(None)


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.fc2(functional.gelu(self.fc1(self.norm(x)))))


class Toy(nn.Module):
    """A language model of eight blocks: 1.2 MiB of parameters, 3.6 MiB with its Adam states."""

    def __init__(self, width: int = 96, depth: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.body = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.body:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, number: int) -> torch.Tensor:
        """Return the loss of batch ``number``."""
        batch = tokens(number, 4, 12)
        return functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Dense(nn.Sequential):
    """A perceptron of smooth layers, from 32 numbers to one: 1.2 MiB of parameters."""

    def __init__(self, width: int = 176, depth: int = 10, last: Callable[[int], nn.Module] | None = None) -> None:
        layers: list[nn.Module] = [nn.Linear(32, width), nn.Tanh()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.Tanh()]
        super().__init__(*layers, last(width) if last else nn.Linear(width, 1))

    def loss(self, number: int) -> torch.Tensor:
        """Return the loss of batch ``number``."""
        return (self(drawn(number, 8, 32)) - 1).square().mean()
