"""``TieredEmbedding``: ``torch.nn.Embedding`` with its rows in a table, and sparse gradients as torch has them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from tiered.errors import MisuseError, expect_type
from tiered.tables.table import Table
from tiered.tensors.steps import refusing, written_by

__all__ = ["TableOptimizer", "TableWeight", "TieredEmbedding"]

_Kind = TypeVar("_Kind", bound="WithoutValues")
_WRITE = (
    "because its values are in the store: call embedding.initialize(fill), or write rows with embedding.table[rows] = values"
)

INSTEAD = {"Adagrad": "tiered.SparseAdagrad"}
"""Of torch's optimizers, by the names of their classes, which of ours has their rule; for all others it is Adam."""


class WithoutValues(torch.Tensor):
    """A tensor that reads as NaN, because its values are in a table. Views of it, detached ones too, are such tensors, and what
    is computed of it is an ordinary one. Whatever writes to it raises MisuseError."""

    table: Table
    nan: torch.Tensor
    """What is read: an ordinary tensor on the same memory."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse to assign ``data``, of which ``__torch_dispatch__`` is not told."""
        with torch._C.DisableTorchFunctionSubclass():
            if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
                _refuse_write(args[0])
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the classmethod
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named, schema = dict(kwargs or {}), func._schema
        if func is not torch.ops.aten.embedding_renorm_.default:  # it writes to rows above a norm, which NaN is not
            for one in written_by(func, args, named):
                _refuse_write(one)
        result = func(*_read(args), **_read(named))
        if not any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns):
            return result
        table = next(one.table for one in tree_leaves((args, named)) if isinstance(one, WithoutValues))
        return tree_map_only(torch.Tensor, lambda view: _made(WithoutValues, view, table), result)

    def numpy(self, *, force: bool = False) -> Any:
        """Return a read-only array; torch itself has none of a class that has ``__torch_dispatch__``."""
        array = self.nan.numpy(force=force)
        array.setflags(write=False)
        return array

    def tolist(self) -> Any:
        """Return the values as lists, as ``numpy`` does an array."""
        return self.nan.tolist()

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.nan, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.nan
        return plain.__reduce_ex__(protocol)


def _made(kind: type[_Kind], nan: torch.Tensor, table: Table, *, requires_grad: bool = False) -> _Kind:
    made = torch.Tensor._make_subclass(kind, nan, requires_grad)
    made.table, made.nan = table, nan
    return made


def _read(given: Any) -> Any:
    return tree_map_only(WithoutValues, lambda one: one.nan, given)


def _refuse_write(target: torch.Tensor) -> None:
    if isinstance(target, WithoutValues):
        raise MisuseError(f"the weight of table {target.table.name!r} cannot be written to, {_WRITE}")


