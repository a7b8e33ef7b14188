"""An import that is under way: which units of a model are in the store, so that one that was stopped goes on with the others.

Units are filled in their order. While that goes on, the store is committed every few seconds, with a record below
``NAME/files/`` that says how many units there are and what they were made of. The last commit takes the record away.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from torch import nn

from tiered.errors import ManifestError, MisuseError, TieredError
from tiered.integrations.kept import UNFINISHED, kept_file, put_file
from tiered.packing.form import Loss
from tiered.store import TieredStore
from tiered.system import refuse_little_disk
from tiered.types import format_size
from tiered.zero.construction.deferred import Deferred
from tiered.zero.page import Replacement, differing
from tiered.zero.paging.storage import model_named
from tiered.zero.paging.units import ModelPlan, UnitPlan

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Import", "ImportRecord", "ImportSource", "Told", "begun", "files_in", "unit_of"]

Told = Callable[[str, float], None]
UNIT, LEAST_UNIT, UNITS = 32 << 20, 256 << 10, 32
"""Bytes of the largest unit of an imported model: enough for a drive's full rate, and small beside the memory of a reader. A
model of less than ``UNITS`` of these has smaller ones, so that a reader needs about a tenth of it; but a store has memory for
three of ``LEAST_UNIT`` in any case."""

COMMIT_SECONDS = 5.0
"""After so many seconds what is in the store is committed. A commit runs beside the reading of what comes next."""


def unit_of(model: nn.Module) -> int:
    """Return the bytes of the largest unit of ``model`` where an import is not given any."""
    weights = sum(parameter.numel() * parameter.dtype.itemsize for parameter in model.parameters())
    return min(UNIT, max(LEAST_UNIT, weights // UNITS // 4096 * 4096))


class ImportSource(msgspec.Struct, frozen=True):
    """What a model is imported from. ``files``: size in bytes, and time of the last change in nanoseconds, by name;
    ``options``: what else its values and units depend on."""

    files: dict[str, tuple[int, int]]
    options: dict[str, str]

    def refuse_other(self, begun: ImportSource, whose: str) -> None:
        """Raise MisuseError where an import that was ``begun`` is not from here. ``whose``: names it."""
        mend = "import from what it was begun with, or give existing='overwrite' to begin anew"
        for file in sorted(self.files.keys() | begun.files.keys()):
            if self.files.get(file) != begun.files.get(file):
                raise MisuseError(f"{whose} is not finished, and {file!r} is not what it was begun with: {mend}")
        for option in sorted(self.options.keys() | begun.options.keys()):
            if self.options.get(option) != begun.options.get(option):
                was, now = (_worded(option, one.options.get(option)) for one in (begun, self))
                raise MisuseError(f"{whose} is not finished, and was begun with {was}, not {now}: {mend}")


def _worded(option: str, value: str | None) -> str:
    """Say a value that an import depends on as its users do."""
    if option == "policy":
        packed = re.search(r"quantize='(\w+)'", str(value))
        stored = re.search(r"storage=torch\.(\w+)", str(value))
        if packed:
            return f"weights packed as {packed[1]}"
        return f"weights stored as {stored[1]}" if stored else "weights as they are"
    if option != "largest_unit":
        return f"{option} {value}"
    return "units of the size that the model gives" if value in (None, "None") else f"units of {format_size(int(value))}"


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of the last change of the files that a model's values come from, by name. A file is one itself."""
    patterns = "*.safetensors", "*.safetensors.index.json", "config.json"
    found = [folder] if folder.is_file() else [path for pattern in patterns for path in folder.glob(pattern)]
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


class ImportRecord(msgspec.Struct, frozen=True):
    """What the store keeps of an import that is not finished.

    ``layout``: a digest of the units, ``unit``: their limit in bytes. ``done``: how many of them are in the store, of
    ``nbytes`` bytes, of ``total``. ``losses``: of quantised parameters by name, see ``Loss``.
    """

    source: ImportSource
    layout: str
    unit: int
    done: int
    nbytes: int
    total: int
    losses: dict[str, tuple[float, float]]


def begun(store: TieredStore, name: str) -> ImportRecord | None:
    """Return what ``store`` keeps of an import of the model ``name`` that is not finished; None where there is none. Raises
    ManifestError for a damaged record."""
    contents = kept_file(store, name, UNFINISHED)
    if contents is None:
        return None
    try:
        return msgspec.json.decode(contents, type=ImportRecord)
    except ValueError as error:
        raise ManifestError(
            f"{name}/files/{UNFINISHED} in {store} is damaged ({error}): give existing='overwrite'"
        ) from None


