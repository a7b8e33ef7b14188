"""Keep in a store what opening a model in it takes beside its tensors, so that the folder that it came from may go.

Small files of the folder are bytes in the store, below ``NAME/files/``: its configuration, its tokenizer, and ``opening.json``,
which says how the model was imported. They are tensors of their own, so a later ``zero.commit`` of the model keeps them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tiered.errors import ManifestError, MisuseError, expect_type
from tiered.store import TieredStore
from tiered.store.at_rest import StoreAtRest
from tiered.types import Owner
from tiered.zero.paging.storage import model_named

__all__ = [
    "CACHE_RECORD",
    "CHAT_TEMPLATES",
    "CONFIG",
    "FILES",
    "OF_CACHE",
    "TOKENIZER",
    "TOKENIZER_CONFIG",
    "UNFINISHED",
    "files_of",
    "forget_cache",
    "keep",
    "kept_caches",
    "kept_file",
    "kept_folder",
    "kept_models",
    "key_of_file",
    "only_model",
    "opening_of",
    "put_file",
    "refuse_no_cache",
    "refuse_unfinished",
    "saved_by",
]

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
FILES = (
    *(CONFIG, TOKENIZER, "generation_config.json", TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", *CHAT_TEMPLATES),
)
"""The files of a model's folder that are kept, where it has them."""
LARGEST = 64 << 20
"""Bytes of the largest file that is kept."""
FROM_FOLDER = "..., existing='resume'), which needs its folder"
OPENING = "opening.json"
UNFINISHED = "import.json"
"""The record of an import that is not finished."""
OF_CACHE = "/kv/"
"""What follows the name of a kept ``TieredCache`` in the keys of its tensors."""
CACHE_RECORD = f"{OF_CACHE}record"


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files of ``folder`` that are kept. Raises MisuseError for one that is too large."""
    found = {}
    for path in (folder / file for file in FILES):
        if path.is_file():
            if path.stat().st_size > LARGEST:
                raise MisuseError(
                    f"{path} has {path.stat().st_size:,} bytes, and the {path.name} of a model at most {LARGEST:,}"
                )
            found[path.name] = path.read_bytes()
    return found


def saved_by(*several: Any) -> dict[str, bytes]:
    """Return the files that ``save_pretrained`` of each one that is not None writes, by name."""
    with tempfile.TemporaryDirectory(prefix="tiered-") as made:
        for one in several:
            if one is not None:
                one.save_pretrained(made)
        return {path.name: path.read_bytes() for path in Path(made).iterdir() if path.is_file()}


def keep(store: TieredStore, name: str, files: Mapping[str, bytes], opening: Mapping[str, str]) -> None:
    """Put ``files`` and ``opening`` into ``store`` for the model ``name``. Nothing is committed."""
    for file, contents in files.items():
        put_file(store, name, file, contents)
    put_file(store, name, OPENING, json.dumps(dict(opening)).encode())


def key_of_file(name: str, file: str) -> str:
    """Return the key of a file that is kept for the model ``name``."""
    return f"{name}/files/{file}"


def put_file(store: TieredStore, name: str, file: str, contents: bytes) -> None:
    """Put a file into ``store``, unless it is empty."""
    if contents:
        store.put(key_of_file(name, file), torch.frombuffer(bytearray(contents), dtype=torch.uint8), owner=model_named(name))


def kept_models(store: TieredStore) -> list[str]:
    """Return the names of the models in ``store`` that can be opened without a folder."""
    end = key_of_file("", CONFIG)
    names = (key.removesuffix(end) for key in store if key.endswith(end))
    return sorted(name for name in names if store.owner_of(f"{name}{end}") == model_named(name))


def only_model(store: TieredStore) -> str:
    """Return the name of the only model that can be opened without a folder. Raises MisuseError for none, and for several."""
    expect_type(store, TieredStore, "models are kept in a TieredStore")
    found = kept_models(store)
    if not found:
        end = key_of_file("", UNFINISHED)
        for key in store:
            if key.endswith(end):
                refuse_unfinished(store, key.removesuffix(end))
        raise MisuseError(
            f"{store} has no model that can be opened by itself: tiered import FOLDER STORE makes one of a folder with {CONFIG}"
        )
    if len(found) > 1:
        raise MisuseError(f"{store} has {len(found)} models, {', '.join(map(repr, found))}: choose one with name=")
    return found[0]


def refuse_unfinished(store: TieredStore | StoreAtRest, name: str) -> None:
    """Raise MisuseError where the import of a model was stopped, and not finished since."""
    if key_of_file(name, UNFINISHED) in store:
        raise MisuseError(
            f"the import of model {name!r} into {store} is not finished: run the same tiered import, or import_model, again, "
            "which goes on where it was stopped"
        )


def kept_file(store: TieredStore | StoreAtRest, name: str, file: str) -> bytes | None:
    """Return the contents of a file that is kept; None where there is none."""
    key = key_of_file(name, file)
    if key not in store:
        return None
    spec = store.spec(key)
    if spec.dtype != "uint8" or len(spec.shape) != 1 or spec.nbytes > LARGEST:
        raise ManifestError(f"{key!r} in {store} is {spec.dtype} of shape {list(spec.shape)}, and no file")
    return store.get(key).numpy().tobytes()


def opening_of(store: TieredStore, name: str) -> dict[str, str]:
    """Return what ``keep`` was given. Raises MisuseError where nothing is kept of a model of that name."""
    refuse_unfinished(store, name)
    contents = kept_file(store, name, OPENING)
    if contents is None or kept_file(store, name, CONFIG) is None:
        others = kept_models(store)
        mend = f"import it with tiered import, or open it with from_pretrained({FROM_FOLDER}"
        if others and not any(key.startswith(f"{name}/") for key in store):
            mend = f"there {'is' if len(others) == 1 else 'are'} {', '.join(map(repr, others))}"
        raise MisuseError(f"{store} keeps no {CONFIG} of a model named {name!r}: {mend}")
    try:
        opening = json.loads(contents)
    except (ValueError, RecursionError):
        opening = None
    if not isinstance(opening, dict) or not all(isinstance(value, str) for value in opening.values()):
        raise ManifestError(f"{key_of_file(name, OPENING)} in {store} is damaged: it is no JSON object of strings")
    return opening


@contextmanager
def kept_folder(store: TieredStore, name: str) -> Iterator[Path]:
    """Have the files of the model ``name`` in a folder, for a block of code: ``AutoTokenizer.from_pretrained(folder)``."""
    opening_of(store, name)
    with tempfile.TemporaryDirectory(prefix="tiered-") as made:
        folder = Path(made)
        for file in FILES:
            contents = kept_file(store, name, file)
            if contents is not None:
                (folder / file).write_bytes(contents)
        yield folder


def kept_caches(keys: Iterable[str]) -> list[str]:
    """Return the names of the caches of keys and values that are kept in a store with these keys."""
    return sorted(key.removesuffix(CACHE_RECORD) for key in keys if key.endswith(CACHE_RECORD))


def refuse_no_cache(store: TieredStore, name: str) -> None:
    """Raise MisuseError where no cache of this name is kept."""
    if f"{name}{CACHE_RECORD}" not in store:
        names = ", ".join(map(repr, kept_caches(store))) or "none"
        raise MisuseError(f"{store} keeps no conversation named {name!r} (there are: {names})")


def forget_cache(store: TieredStore, name: str) -> None:
    """Delete a kept cache, which is not open. Nothing is committed. Raises MisuseError where there is none."""
    refuse_no_cache(store, name)
    owner = Owner("cache", name)
    store.claim(owner)
    store.delete_owned(owner)