class TableWeight(WithoutValues, nn.Parameter):
    """The parameter of a ``TieredEmbedding``: it has the table's shape, takes no memory, and reads as NaN, because the values
    are in the table. ``grad`` is a sparse tensor, as torch makes it."""

    def __new__(cls, table: Table) -> TableWeight:
        refuse_others()
        empty = torch.full((), torch.nan, dtype=table.dtype, device="cpu").expand((table.rows, *table.row_shape))
        return _made(cls, empty, table, requires_grad=True)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TableWeight of {self.table!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MisuseError(f"the weight of table {self.table.name!r} cannot be copied or pickled: its values are in the store")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(4)


class TableOptimizer(Optimizer):
    """An optimizer that writes to the tables of ``TableWeight``s."""


@cache
def refuse_others() -> None:
    """Have every step of another optimizer on weights of tables raise MisuseError, from the first weight on."""
    register_optimizer_step_pre_hook(refusing(TableOptimizer, _to_update, _refusal))


def _to_update(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, TableWeight) and parameter.grad is not None


def _refusal(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    ours = INSTEAD.get(name, "tiered.SparseAdamW")
    return (
        f"{name} cannot update the weight of a TieredEmbedding, whose values are in a table of the store: make {ours} for it, "
        f"and leave it out of what {name} updates"
    )


class _Rows(torch.autograd.Function):
    """Rows of a table, and the gradient of its weight: sparse, with one entry for each id, in their order."""

    @staticmethod
    def forward(ctx: Any, weight: TableWeight, ids: torch.Tensor, padding: int | None) -> torch.Tensor:
        ctx.table, ctx.padding = weight.table, padding
        ctx.save_for_backward(ids)
        return weight.table.look_up(ids)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        flat, values = ids.reshape(-1), grad.reshape(-1, *ctx.table.row_shape)
        if ctx.padding is not None:
            kept = flat != ctx.padding
            flat, values = flat[kept], values[kept]
        shape = (ctx.table.rows, *ctx.table.row_shape)
        where = flat.to("cpu", torch.int64)[None]
        values = values.to("cpu")
        grad = torch.sparse_coo_tensor(where, values, shape, dtype=values.dtype, device="cpu", check_invariants=False)
        return grad, None, None


class TieredEmbedding(nn.Module):
    """``torch.nn.Embedding(sparse=True)`` whose rows are in a table of a store, so that it may be larger than memory.

    Forward reads the rows that are asked for, and returns them on the device of the ids. Backward makes the same sparse
    gradient as torch; ``SparseAdamW``, ``SparseAdagrad`` and ``RowwiseAdagrad`` apply it to the table. ``state_dict()`` has a
    copy of all rows, and ``load_state_dict`` writes them. A commit of the store saves the rows without one.
    """

    def __init__(self, table: Table, *, padding_idx: int | None = None) -> None:
        """Raises MisuseError for a table that is not a matrix of floating point numbers, and for a ``padding_idx`` that is no
        row's."""
        super().__init__()
        expect_type(table, Table, "an embedding is of a tiered.Table")
        if len(table.row_shape) != 1 or not table.dtype.is_floating_point:
            raise MisuseError(f"an embedding is a table of vectors of floating point numbers, not {table}")
        if padding_idx is not None and not -table.rows <= padding_idx < table.rows:
            raise MisuseError(f"padding_idx={padding_idx} is no row of {table}")
        self.table = table
        self.num_embeddings, self.embedding_dim = table.rows, table.row_shape[0]
        self.padding_idx = None if padding_idx is None else padding_idx % table.rows
        self.weight = TableWeight(table)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows ``ids``, of shape ``(*ids.shape, embedding_dim)``."""
        weight = self.weight
        self._refuse_other(weight)
        if torch.is_grad_enabled() and weight.requires_grad:
            found: torch.Tensor = _Rows.apply(weight, ids, self.padding_idx)  # type: ignore[no-untyped-call]
            return found
        return self.table.look_up(ids)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self._refuse_other(value)
        super().__setattr__(name, value)

    def _refuse_other(self, weight: object) -> None:
        if not isinstance(weight, TableWeight) or weight.table is not self.table:
            raise MisuseError(f"the weight of table {self.table.name!r} cannot be replaced, {_WRITE}")

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, table={self.table.name!r}"

    @torch.no_grad()
    def initialize(self, fill: Callable[[torch.Tensor], object]) -> TieredEmbedding:
        """Have ``fill`` set the values of all rows, one block at a time in order, in place; return the module.

        ``fill`` gets tensors of shape (rows, embedding_dim), such as ``torch.nn.init.normal_`` does. The row ``padding_idx``
        becomes 0.
        """
        for begin in range(0, self.num_embeddings, self.table.block_rows):
            end = min(self.num_embeddings, begin + self.table.block_rows)
            rows = torch.empty((end - begin, self.embedding_dim), dtype=self.table.dtype, device="cpu")
            fill(rows)
            if self.padding_idx is not None and begin <= self.padding_idx < end:
                rows[self.padding_idx - begin] = 0
            self.table[begin:end] = rows
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TieredEmbedding:
        """Leave the weight where it is: rows go to the device of the ids. Raises MisuseError for another element type."""
        probe = fn(torch.empty(0, dtype=self.table.dtype, device="cpu"))
        if probe.dtype is not self.table.dtype:
            raise MisuseError(f"{self.table} has {self.table.dtype}, and stays so: make a table of {probe.dtype}")
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight if keep_vars else self.table[:]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        given = state_dict.get(key)
        if given is None:
            missing_keys.append(key)
        elif isinstance(given, TableWeight):
            if given.table is not self.table:
                for begin, rows in given.table.blocks():
                    self.table[begin : begin + rows.shape[0]] = rows
        elif tuple(given.shape) != (self.num_embeddings, self.embedding_dim):
            error_msgs.append(f"size mismatch for {key}: {tuple(given.shape)}, the table has {tuple(self.weight.shape)}")
        else:
            for begin in range(0, self.num_embeddings, self.table.block_rows):
                rows = given[begin : begin + self.table.block_rows].detach()
                self.table[begin : begin + rows.shape[0]] = rows.to("cpu", self.table.dtype)
