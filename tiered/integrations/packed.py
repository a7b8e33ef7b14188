"""Weights that the files of a checkpoint have packed, as deferred matrices.

A weight is there in parts, by names that begin with its own. Of bitsandbytes (4 bits, NF4 or FP4): codes, largest values,
tables, and a text that says how it was packed (``bitsandbytes.functional.QuantState``); in 8 bits: codes and largest values. Of
floats of 8 bits: these, and their scales, of which the configuration says what each is for. Of floats of 4 bits (gpt-oss):
blocks, and a power of two for each. The parts go to the store as they are; nothing is packed anew.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from tiered.errors import MisuseError, quoted
from tiered.packing.float8 import ELEMENTS, FLOATS8, Float8
from tiered.packing.form import Packing, powers
from tiered.packing.integers import Int8, Int8Largest
from tiered.packing.mxfp4 import GROUP, Mxfp4
from tiered.packing.quantised import TYPES
from tiered.packing.table4 import BLOCK, NESTED, Table4, form_by_table
from tiered.zero.construction.deferred import Deferred

__all__ = ["is_known", "named", "united", "weight_of"]

SCALES = {"fp8": "_scale_inv", "compressed-tensors": "_scale"}
"""What the scales of floats of 8 bits add to the name of their weight, by ``quant_method``."""
FORMATS = {"float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized"}
"""Those of compressed-tensors whose codes have a byte each."""
OF_OTHERS = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale")
"""Ends of names of scales by which other programs quantise what a layer is given or caches. Here only weights are packed."""
BLOCKS, POWERS = "_blocks", "_scales"
"""What gpt-oss adds to the name of a weight: codes in blocks, and a power of two for each."""
WEIGHT, ROWS, FORMAT = ".weight", ".SCB", ".weight_format"
"""Ends of the names of what bitsandbytes has of a weight in 8 bits: codes, largest values of rows, and their order."""
ROW_MAJOR = 0
STATE = ".quant_state.bitsandbytes__"
LARGEST, TABLE, NESTED_LARGEST, STEPS = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
TABLE_VALUES, STEP_VALUES = 16, 256
STATE_BYTES = 1 << 16
EXPONENTS = getattr(torch, "float8_e8m0fnu", torch.uint8)
"""The type of scales that are powers of two; uint8 has the same bytes."""

Block = tuple[int | None, int | None]
"""Rows and columns that have a scale together; None: all."""


class _State(msgspec.Struct):
    quant_type: str
    blocksize: int
    dtype: str
    shape: list[int]
    nested_blocksize: int | None = None
    nested_dtype: str | None = None
    nested_offset: float | None = None


class _Weights(msgspec.Struct):
    """How compressed-tensors says that weights are packed."""

    num_bits: int
    type: str
    strategy: str
    symmetric: bool = True
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None

    @property
    def block(self) -> Block | None:
        """What has a scale; None for what is not known."""
        if (self.num_bits, self.symmetric) != (8, True) or self.type not in ("float", "int"):
            return None
        if self.type == "int":
            return {"tensor": (None, None), "channel": (1, None)}.get(self.strategy)
        if self.strategy == "group" and self.group_size is not None:
            return 1, self.group_size
        return {"tensor": (None, None), "channel": (1, None), "block": self.block_structure}.get(self.strategy)


class _Group(msgspec.Struct):
    weights: _Weights
    format: str | None = None


class _Compressed(msgspec.Struct):
    config_groups: dict[str, _Group]
    format: str | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None

    @property
    def blocks(self) -> list[Block] | None:
        """What has a scale, of each group of layers; None where one is packed in a way that is not known."""
        sparse = (self.sparsity_config or {}).get("format", "dense") != "dense"
        formats = {group.format or self.format for group in self.config_groups.values()}
        if sparse or self.transform_config or not formats <= FORMATS:
            return None
        found = [group.weights.block for group in self.config_groups.values()]
        return None if None in found else [block for block in found if block is not None]


def is_known(how: object) -> bool:
    """Return whether weights are packed in a way that is known, as a configuration says how (``quantization_config``)."""
    if not isinstance(how, dict):
        return False
    if how.get("quant_method") == "bitsandbytes":
        return (how.get("load_in_4bit") is True) is not (how.get("load_in_8bit") is True)
    return how.get("quant_method") == "mxfp4" or bool(_blocks(how))


def named(how: object) -> str:
    """Return how errors name a way of packing that is not known."""
    given = how if isinstance(how, dict) else {}
    said = [quoted(given[key]) for key in ("quant_method", "format") if given.get(key) is not None]
    block = given.get("weight_block_size")
    by = [" x ".join(quoted(one) for one in block[:2])] if isinstance(block, list) else []
    return ", ".join(said + by) or quoted(how)


def _blocks(how: Mapping[str, Any]) -> list[Block] | None:
    """Return what may have a scale, of codes that have a byte each; None for what is packed otherwise."""
    if how.get("quant_method") == "fp8" and how.get("expert_dtype", "fp8") == "fp8":
        given = how.get("weight_block_size", [128, 128])
        sizes = isinstance(given, list) and len(given) == 2 and all(type(one) is int for one in given)
        found: list[Block] = [(None, None)] if given is None else [(given[0], given[1])] if sizes else []
    elif how.get("quant_method") == "compressed-tensors":
        try:
            found = msgspec.convert(how, _Compressed).blocks or []
        except msgspec.ValidationError:
            return None
    else:
        return None
    return found if all(block in KNOWN for block in found) else None


KNOWN = {one.block for one in FLOATS8}


def weight_of(part: str) -> str:
    """Return the name of the weight whose codes are a tensor of that name, where it is not the same."""
    return part.removesuffix(BLOCKS)


def united(tensors: Mapping[str, Deferred], how: Mapping[str, Any], where: str) -> dict[str, Deferred]:
    """Return the tensors of files with one for each weight that is packed, in place of its parts. ``how``: what the
    configuration says of it (``is_known``). Raises MisuseError, which names the weight and ``where`` it is, for parts that are
    missing or of other sizes, and for a way of packing that is not known."""
    blocks, scales = _blocks(how) or [], SCALES.get(str(how.get("quant_method")))
    experts, eight_bits = how.get("quant_method") == "mxfp4", how.get("load_in_8bit") is True
    known = (*ELEMENTS, torch.int8) if how.get("quant_method") == "compressed-tensors" else tuple(ELEMENTS)
    found = {name: one for name, one in tensors.items() if not blocks or not name.endswith(OF_OTHERS)}
    for name in list(found):
        weight, by_table, _ = name.partition(STATE)
        try:
            if by_table:
                ends = [end for end in ("", LARGEST, TABLE, NESTED_LARGEST, STEPS) if weight + end in found]
                parts = {end: found.pop(weight + end) for end in ends}
                found[weight] = _by_table(parts, found.pop(name))
            elif eight_bits and name.endswith(ROWS):
                weight = name.removesuffix(ROWS) + WEIGHT
                ends = [end for end in (WEIGHT, FORMAT) if name.removesuffix(ROWS) + end in found]
                parts = {end: found.pop(name.removesuffix(ROWS) + end) for end in ends}
                found[weight] = _by_rows(parts, found.pop(name))
            elif experts and name.endswith((BLOCKS, POWERS)):
                weight = name.removesuffix(BLOCKS).removesuffix(POWERS)
                if weight not in found:
                    parts = {end: found.pop(weight + end) for end in (BLOCKS, POWERS) if weight + end in found}
                    found[weight] = _experts(parts[BLOCKS], parts[POWERS])
            elif scales is not None and name.endswith(scales):
                weight = name.removesuffix(scales)
                found[weight] = _scaled(found.pop(weight, None), found.pop(name), blocks, known)
            elif tensors[name].dtype in known and f"{name}{scales}" not in tensors:
                raise KeyError(scales)
            elif eight_bits and tensors[name].dtype is torch.int8 and name.removesuffix(WEIGHT) + ROWS not in tensors:
                raise KeyError(ROWS)
        except (KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            if error.args == ("",):
                why = "it lacks the tensor of that name, which has its codes"
            raise MisuseError(f"weight {quoted(weight)} in {where} is packed in a way that is not known: {why}") from None
    return found


def _experts(codes: Deferred, scales: Deferred) -> Deferred:
    """Return the weight of experts that consists of floats of 4 bits and their scales, as gpt-oss has it: the model has the two
    dimensions of an expert the other way round. Raises ValueError."""
    wrong = codes.dim() != 4 or codes.shape[3] != GROUP // 2 or not codes.numel() or scales.shape != codes.shape[:3]
    if wrong or (codes.dtype, scales.dtype) != (torch.uint8, torch.uint8):
        raise ValueError(
            f"blocks of shape {list(codes.shape)} of {codes.dtype}, scales of {list(scales.shape)} of {scales.dtype}; known "
            f"are {GROUP // 2} bytes in a block and a scale for each, of uint8"
        )
    shape = (*codes.shape[:2], codes.shape[2] * GROUP)
    made = Deferred.packed(codes, shape, torch.float32, Mxfp4.form, partial(_pack_experts, codes, scales))
    return made.transpose(1, 2)  # type: ignore[return-value]


def _by_rows(parts: Mapping[str, Deferred], largest: Deferred) -> Deferred:
    """Return the weight that consists of codes of 8 bits and the ``largest`` value of each row. Raises KeyError, ValueError."""
    codes = parts[WEIGHT]
    if codes.dim() != 2 or not codes.numel() or codes.dtype is not torch.int8:
        raise ValueError(f"shape {list(codes.shape)} of {codes.dtype}; known are matrices of int8")
    if (largest.shape, largest.dtype) != (codes.shape[:1], torch.float32):
        raise ValueError(f"largest values of shape {list(largest.shape)} of {largest.dtype}; known is one float32 for each row")
    order = parts.get(FORMAT)
    if order is not None and (order.numel() != 1 or int(order.whole()) != ROW_MAJOR):
        raise ValueError(f"its {FORMAT!r} is not {ROW_MAJOR}, which is row by row")
    return Deferred.packed(codes, codes.shape, torch.float32, Int8Largest.form, partial(_pack_rows, codes, largest))


def _pack_rows(codes: Deferred, scales: Deferred, packing: Packing, packed: torch.Tensor, before: int) -> None:
    """``scales``: what each row has, or one number for all."""
    assert isinstance(packing, Int8)
    _refuse_cut(before, packing.columns)
    packed.zero_()
    first = before // packing.columns
    of_codes, of_rows = packing.parts(packed)
    codes.write_to(of_codes, slice(first, first + packing.rows))
    if scales.numel() == 1:
        of_rows.copy_(scales.whole().view(1))
    else:
        scales.write_to(of_rows.view(-1, *scales.shape[1:]), slice(first, first + packing.rows))


def _pack_experts(codes: Deferred, scales: Deferred, packing: Packing, packed: torch.Tensor, before: int) -> None:
    assert isinstance(packing, Mxfp4)
    count = math.prod(codes.shape[1:3])  # groups of an expert
    first = before // GROUP // count
    _refuse_cut(before, GROUP * count)
    packed.zero_()
    of_codes, of_scales = packing.parts(packed)
    at = slice(first, first + packing.rows // count)
    codes.write_to(of_codes.view(-1, *codes.shape[1:]), at)
    scales.write_to(of_scales.view(-1, *scales.shape[1:]), at)


def _scaled(codes: Deferred | None, scales: Deferred, blocks: Sequence[Block], known: Collection[torch.dtype]) -> Deferred:
    """Return the weight that consists of codes of 8 bits, of a ``known`` type, and ``scales``, of which each is for one of
    ``blocks``. Raises KeyError and ValueError."""
    if codes is None:
        raise KeyError("")
    if codes.dim() != 2 or not codes.numel() or codes.dtype not in known:
        raise ValueError(f"shape {list(codes.shape)} of {codes.dtype}; known are matrices of {', '.join(map(str, known))}")
    rows, columns = codes.shape
    whole = codes.dtype is torch.int8
    grids = [(one.form, one.scales_of(rows, columns)) for one in FLOATS8 if one.element is codes.dtype and one.block in blocks]
    if whole:
        grids = [(Int8.form, (rows if down else 1, 1)) for down, along in blocks if down in (1, None) and along is None]
    shape = (1, 1) if scales.numel() == 1 else tuple(scales.shape)
    found = [form for form, grid in grids if grid == shape]  # where there are two, their blocks have the same elements
    types = TYPES if whole else (*TYPES, EXPONENTS, torch.uint8)
    if not found or scales.dtype not in types:
        those = " or ".join(f"{list(grid)} ({form})" for form, grid in grids)
        those += f", of {', '.join(dict.fromkeys(map(str, types)))}"
        raise ValueError(f"scales of shape {list(scales.shape)} of {scales.dtype}; known are {those}")
    pack = partial(_pack_rows if whole else _pack_floats, codes, scales)
    return Deferred.packed(codes, codes.shape, torch.float32, found[0], pack)


def _pack_floats(codes: Deferred, scales: Deferred, packing: Packing, packed: torch.Tensor, before: int) -> None:
    assert isinstance(packing, Float8)
    first, down = before // packing.columns, packing.down
    _refuse_cut(before, (down or 1) * packing.columns)
    packed.zero_()
    target = packed[: packing.codes_nbytes].view(packing.element).view(packing.rows, packing.columns)
    codes.write_to(target, slice(first, first + packing.rows))
    squares = packing.squares(packed)
    found = torch.empty(squares.shape, dtype=scales.dtype, device="cpu")
    if scales.numel() == 1:
        scales.write_to(found.view(scales.shape))
    else:
        at = first // down if down else 0
        scales.write_to(found, slice(at, at + squares.shape[0]))
    squares.copy_(powers(found) if found.dtype is torch.uint8 else found)


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
