"""Optimizers of ``TieredEmbedding``: only the rows that have a gradient are read and written, with their states beside them.

The states of table NAME are tables of the same store, ``NAME/exp_avg`` and so on, and the count of steps is its tensor
``NAME/steps``: a commit has the weights of one step with its states and its count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tiered.errors import MisuseError, listed
from tiered.tables.change import change
from tiered.tables.embedding import TableOptimizer, TableWeight
from tiered.tables.table import Table

__all__ = ["RowwiseAdagrad", "SparseAdagrad", "SparseAdamW"]


class _Sparse(TableOptimizer):
    """Steps of rows: a subclass says which states a row has, and what a step does to rows and states."""

    kind = ""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(listed(params, "an optimizer is given an iterable of weights of TieredEmbedding"), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Raises MisuseError for parameters that are not of a ``TieredEmbedding``, and for values out of range."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for parameter in group["params"]:
                if not isinstance(parameter, TableWeight):
                    raise MisuseError(
                        f"{type(self).__name__} is for weights of TieredEmbedding, not for a {type(parameter).__name__} of "
                        f"shape {tuple(parameter.shape)}: give that to an optimizer of torch or of tiered.zero"
                    )
            self._refuse(group)
        except MisuseError:
            self.param_groups.pop()
            raise

    def _refuse(self, group: Mapping[str, Any]) -> None:
        """Raise MisuseError for values of a group that are out of range."""
        for name in ("lr", "eps", "weight_decay", "lr_decay"):
            if name in group and not (isinstance(group[name], int | float) and 0 <= group[name] < math.inf):
                raise MisuseError(f"{type(self).__name__}: {name} is a number from 0, not {group[name]!r}")

    def _states(self, weight: Table, group: Mapping[str, Any]) -> list[Table]:
        """Open the tables of the states of ``weight``, or make them."""
        raise NotImplementedError

    def _update(
        self, group: Mapping[str, Any], step: int, gradient: torch.Tensor, weight: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> None:
        """Change rows of ``weight`` and of ``states`` in place, by the rows' gradient, of which all have shape (n, columns)."""
        raise NotImplementedError

    def _state(self, weight: Table, name: str, columns: int, fill: float = 0.0) -> Table:
        """Open the table of the state ``name`` of ``weight``, or make it: with as many rows in a block as the weight has, or of
        narrower rows with as many as a table has by itself, because a block of some bytes takes the room of a page."""
        store: Any = weight._store
        block = weight.block_rows * columns * weight.dtype.itemsize if (columns,) == weight.row_shape else None
        found: Table = store.table(
            f"{weight.name}/{name}", weight.rows, columns, weight.dtype, block=block, fill=fill, owner=weight.owner
        )
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the sparse gradients; a weight without one stays as it is. Return what ``closure`` returns, if one is given.

        A weight changes together with its states and its count of steps, as ``Table`` says of calls. Raises MisuseError for a
        dense gradient, and what ``Table.update`` raises.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(group, weight)
        return loss

    def _step(self, group: Mapping[str, Any], weight: TableWeight) -> None:
        gradient, table = weight.grad, weight.table
        if gradient is None or not gradient.is_sparse:
            raise MisuseError(f"the gradient of table {table.name!r} is dense: {type(self).__name__} takes sparse ones")
        store: Any = table._store
        states, counter = self._states(table, group), f"{table.name}/steps"
        if counter not in store:
            store.put(counter, torch.zeros(2, dtype=torch.int64, device="cpu"), owner=table.owner)
        elif store.owner_of(counter) != table.owner:
            whose = store.owner_of(counter) or "the user"
            raise MisuseError(f"{counter!r}, which {table.owner} needs for its steps, belongs to {whose}: rename it")
        done, kind = _counted(store.get(counter), counter)
        if kind not in (0, _KINDS[self.kind]):
            raise MisuseError(f"table {table.name!r} was trained by another optimizer: delete {counter!r} and its states first")
        gradient = (-gradient if group["maximize"] else gradient).coalesce()
        ids, values = gradient._indices()[0], gradient._values()

        def update(begin: int, end: int, rows: Sequence[torch.Tensor]) -> None:
            self._update(group, done + 1, values[begin:end], rows[0], rows[1:])

        now = torch.tensor([done + 1, _KINDS[self.kind]], dtype=torch.int64, device="cpu")
        if len(ids):
            change([one._places for one in (table, *states)], ids.contiguous(), update, (counter, now))
        else:
            store.put(counter, now, owner=table.owner)

    def state_dict(self) -> dict[str, Any]:
        """Return the param groups, as torch does. States are in the store, and not in here."""
        return super().state_dict()


