"""Models of the Hugging Face hub by their name, ``org/name``: only the files that are needed are fetched, by
``huggingface_hub``, into its cache. Its environment variables act as ever: ``HF_ENDPOINT``, ``HF_HOME``, ``HF_TOKEN``,
``HF_HUB_OFFLINE``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tiered.errors import MisuseError, shown
from tiered.format.foreign.documents import json_of
from tiered.format.safetensors import INDEX, SINGLE
from tiered.integrations.kept import CONFIG, FILES

__all__ = ["folder_of", "is_hub_name"]

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
INDEX_BYTES = 64 << 20
"""Most bytes of an index."""


def is_hub_name(what: str | os.PathLike[str]) -> bool:
    """Return whether ``what`` is a name of the hub's: a text like ``org/name`` that is no file or folder here."""
    return isinstance(what, str) and NAME.fullmatch(what) is not None and not os.path.lexists(what)


def folder_of(what: str | os.PathLike[str], needed: Literal["config", "model"], file: str | None = None) -> Path:
    """Return the folder of a model: ``what`` itself, or where the files of the hub's model of that name are.

    ``needed``: its ``config.json``, or weights in safetensors files, tokenizer and all that an import keeps; or one ``file``.
    Raises MisuseError where ``huggingface_hub`` is absent or does not have the files."""
    if not is_hub_name(what):
        return Path(what)
    name = os.fspath(what)
    if file is not None:
        return _fetched(name, [file])
    if needed == "config":
        return _fetched(name, [CONFIG])
    folder = _fetched(name, [*FILES, INDEX])
    weights = [SINGLE]
    if (folder / INDEX).is_file():
        index = json_of(folder / INDEX, INDEX_BYTES)
        named = index.get("weight_map") if isinstance(index, dict) else None
        weights = sorted({str(file) for file in named.values()}) if isinstance(named, dict) else []
    return _fetched(name, weights, folder.name)


def _fetched(name: str, files: Sequence[str], revision: str | None = None) -> Path:
    """Fetch those of ``files`` that the model has and the cache lacks. Returns its folder in the cache."""
    mend = f"to get it: hf download {name} --local-dir {name.rpartition('/')[2]}, and name that folder"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    except ImportError as error:
        raise MisuseError(
            f"{name} is no folder here, and a model of the hub needs huggingface_hub: pip install '.[hf]' in a clone of tiered"
        ) from error
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except (OSError, ValueError, EntryNotFoundError, HfHubHTTPError) as error:
        said = shown(str(error.__cause__ or error).strip().partition("\n")[0], 300)
        raise MisuseError(f"{name} is no folder here, and the hub does not give it ({said}); {mend}") from error
    lacking = [file for file in files if not (folder / file).is_file()]
    if lacking and (files == [CONFIG] or revision is not None):
        raise MisuseError(f"{name} has no {lacking[0]} on the hub, or in the cache where HF_HUB_OFFLINE is set; {mend}")
    return folder
