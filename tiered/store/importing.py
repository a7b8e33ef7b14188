"""Import of safetensors files into a store, tensor by tensor, read directly into the store's memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

from tiered.errors import MisuseError, TieredError, expect_type, one_of, path_of, shown
from tiered.format.safetensors import WeightFiles
from tiered.store.store import TieredStore
from tiered.system import refuse_little_disk
from tiered.tensors.specs import flat
from tiered.types import Access, Owner

__all__ = ["import_safetensors"]

AT_ONCE = 4 << 20
"""Bytes between two calls of ``progress``."""
IMPORT = Owner("import", "tiered.import")
"""The owner of a tensor that is read, and of one that it replaces, until they change places."""


def import_safetensors(
    store: TieredStore,
    path: str | os.PathLike[str],
    *,
    existing: Literal["refuse", "overwrite"] = "refuse",
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Put the tensors of ``path`` into ``store`` under their names, and return their number; nothing is committed.

    ``path`` is a file, or a folder in Hugging Face's layout (several files with an index). No memory is taken beside the
    store's own. ``existing``: whether to refuse or overwrite tensors of the same names. ``progress`` is called with the bytes
    so far and in all; it may raise, to stop. After an exception the tensors imported so far stay, and one that was not read
    whole is what it was before.

    Raises MisuseError (no such file, names that are taken, or belong to a model or a table), SafetensorsError (damaged),
    CapacityError (larger than what the bottom tier has free; nothing is imported then), and what ``store.create`` raises.
    """
    expect_type(store, TieredStore, "tensors are imported into a TieredStore")
    path = path_of(path, "the path of safetensors files")
    one_of("existing", existing, ("refuse", "overwrite"))
    try:
        with WeightFiles(path) as files:
            taken = [name for name in files.entries if name in store]
            if taken and existing == "refuse":
                raise MisuseError(
                    f"{store} already has a tensor named {taken[0]!r} ({len(taken)} of {len(files.entries)} names are taken): "
                    "import into another store, or with existing='overwrite'"
                )
            for name in taken:
                if store.owner_of(name) is not None:
                    raise MisuseError(
                        f"tensor {name!r} in {store} belongs to {store.owner_of(name)}, which alone replaces it: import into "
                        "another store"
                    )
            done, total = 0, sum(entry.spec.nbytes for entry in files.entries.values())
            store.delete_owned(IMPORT)  # of one that was killed
            refuse_little_disk(store, f"the import of {shown(str(path), 1000)}", total)
            for name, entry in files.entries.items():
                replaces = name in store
                key, owner = (f"{IMPORT.name}/new", IMPORT) if replaces else (name, None)
                store.create(key, entry.spec, owner=owner)
                try:
                    with store.lease(key, access=Access.WRITE, tier="dram") as tensor:
                        memory = flat(tensor).numpy().data
                        try:
                            for start in range(0, entry.spec.nbytes, AT_ONCE):
                                files.read(name, start, memory[start : start + AT_ONCE])
                                done += min(AT_ONCE, entry.spec.nbytes - start)
                                if progress is not None:
                                    progress(done, total)
                        finally:
                            del memory, tensor  # a traceback must not keep the memory alive
                    if replaces:
                        old = f"{IMPORT.name}/old"
                        store.rename_many([(name, None, old, IMPORT), (key, IMPORT, name, None)])
                        store.delete(old, owner=IMPORT)
                except BaseException:
                    if key in store and store.owner_of(key) == owner:
                        store.delete(key, owner=owner)  # it is incomplete
                    raise
            return len(files.entries)
    except OSError as error:
        raise TieredError(f"cannot read {error.filename or path}: {error.strerror} (errno {error.errno})") from error
