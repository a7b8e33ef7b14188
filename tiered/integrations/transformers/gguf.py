"""Models in GGUF files, as deferred tensors by the names and of the shapes that ``transformers`` has.

Names, configuration, tokenizer, and what becomes of each tensor on its way into a model are those of ``transformers``
(``modeling_gguf_pytorch_utils``) and of the library ``gguf``, which it uses. ``transformers`` unpacks every tensor to float32
in memory. Here its functions are given the numbers of rows in place of values: a tensor whose rows only move, or stay, is then
a deferred one of those rows, also of packed ones, as a row is whole blocks. A tensor that is turned is turned; one of which a
function makes other values is computed by it when it is written. There are functions on arrays for each architecture, and, of
architectures with a newer loader, conversions of tensors.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer

from tiered.errors import GgufError, MisuseError, quoted, shown
from tiered.format.foreign.gguf import BlockType, GgufFile
from tiered.format.safetensors import first_of
from tiered.integrations.kept import CONFIG, files_of
from tiered.integrations.transformers.shapes import config_of, making, refuse_document
from tiered.packing.gguf import BLOCKS
from tiered.zero.construction.deferred import Deferred, Files

__all__ = ["ENDING", "GgufModel"]

ENDING = ".gguf"
"""Of the names of files."""

PROBED = 3
"""Columns of what processors are given: numbers that count on within a row, and from a row to the next."""
ARCHITECTURE, PARTS = "general.architecture", "split.count"
FIELDS = "tokenizer.ggml."
TOKENIZER, TOKENS = f"{FIELDS}model", f"{FIELDS}tokens"


class GgufModel:
    """The model in a GGUF file."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises MisuseError without the library ``gguf``, for one of several parts, and for a type of tensors
        that the library does not unpack; GgufError for damage; OSError."""
        try:
            import gguf
        except ImportError as error:
            raise MisuseError(f"{shown(str(path), 1000)} is read with the library gguf: pip install gguf") from error
        self.path, self._library = path, gguf
        sizes = gguf.GGML_QUANT_SIZES.items()
        self.file = GgufFile(path, {int(kind): BlockType(kind.name, *size) for kind, size in sizes})
        self.file.close()
        self._where = shown(str(path), 1000)
        architecture = self.file.metadata.get(ARCHITECTURE)
        if not isinstance(architecture, str):
            raise GgufError(f"{self._where} has no {ARCHITECTURE}")
        self._architecture = architecture
        if self.file.metadata.get(PARTS, 1) != 1:
            raise MisuseError(f"{self._where} is one of several parts of a model: join them with llama-gguf-split --merge")
        for name, tensor in self.file.tensors.items():
            if not tensor.plain and tensor.type not in BLOCKS:
                self._unpacked(np.zeros((1, gguf.GGML_QUANT_SIZES[self._kind(tensor.type)][1]), np.uint8), tensor.type, name)

    def _kind(self, name: str) -> Any:
        return self._library.GGMLQuantizationType[name]

    def _unpacked(self, rows: np.ndarray[Any, Any], kind: str, name: str) -> np.ndarray[Any, Any]:
        try:
            return self._library.quants.dequantize(rows, self._kind(kind))  # type: ignore[no-any-return]
        except NotImplementedError as error:
            raise MisuseError(
                f"tensor {quoted(name)} in {self._where} is of type {kind}, which the library gguf does not unpack: take a "
                "file of another type, such as Q4_K_M or Q8_0"
            ) from error

    @property
    def packed(self) -> bool:
        """Return whether some tensors are packed."""
        return any(not tensor.plain for tensor in self.file.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model: float32, or that of all matrices where these are floats of 16 bits."""
        kinds = {tensor.type for tensor in self.file.tensors.values() if tensor.shape[1:]}
        return torch.float16 if kinds == {"F16"} else torch.bfloat16 if kinds == {"BF16"} else torch.float32

    @property
    def kinds(self) -> set[str]:
        """The types of tensors that are not packed, as safetensors names them."""
        return {tensor.type for tensor in self.file.tensors.values() if tensor.plain}

    def config(self) -> Any:
        """Return the configuration. Raises MisuseError where ``transformers`` makes none of the file, or it asks for very many
        modules."""
        with tempfile.TemporaryDirectory(prefix="tiered-") as made:
            Path(made, CONFIG).write_text(json.dumps(self._document))
            found = config_of(made, called=self._where)
        found._name_or_path = str(self.path)
        return found

    @cached_property
    def _document(self) -> dict[str, Any]:
        """What ``transformers`` says in the place of a ``config.json``."""
        if self._newer is not None:
            with making(f"transformers does not read {self._where}"):
                document: dict[str, Any] = self._newer.get_gguf_config(*self._newer.read_gguf_metadata(self.path))
            refuse_document(document, self._where)
            return document
        words, known = self.file.metadata.get(TOKENS), f"{self._architecture}.vocab_size" in self.file.metadata
        counts = {} if known or not isinstance(words, int) else {TOKENS: words}
        with tempfile.TemporaryDirectory(prefix="tiered-") as made, making(f"transformers does not read {self._where}"):
            outline = Path(made, self.path.name)
            outline.write_bytes(self.file.outline(counts))
            found: dict[str, Any] = _loader().load_gguf_checkpoint(outline, return_tensors=False)["config"]
        if isinstance(words, int):
            found.setdefault("vocab_size", words)
        refuse_document(found, self._where)
        return found

    @cached_property
    def _newer(self) -> Any:
        """The loader of ``transformers`` from 5.24 on, where the architecture is one of its own; else None."""
        try:
            from transformers.integrations import gguf as newer
        except ImportError:
            return None
        return newer if self._architecture in newer.GGUF_ARCHS else None

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the files of the tokenizer that ``transformers`` makes of the file's, by name; none, with a warning, where it
        makes none."""
        if TOKENIZER not in self.file.metadata:
            return {}
        with tempfile.TemporaryDirectory(prefix="tiered-") as made:
            alone, saved = Path(made, "alone"), Path(made, "saved")
            alone.mkdir()
            (alone / self.path.name).symlink_to(self.path.resolve())  # other files of its folder may be another model's
            try:
                with self._read_already():
                    tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=self.path.name, local_files_only=True)
            except Exception as error:  # whatever it does not know
                warnings.warn(
                    f"transformers makes no tokenizer of the one in {self._where}, and the store keeps none: "
                    f"{self._lacking(error)}",
                    stacklevel=3,
                )
                return {}
            tokenizer.save_pretrained(saved)
            found = files_of(saved)
        found.pop(CONFIG, None)
        return found

    def _lacking(self, error: Exception) -> str:
        """Return why there is no tokenizer: which field the file lacks, where ``transformers`` looked for one."""
        field = f"{FIELDS}{error.args[0]}" if isinstance(error, KeyError) and error.args else ""
        if field and field not in self.file.metadata:
            return f"the file has no {shown(field)}"
        return shown(" ".join(str(error).split()), 300) or type(error).__name__

    @contextmanager
    def _read_already(self) -> Iterator[None]:
        """Have ``transformers`` not read the configuration in the file again, which takes seconds."""
        loader = _loader()
        original = loader.load_gguf_checkpoint

        class Found(dict[str, Any]):
            def __missing__(self, key: str) -> Any:
                return original(path)[key]

        path = self.path

        def load(given: Any, return_tensors: bool = False, **options: Any) -> Any:
            if return_tensors or not os.path.samefile(given, path):
                return original(given, return_tensors, **options)
            return Found(config=dict(self._document))

        loader.load_gguf_checkpoint = load
        try:
            yield
        finally:
            loader.load_gguf_checkpoint = original

    def weights(self, files: Files, model: nn.Module) -> dict[str, Deferred]:
        """Return deferred tensors by the names that ``model`` (on the meta device) has of them. Warns of tensors that the model
        does not take. Raises MisuseError where ``transformers`` makes of tensors what is not known here."""
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        given = files.tensors_of(self.file)
        tensors = {name: self._tensor(name, given[name]) for name in self.file.tensors}
        if self._newer is not None:
            return self._by_conversions(tensors, model, shapes)
        found, left = self._by_processors(tensors, model, shapes)
        if left:
            warnings.warn(
                f"{self._where} has tensors that {type(model).__name__} of transformers does not take, and that are left out: "
                f"{first_of(left)}",
                stacklevel=2,
            )
        return found

    def _by_processors(
        self, tensors: Mapping[str, Deferred], model: nn.Module, shapes: Mapping[str, torch.Size]
    ) -> tuple[dict[str, Deferred], list[str]]:
        """Return what functions on arrays make of each tensor, and the names of tensors that these leave out."""
        loader = _loader()
        processor = loader.TENSOR_PROCESSORS.get(self._architecture, loader.TensorProcessor)(config=self._document)
        with making(f"transformers does not know the tensors of {self._where}"):
            names = loader.get_gguf_hf_weights_map(model, processor)
        found: dict[str, Deferred] = {}
        sources, left = _Sources(), []
        aside: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            probe = sources.add(tensor, self.file.tensors[name].shape)

            def process(values: np.ndarray[Any, Any], name: str = name, into: dict[str, torch.Tensor] = aside) -> Any:
                given = {"tensor_key_mapping": names, "parsed_parameters": {"tensors": into}}
                with np.errstate(all="ignore"):
                    return processor.process(weights=values, name=name, **given)

            def values_of(values: np.ndarray[Any, Any], process: Callable[..., Any] = process) -> Any:
                return process(values, into={}).weights

            known = {target: int(made.count_nonzero()) for target, made in aside.items()}
            try:
                made = process(probe)
                called, numbers = made.name, made.weights
            except Exception:  # it needs all columns, or there is something that it does not know, which comes out below
                called, numbers = name, None
            target = names.get(called) if called is not None else None
            changed = [one for one, made in aside.items() if int(made.count_nonzero()) != known.get(one)]
            parts = {one: aside.pop(one).numpy() for one in changed if bool((aside[one] != 0).all())}
            for one, rows in (parts if target is None else {**parts, target: numbers}).items():
                moved = None if rows is None else sources.moved(rows, self.file.tensors[name].shape)
                if moved is None and (one != target or one not in shapes):
                    raise self._unknown(one, name)
                if moved is None:
                    moved = self._computed(tensor, name, values_of, shapes[one])
                found[one] = moved
            if target is None and not changed:
                left.append(name)
            sources.forget_unless(bool(aside))
        if aside:
            raise MisuseError(f"{self._where} lacks a part of {quoted(next(iter(aside)))}")
        return found, left

    def _by_conversions(
        self, tensors: Mapping[str, Deferred], model: Any, shapes: Mapping[str, torch.Size]
    ) -> dict[str, Deferred]:
        """Return what the newer loader's conversions, which are functions on tensors, make of each tensor, or of several."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping = self._newer.get_gguf_conversion_mapping(self._architecture, model.config)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        members: dict[str, list[tuple[str, str | None]]] = {}
        for name in tensors:
            target, pattern = rename_source_key(name, renamings, converters)
            members.setdefault(target, []).append((name, pattern))
        found: dict[str, Deferred] = {}
        for target, those in members.items():
            sources, (name, pattern) = _Sources(), those[-1]

            def convert(
                *values: np.ndarray[Any, Any], those: Any = those, target: str = target, pattern: Any = pattern
            ) -> Any:
                if pattern is None:
                    return values[0]
                converter = copy.deepcopy(by_pattern[pattern])
                for (one, its), value in zip(those, values, strict=True):
                    converter.add_tensor(target, one, its, torch.from_numpy(value))
                (made,) = converter.convert(target, config=model.config).values()
                return (made[0] if isinstance(made, list) else made).numpy()

            probes = [sources.add(tensors[one], self.file.tensors[one].shape) for one, _ in those]
            try:
                moved = sources.moved(convert(*probes), self.file.tensors[name].shape)
            except Exception:  # it needs all columns, or a tensor is missing
                moved = None
            if moved is None and (len(those) > 1 or target not in shapes):
                raise self._unknown(target, name)
            found[target] = self._computed(tensors[name], name, convert, shapes[target]) if moved is None else moved
        return found

    def _unknown(self, target: str, name: str) -> MisuseError:
        return MisuseError(
            f"transformers makes {quoted(target)} of tensor {quoted(name)} in {self._where} in a way that is not known here: "
            "take the model's safetensors files"
        )

    def _tensor(self, name: str, rows: Deferred) -> Deferred:
        """Return a tensor of the file as a matrix of its rows, or as a vector."""
        tensor = self.file.tensors[name]
        if tensor.plain:
            return rows
        shape = rows.shape[0], tensor.shape[-1]
        if tensor.type in BLOCKS:
            form = BLOCKS[tensor.type].form
            return Deferred.packed(rows, shape, torch.float32, form, lambda packing, packed, before: rows.write_to(
                packed.view(packing.rows, -1), slice(before // packing.columns, before // packing.columns + packing.rows)
            ))  # fmt: skip
        return Deferred.converted(
            rows, lambda given: torch.from_numpy(self._unpacked(given.numpy(), tensor.type, name)), shape, torch.float32
        )

    def _computed(self, tensor: Deferred, name: str, process: Callable[[Any], Any], shape: torch.Size) -> Deferred:
        """Return what a processor makes of the values of a tensor, all of which it is given at once."""
        true = self.file.tensors[name].shape

        def call(values: torch.Tensor) -> torch.Tensor:
            with making(f"transformers cannot convert tensor {quoted(name)} in {self._where}"):
                made = torch.from_numpy(np.copy(process(values.view(true).numpy())))
            if made.shape != shape:
                raise MisuseError(
                    f"tensor {quoted(name)} in {self._where} becomes one of shape {list(made.shape)}, and the model's has "
                    f"{list(shape)}"
                )
            return made

        return Deferred.computed(call, tensor.cast(torch.float32), shape)


def _loader() -> Any:
    """Return what ``transformers`` has for GGUF files. Models of other files do not need it, and a later release may not have
    it."""
    from transformers import modeling_gguf_pytorch_utils

    return modeling_gguf_pytorch_utils


class _Sources:
    """Tensors of a file whose rows have numbers, from 1 on."""

    def __init__(self) -> None:
        self._tensors: list[Deferred] = []
        self._first: list[int] = [1]

    def add(self, tensor: Deferred, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Number the rows of ``tensor``, of a vector the elements. Returns the numbers of the first columns."""
        count, first = tensor.shape[0], self._first[-1]
        self._tensors.append(tensor)
        self._first.append(first + count)
        numbers = np.arange(first * PROBED, (first + count) * PROBED, dtype=np.float64)
        return numbers.reshape(*shape[:-1], PROBED) if shape[1:] else numbers[::PROBED].copy()

    def forget_unless(self, needed: bool) -> None:
        """Forget the tensors, but where parts of another one have been made of them."""
        if not needed:
            self._tensors, self._first = [], self._first[-1:]

    def moved(self, numbers: np.ndarray[Any, Any], shape: tuple[int, ...]) -> Deferred | None:
        """Return the tensor that has rows by ``numbers``; None where these are no rows. ``shape``: of the last tensor."""
        last, first = self._tensors[-1], self._first[-2]
        if last.dim() == 1:
            same = np.array_equal(numbers.reshape(-1), np.arange(first, self._first[-1]) * PROBED)
            return last.view(numbers.shape) if same else None  # type: ignore[return-value]
        turned = np.arange(first * PROBED, self._first[-1] * PROBED).reshape(*shape[:-1], PROBED).T
        if len(shape) == 2 and np.array_equal(numbers, turned):
            return last.t()  # type: ignore[return-value]
        if numbers.ndim < 2 or numbers.shape[-1] != PROBED:
            return None
        rows = numbers.reshape(-1, PROBED)
        numbered = np.floor(rows[:, 0] / PROBED)
        if not np.array_equal(rows, numbered[:, None] * PROBED + np.arange(PROBED)):
            return None
        owners = np.searchsorted(self._first, numbered, side="right") - 1
        if owners.min() < 0 or owners.max() >= len(self._tensors):
            return None
        order = numbered.astype(np.int64)
        used, places = np.unique(owners, return_inverse=True)
        parts = [self._tensors[owner] for owner in used]
        if len({(part.shape[1:], part.dtype) for part in parts}) != 1 or last.dim() != 2:
            return None
        before = np.cumsum([0, *(part.shape[0] for part in parts)])[:-1]
        order += before[places] - np.array(self._first)[owners]
        return Deferred.gathered(parts, torch.from_numpy(order), (*numbers.shape[:-1], parts[0].shape[1]))