_KINDS = {"adamw": 1, "adagrad": 2, "rowwise_adagrad": 3}
"""The number by which ``NAME/steps`` says whose steps it counts."""


def _counted(counter: torch.Tensor, key: str) -> tuple[int, int]:
    if counter.dtype is not torch.int64 or counter.shape != (2,) or int(counter.min()) < 0:
        raise MisuseError(f"{key!r} is no count of steps: delete it, or restore the commit that had one")
    return int(counter[0]), int(counter[1])


def _add(rows: torch.Tensor, values: torch.Tensor, alpha: float = 1) -> None:
    """Add ``alpha * values`` to ``rows`` by the kernel with which torch adds sparse gradients to dense tensors: it rounds
    otherwise than the one for two dense tensors."""
    where = torch.arange(rows.shape[0], dtype=torch.int64, device="cpu")[None]
    sparse = torch.sparse_coo_tensor(where, values, rows.shape, dtype=values.dtype, device="cpu", check_invariants=False)
    rows.add_(sparse, alpha=alpha)


class SparseAdamW(_Sparse):
    """Adam on the rows that have a gradient, bit for bit ``torch.optim.SparseAdam``.

    With ``weight_decay``, these rows are first multiplied by ``1 - lr * weight_decay``, as AdamW does (Loshchilov and Hutter
    2019, https://arxiv.org/abs/1711.05101).

    States: ``NAME/exp_avg`` and ``NAME/exp_avg_sq``, of the table's shape and type.
    """

    kind = "adamw"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        """Arguments are torch's. Raises MisuseError for parameters that are no ``TieredEmbedding``'s, and for values out of
        range."""
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def _refuse(self, group: Mapping[str, Any]) -> None:
        super()._refuse(group)
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise MisuseError(f"SparseAdamW: betas are two numbers from 0 to less than 1, not {group['betas']!r}")

    def _states(self, weight: Table, group: Mapping[str, Any]) -> list[Table]:
        return [self._state(weight, name, weight.row_shape[0]) for name in ("exp_avg", "exp_avg_sq")]

    def _update(
        self, group: Mapping[str, Any], step: int, gradient: torch.Tensor, weight: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> None:
        (first, second), (beta1, beta2) = states, group["betas"]
        towards_first = (gradient - first) * (1 - beta1)
        towards_second = (gradient * gradient - second) * (1 - beta2)
        first += towards_first
        second += towards_second
        size = group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        if group["weight_decay"]:
            weight *= 1 - group["lr"] * group["weight_decay"]
        weight += -size * (first / (second.sqrt() + group["eps"]))


class SparseAdagrad(_Sparse):
    """Adagrad on the rows that have a gradient, bit for bit ``torch.optim.Adagrad`` with sparse gradients.

    State: ``NAME/sum``, of the table's shape and type.
    """

    kind = "adagrad"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        """Arguments are torch's. Raises MisuseError for parameters that are no ``TieredEmbedding``'s, and for values out of
        range."""
        defaults = {"lr": lr, "lr_decay": lr_decay, "initial_accumulator_value": initial_accumulator_value}
        super().__init__(params, {**defaults, "eps": eps, "maximize": maximize})

    def _states(self, weight: Table, group: Mapping[str, Any]) -> list[Table]:
        return [self._state(weight, "sum", weight.row_shape[0], float(group["initial_accumulator_value"]))]

    def _update(
        self, group: Mapping[str, Any], step: int, gradient: torch.Tensor, weight: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> None:
        _add(states[0], gradient.pow(2))
        rate = group["lr"] / (1 + (step - 1) * group["lr_decay"])
        _add(weight, gradient / (states[0].sqrt() + group["eps"]), -rate)


class RowwiseAdagrad(SparseAdagrad):
    """Adagrad with one number for each row, the sum of the mean squares of its gradients: a state of ``1 / columns`` of the
    weights' size, as large embedding tables are trained.

    State: ``NAME/sum_of_rows``, one number of the table's type for each row.
    """

    kind = "rowwise_adagrad"

    def _states(self, weight: Table, group: Mapping[str, Any]) -> list[Table]:
        return [self._state(weight, "sum_of_rows", 1, float(group["initial_accumulator_value"]))]

    def _update(
        self, group: Mapping[str, Any], step: int, gradient: torch.Tensor, weight: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> None:
        states[0].add_(gradient.pow(2).mean(1, keepdim=True))
        rate = group["lr"] / (1 + (step - 1) * group["lr_decay"])
        weight.add_(gradient / (states[0].sqrt() + group["eps"]), alpha=-rate)
