"""Weights that the files of a checkpoint have packed, as deferred matrices.

A weight is there in parts, by names that begin with its own. Of bitsandbytes (4 bits, NF4 or FP4): codes, largest values,
tables, and a text that says how it was packed (``bitsandbytes.functional.QuantState``). Of floats of 8 bits: these, and their
scales. The parts go to the store as they are; nothing is packed anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import msgspec
import torch

from tiered.errors import MisuseError, quoted
from tiered.packing.float8 import SQUARE, Float8
from tiered.packing.form import Packing
from tiered.packing.quantised import TYPES
from tiered.packing.table4 import BLOCK, NESTED, Table4, form_by_table
from tiered.zero.construction.deferred import Deferred

__all__ = ["is_known", "united"]

SCALES = "_scale_inv"
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


def is_known(how: object) -> bool:
    """Return whether weights are packed in a way that is known, as a configuration says how (``quantization_config``)."""
    if not isinstance(how, dict):
        return False
    by_table = how.get("quant_method") == "bitsandbytes" and how.get("load_in_4bit") is True
    return by_table or (how.get("quant_method") == "fp8" and how.get("weight_block_size") == [SQUARE, SQUARE])


def united(tensors: Mapping[str, Deferred], where: str) -> dict[str, Deferred]:
    """Return the tensors of a file with one for each weight that is packed, in place of its parts. Raises MisuseError, which
    names the weight and ``where`` it is, for parts that are missing or of other sizes, and for a way of packing that is not
    known."""
    found = dict(tensors)
    for name in tensors:
        by_table, floats = STATE in name, name.endswith(SCALES)
        if not by_table and not floats:
            continue
        weight = name.partition(STATE)[0] if by_table else name.removesuffix(SCALES)
        ends = [end for end in ("", LARGEST, TABLE, NESTED_LARGEST, STEPS) if by_table or not end]
        parts = {end: found.pop(weight + end) for end in ends if weight + end in found}
        try:
            found[weight] = (_by_table if by_table else _floats)(parts, found.pop(name))
        except (KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise MisuseError(f"weight {quoted(weight)} in {where} is packed in a way that is not known: {why}") from None
    return found


def _floats(parts: Mapping[str, Deferred], scales: Deferred) -> Deferred:
    """Return the weight that consists of floats of 8 bits and ``scales``. Raises KeyError and ValueError."""
    codes = parts[""]
    if codes.dim() != 2 or codes.dtype is not torch.float8_e4m3fn:
        raise ValueError(f"shape {list(codes.shape)} of {codes.dtype}; known are matrices of float8_e4m3fn")
    grid = [-(-size // SQUARE) for size in codes.shape]
    if list(scales.shape) != grid or scales.dtype not in TYPES:
        raise ValueError(f"scales of shape {list(scales.shape)} of {scales.dtype}; known are {grid}, by {SQUARE} x {SQUARE}")
    return Deferred.packed(codes, codes.shape, torch.float32, Float8.form, partial(_pack_floats, codes, scales))


def _pack_floats(codes: Deferred, scales: Deferred, packing: Packing, packed: torch.Tensor, before: int) -> None:
    assert isinstance(packing, Float8)
    first = before // packing.columns
    _refuse_cut(before, SQUARE * packing.columns)
    packed.zero_()
    target = packed[: packing.codes_nbytes].view(torch.float8_e4m3fn).view(packing.rows, packing.columns)
    codes.write_to(target, slice(first, first + packing.rows))
    squares = packing.squares(packed)
    scales.write_to(squares, slice(first // SQUARE, first // SQUARE + squares.shape[0]))


def _refuse_cut(before: int, together: int) -> None:
    if before % together:
        raise MisuseError(
            f"a weight that is packed {together:,} elements together cannot be divided after {before:,}: open the store with "
            "more memory"
        )


def _by_table(parts: Mapping[str, Deferred], text: Deferred) -> Deferred:
    """Return the weight that consists of ``parts``. Raises KeyError, ValueError and what decoding raises."""
    if text.numel() > STATE_BYTES:
        raise ValueError(f"its state has {text.numel():,} bytes")
    state = msgspec.json.decode(bytes(text.whole().tolist()), type=_State)
    parts = {**parts, "": parts[""].in_bytes()}  # which may be there as elements of another type
    dtype, double = getattr(torch, state.dtype, None), NESTED_LARGEST in parts
    elements = math.prod(state.shape)
    if len(state.shape) != 2 or min(state.shape) < 1 or elements % BLOCK or state.blocksize != BLOCK or dtype not in TYPES:
        raise ValueError(f"shape {state.shape} of {state.dtype} in blocks of {state.blocksize}; known are blocks of {BLOCK}")
    added = state.nested_offset if double else 0.0
    if added is None or not abs(added) < 1e38:
        raise ValueError(f"{added} is what is added to its largest values")
    if double and (state.nested_blocksize != NESTED or state.nested_dtype != "float32"):
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
        parts[""], state.shape, dtype, form_by_table(double), partial(_pack_by_table, dict(parts), added)
    )


def _pack_by_table(parts: Mapping[str, Deferred], added: float, packing: Packing, packed: torch.Tensor, before: int) -> None:
    """Copy the parts of some elements, which come after ``before`` others, to ``packed``."""
    assert isinstance(packing, Table4)
    _refuse_cut(before, BLOCK * NESTED if packing.double else BLOCK)
    packed.zero_()
    views, first = packing.views(packed), before // BLOCK
    parts[""].write_to(views.codes.view(-1), slice(before // 2, before // 2 + views.codes.numel()))
    parts[LARGEST].write_to(views.largest, slice(first, first + packing.rows))
    parts[TABLE].write_to(views.table)
    if packing.double:
        nested = first // NESTED
        parts[NESTED_LARGEST].write_to(views.nested, slice(nested, nested + views.nested.numel()))
        parts[STEPS].write_to(views.steps)
        views.added.fill_(added)
