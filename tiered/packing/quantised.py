"""Which form a parameter is packed in: how quantised parameters, for reading only, are at rest. Each form has a file beside
this one, and ``form.py`` has what they share.

A *row* is what lies together in memory: the innermost dimension, or as many of the inner ones as have 32 elements together
(of a convolution: all but the outermost). The scales of ``int8`` are so those of output features for ``torch.nn.Linear``, and
of input features for a matrix that is stored the other way round (GPT-2's Conv1D).
"""

from __future__ import annotations

from typing import Literal

import torch

from tiered.packing.float8 import FLOATS8
from tiered.packing.form import Packing
from tiered.packing.gguf import BLOCKS
from tiered.packing.integers import Int4, Int8, Int8Largest
from tiered.packing.mxfp4 import Mxfp4
from tiered.packing.table4 import TABLES, DoubleTable4, Table4, form_by_table

__all__ = ["FORMS", "LEAST_COLUMNS", "QUANTIZE", "TYPES", "Quantize", "cast_form", "packing_of", "packing_where_fit"]

Quantize = Literal["int8", "int4", "nf4"]
QUANTIZE: tuple[Quantize, ...] = ("int8", "int4", "nf4")

LEAST_ELEMENTS, LEAST_COLUMNS = 1024, 32
"""A parameter with fewer elements, or no row of so many, stays as it is."""
TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types that are packed."""

_ALL: tuple[type[Packing], ...] = (Int8, Int8Largest, Int4, *FLOATS8, Mxfp4, *TABLES, *BLOCKS.values())
FORMS: dict[str, type[Packing]] = {one.form: one for one in _ALL}
"""By the name that a record has: it never changes its meaning."""
_OF_OPTION: dict[str, type[Packing]] = {"int8": Int8, "int4": Int4, "nf4": DoubleTable4}


def cast_form(form: str, source: torch.dtype, dtype: torch.dtype) -> str | None:
    """Return the form whose values, unpacked to ``dtype``, are those of ``form`` that were unpacked to ``source`` first; None
    where there is none."""
    kind = FORMS[form]
    if source in (dtype, torch.float32):
        return form
    return form_by_table(kind.double, source) if issubclass(kind, Table4) and dtype is torch.float32 else None


def packing_of(form: str, shape: torch.Size, stride: tuple[int, ...]) -> Packing | None:
    """Return how a parameter without gaps between its elements is packed in ``form``, one of ``FORMS``; None where it has no
    row of ``LEAST_COLUMNS``, or its elements do not fill the blocks of the form."""
    columns = _columns(shape, stride)
    return None if columns is None else FORMS[form].of(shape.numel() // columns, columns)


def packing_where_fit(
    quantize: Quantize | None, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Packing | None:
    """Return how a parameter is packed in a model that is quantised; None for one that stays as it is: of one dimension, of
    another type than ``TYPES``, or tiny."""
    if quantize is None or dtype not in TYPES or shape.numel() < LEAST_ELEMENTS:
        return None
    return packing_of(_OF_OPTION[quantize].form, shape, stride)


def _columns(shape: torch.Size, stride: tuple[int, ...]) -> int | None:
    """Return the elements of a row: those of as few of the dimensions that are innermost in memory as have ``LEAST_COLUMNS``
    together, without the outermost one."""
    sizes = [size for _, size in sorted(zip(stride, shape, strict=True), key=lambda one: one[0]) if size > 1]
    columns = 1
    for size in sizes[:-1]:
        columns *= size
        if columns >= LEAST_COLUMNS:
            return columns
    return None