class Import:
    """One import into a store, from its first unit or the first that is missing: what ``zero.page`` calls as it fills units.

    ``goes_on``: the record of an earlier one that was stopped. ``over``: a finished model, which stays as it is until the new
    one is committed: its units are filled under another name meanwhile. ``commits``: whether to commit on the way.
    """

    def __init__(
        self,
        store: TieredStore,
        name: str,
        source: ImportSource,
        *,
        goes_on: ImportRecord | None,
        over: Literal["nothing", "finished"],
        commits: bool,
        verify: bool,
        told: Told | None,
    ) -> None:
        self._store, self._name, self._source, self._told = store, name, source, told
        self._goes_on, self._commits, self._verifies, self._over = goes_on, commits, verify, over
        self._model, self._replacement = model_named(name), Replacement(store, name)
        self.owner = self._model if over == "nothing" else self._replacement.owner
        self._plan: ModelPlan | None = None
        self._deferred: Mapping[nn.Parameter, Deferred] = {}
        self._layout = ""
        self._done = self._nbytes = self._total = 0
        self._losses: dict[str, tuple[float, float]] = {}
        self._committed = time.monotonic()
        self._commit: Future[int] | None = None
        self._on_disk = goes_on is not None  # a commit has a record of this import

    def begin(self, plan: ModelPlan, deferred: Mapping[nn.Parameter, Deferred], held: Sequence[str]) -> int:
        self._replacement.begin()
        self._total = sum(unit.stored_nbytes for unit in plan.units)
        self._layout = _digest(plan)
        goes_on = self._goes_on
        stays: set[str] = set()
        if goes_on is not None:
            if goes_on.layout != self._layout:
                raise MisuseError(
                    f"the import of model {self._name!r} into {self._store} was begun with other units, of at most "
                    f"{goes_on.unit:,} bytes: open the store with at least {8 * goes_on.unit:,} bytes of memory (--dram), or "
                    "give existing='overwrite' to begin anew"
                )
            self._losses = dict(goes_on.losses)
            for unit in plan.units[: goes_on.done]:
                key = self._key(unit)
                if key not in self._store or self._store.spec(key).nbytes != unit.stored_nbytes:
                    break
                stays.add(key)
                self._count(unit)
                for placement in unit.placements:
                    if placement.name in self._losses:
                        placement.loss = Loss(*self._losses[placement.name])
        refuse_little_disk(self._store, f"the import of model {self._name!r}", self._total - self._nbytes)
        for key in held if self._over == "nothing" else ():  # of one that was stopped
            if key not in stays:
                self._store.delete(key, owner=self.owner)
        self._plan, self._deferred = plan, deferred
        return self._done

    def filled(self, unit: UnitPlan) -> None:
        self._count(unit)
        for placement in unit.placements:
            if placement.loss is not None:
                self._losses[placement.name] = (placement.loss.error, placement.loss.given)
        if self._commits and time.monotonic() - self._committed >= COMMIT_SECONDS:
            self._wait_for_commit()
            self._note()
            self._commit = self._store.commit_async()
            self._committed, self._on_disk = time.monotonic(), True
        self._tell("imported", self._nbytes)

    def whole(self) -> None:
        if self._verifies:
            self.verify()
        if self._over == "finished":
            self._replacement.exchange()

    def verify(self) -> None:
        """Read all units from the disk, compute their values again from the files, and compare them.

        Raises TieredError where they differ, after which the import begins anew; what the store raises for a checksum that is
        wrong, and what reading the files raises.
        """
        assert self._plan is not None
        units = self._plan.units
        self._store.offload([self._key(unit) for unit in units])
        done = 0
        for number, unit in enumerate(units):
            with self._store.lease(self._key(unit), tier="dram") as memory:
                wrong = differing(unit, memory, self._deferred)
                del memory
            if wrong is not None:
                self._done = number
                raise TieredError(
                    f"the values of {wrong!r} in {self._store} are not those in the files, which are read twice to compare "
                    "them: the import goes on from there when it is run again; if this repeats, test the memory and the drives"
                )
            done += unit.stored_nbytes
            self._tell("verified", done)

    def complete(self, folder: Path) -> None:
        """End the record of the import; the next commit is that of the whole model. Raises MisuseError for files that were
        changed meanwhile."""
        self._wait_for_commit()
        now = files_in(folder)
        for file in sorted(now.keys() | self._source.files.keys()):
            if now.get(file) != self._source.files.get(file):
                changed = folder if folder.name == file else folder / file
                raise MisuseError(
                    f"{changed} was changed while it was imported: import again, with existing='overwrite' "
                    "(--existing overwrite)"
                )
        key = f"{self._name}/files/{UNFINISHED}"
        if key in self._store:
            self._store.delete(key, owner=self._model)

    def committed(self) -> None:
        """Note that the model is committed: what it replaced goes."""
        self._plan = None  # nothing is left to be undone
        if self._replacement.end():
            self._store.commit()

    def stop(self, error: BaseException) -> None:
        """Commit what is there of an import that ends early by ``error``, so that another one goes on. Where there is nothing,
        this one does not commit on the way, or a MisuseError says that it cannot be completed, delete it. Errors of the store
        are not raised: the commit before holds."""
        if self._plan is None:
            return  # nothing changed
        with suppress(TieredError):
            self._wait_for_commit()
        with suppress(TieredError):
            if self._over == "finished":
                self._replacement.undo()
            elif self._on_disk or (self._commits and self._done and not isinstance(error, MisuseError)):
                self._note()
                self._store.commit()
            else:
                self._store.delete_owned(self.owner)

    def _wait_for_commit(self) -> None:
        commit, self._commit = self._commit, None
        if commit is not None:
            commit.result()

    def _note(self) -> None:
        assert self._plan is not None
        record = ImportRecord(
            *(self._source, self._layout, self._plan.limits.unit, self._done, self._nbytes, self._total), losses=self._losses
        )
        put_file(self._store, self._name, UNFINISHED, msgspec.json.encode(record))

    def _count(self, unit: UnitPlan) -> None:
        self._done += 1
        self._nbytes += unit.stored_nbytes

    def _tell(self, what: str, nbytes: int) -> None:
        if self._told is not None:
            self._told(f"{what} {format_size(nbytes)} of {format_size(self._total)}", nbytes / max(1, self._total))

    def _key(self, unit: UnitPlan) -> str:
        return f"{self.owner.name}/param/{unit.name}"


def _digest(plan: ModelPlan) -> str:
    """Return a digest of where everything lies."""
    described = [
        [
            [unit.name, unit.stored_nbytes],
            [[p.name, list(p.shape), str(p.dtype), p.form, list(p.stride), p.stored_offset] for p in unit.placements],
        ]
        for unit in plan.units
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()
