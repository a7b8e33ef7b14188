"""Weights that bitsandbytes has packed in the files of a checkpoint (4 bits, NF4 or FP4), as deferred matrices.

A weight is there in parts, by names that begin with its own: codes, largest values, tables, and a text that says how it was
packed (``bitsandbytes.functional.QuantState``). The parts go to the store as they are; nothing is packed anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

import msgspec
import torch

from tiered.errors import MisuseError, quoted
from tiered.packing.quantised import BLOCK, NESTED, TOGETHER, TYPES, Packing, Table4, form_by_table
from tiered.zero.construction.deferred import Deferred

__all__ = ["united"]

STATE = ".quant_state.bitsandbytes__"
LARGEST, TABLE, NESTED_LARGEST, STEPS = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
TABLE_VALUES, STEP_VALUES = 16, 256
STATE_BYTES = 1 << 16


class _State(msgspec.Struct):
    quant_type: str
    blocksize: int
    dtype: str
    shape: list[int]
    nested_blocksize: int | None = None
    nested_dtype: str | None = None
    nested_offset: float | None = None


def united(tensors: Mapping[str, Deferred], where: str) -> dict[str, Deferred]:
    """Return the tensors of a file with one for each weight that is packed, in place of its parts. Raises MisuseError, which
    names the weight and ``where`` it is, for parts that are missing or of other sizes, and for a way of packing that is not
    known."""
    found = dict(tensors)
    for name in [name for name in tensors if STATE in name]:
        weight = name.partition(STATE)[0]
        try:
            parts = {part: found.pop(weight + part) for part in ("", *_parts(found, weight)) if weight + part in found}
            found[weight] = _matrix(parts, found.pop(name))
        except (KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
            why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise MisuseError(
                f"weight {quoted(weight)} in {where} is packed by bitsandbytes in a way that is not known: {why}"
            ) from None
    return found


def _parts(tensors: Mapping[str, Deferred], weight: str) -> Iterator[str]:
    yield from (part for part in (LARGEST, TABLE, NESTED_LARGEST, STEPS) if weight + part in tensors)


def _matrix(parts: Mapping[str, Deferred], text: Deferred) -> Deferred:
    """Return the weight that consists of ``parts``. Raises KeyError, ValueError and what decoding raises."""
    if text.numel() > STATE_BYTES:
        raise ValueError(f"its state has {text.numel():,} bytes")
    state = msgspec.json.decode(bytes(text.whole().tolist()), type=_State)
    dtype, double = getattr(torch, state.dtype, None), NESTED_LARGEST in parts
    elements = math.prod(state.shape)
    if len(state.shape) != 2 or min(state.shape) < 1 or elements % BLOCK or state.blocksize != BLOCK or dtype not in TYPES:
        raise ValueError(f"shape {state.shape} of {state.dtype} in blocks of {state.blocksize}; known are blocks of {BLOCK}")
    if double and (state.nested_blocksize != NESTED or state.nested_dtype != "float32" or state.nested_offset is None):
        raise ValueError(f"largest values in blocks of {state.nested_blocksize}; known are blocks of {NESTED} in float32")
    blocks = elements // BLOCK
    sizes = {"": elements // 2, LARGEST: blocks, TABLE: TABLE_VALUES}
    kinds = {"": torch.uint8, LARGEST: torch.uint8 if double else torch.float32, TABLE: torch.float32}
    if double:
        sizes |= {NESTED_LARGEST: -(-blocks // NESTED), STEPS: STEP_VALUES}
        kinds |= {NESTED_LARGEST: torch.float32, STEPS: torch.float32}
    for part, size in sizes.items():
        if (parts[part].numel(), parts[part].dtype) != (size, kinds[part]):
            raise ValueError(f"its part {part or 'of codes'!r} has {parts[part].numel():,} elements of {parts[part].dtype}")
    return Deferred.packed(
        parts[""], state.shape, dtype, form_by_table(double), partial(_pack, dict(parts), state.nested_offset or 0.0)
    )


def _pack(parts: Mapping[str, Deferred], added: float, packing: Packing, packed: torch.Tensor, before: int) -> None:
    """Copy the parts of some elements, which come after ``before`` others, to ``packed``."""
    assert isinstance(packing, Table4)
    if before % (TOGETHER if packing.double else BLOCK):
        raise MisuseError(
            f"a weight that is packed in blocks cannot be divided after {before:,} elements: open the store with more memory"
        )
    packed.zero_()
    views, first = packing.views(packed), before // BLOCK
    codes = parts[""]
    codes.write_to(views.codes.view(-1, *codes.shape[1:]), slice(before // 2, before // 2 + views.codes.numel()))
    parts[LARGEST].write_to(views.largest, slice(first, first + packing.rows))
    parts[TABLE].write_to(views.table)
    if packing.double:
        nested = first // NESTED
        parts[NESTED_LARGEST].write_to(views.nested, slice(nested, nested + views.nested.numel()))
        parts[STEPS].write_to(views.steps)
        views.added.fill_(added)
