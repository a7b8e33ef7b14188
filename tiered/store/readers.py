"""One committed generation read by several processes: a handle that can be pickled, and a data set for DataLoader workers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import util
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import Dataset

from tiered.errors import CapacityError, KeyNotFound, MisuseError, TieredError, from_here, shown
from tiered.format.generations import fingerprint, generations
from tiered.store.at_rest import StoreAtRest
from tiered.store.opening import SMALLEST_DRAM, budget_of
from tiered.tensors.specs import listed, refuse_keys
from tiered.types import Key

__all__ = ["StoreReader", "TieredDataset"]

SMALLEST_BUDGET = 64 << 20
LARGEST_IN_BUDGET = 4
"""A data set's default budget in each process: SMALLEST_BUDGET bytes, and at least so many times its largest tensor."""


class _Readable(Protocol):
    """What a data set needs of a store."""

    def get(self, key: Key) -> torch.Tensor: ...
    def get_many(self, keys: Iterable[Key]) -> list[torch.Tensor]: ...
    def close(self) -> None: ...


_Store = TypeVar("_Store", bound=_Readable)


class StoreReader(Generic[_Store]):
    """A handle on one committed generation of a store, which other processes can open: made by ``TieredStore.reader``.

    The process that made the handle keeps the generation pinned until the handle is closed or no longer referred to. What is
    pickled is the store's folder, and which generation it is; so a handle can be given to processes that are forked or
    spawned, and each opens a store of its own.
    """

    def __init__(
        self, opening: Callable[..., _Store], folder: str, paths: tuple[str, ...] | None, generation: int, mark: str = ""
    ) -> None:
        self.folder, self.paths, self.generation = folder, paths, generation
        """The store's folder, the folders of its data files (None: the same), and the number of the generation."""
        self._opening, self._mark = opening, mark
        self._pinned_by = 0
        self._letting_go: Callable[[], object] | None = None

    def pin(self) -> StoreReader[_Store]:
        """Have this process keep the generation; return the handle. Raises as opening the store does."""
        try:
            rest = StoreAtRest(self.folder, paths=self.paths, generation=self.generation)
        except OSError as error:
            where = error.filename or self.folder
            raise TieredError(f"cannot read {where}: {error.strerror} (errno {error.errno})") from error
        rest.forget_records()
        self._mark = fingerprint(self.folder, self.generation)
        self._letting_go = weakref.finalize(self, rest.close)
        self._pinned_by = os.getpid()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreReader, (self._opening, self.folder, self.paths, self.generation, self._mark)

    def __repr__(self) -> str:
        pinned = f"pinned by process {self._pinned_by}" if self._pinned_by else "not pinned by this process"
        return f"<StoreReader: generation {self.generation} of the store in {shown(self.folder)}, {pinned}>"

    @from_here
    def open(self, **options: Any) -> _Store:
        """Open the generation for reading, in this process: ``TieredStore.open(..., access="read")``, with ``options`` such as
        ``dram``, ``hbm`` and ``backend``.

        Raises as that does; MisuseError where the generation is gone, because no process keeps it any more, and where another
        one has its place or number by now.
        """
        given = {"access", "generation", "paths", "path", "durability", "nvme"} & options.keys()
        if given:
            raise MisuseError(f"a handle says itself what to open: leave {', '.join(sorted(given))} out")
        try:
            store = self._opening(self.folder, access="read", generation=self.generation, paths=self.paths, **options)
        except MisuseError as error:
            if not os.path.isdir(self.folder) or self.generation in generations(self.folder):
                raise
            kept = "a handle keeps its generation until the process that made it closes it or ends"
            raise MisuseError(f"{error} ({kept})") from error
        if fingerprint(self.folder, self.generation) != self._mark:
            store.close()
            here = f"generation {self.generation} in {self.folder}"
            raise MisuseError(f"{here} is not the one of this handle any more: make a new one")
        return store

    def close(self) -> None:
        """Let the generation go; what this process, or another one, has opened stays open. Idempotent."""
        if self._letting_go is not None:
            self._letting_go()
        self._pinned_by = 0

    def __enter__(self) -> StoreReader[_Store]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Source(Protocol):
    """A store, open for reading or writing."""

    def reader(self) -> StoreReader[Any]: ...


Sample = Key | Mapping[str, Key]


class TieredDataset(Dataset[Any]):
    """A data set over one committed generation of a store, for ``torch.utils.data.DataLoader`` with workers or without.

    Each process, also the one that made it, opens a store of its own when it asks for the first sample. A worker may be forked
    or spawned. All see the same generation, whatever is committed meanwhile.
    """

    def __init__(
        self,
        source: StoreReader[Any] | _Source,
        samples: Sequence[Sample] | None = None,
        *,
        small: str | None = None,
        dram: int | str | None = None,
        transform: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        """Make a data set of ``samples``: a list of keys, or of dicts of keys; by default all keys, sorted.

        Sample number i is the tensor of that key, or a dict of the tensors: ``samples=[{"image": "x0", "label": "y0"}, ...]``
        gives ``{"image": tensor, "label": tensor}``. They are copies in ordinary memory. ``small``: the keys are those of small
        tensors of that name (``TieredStore.small``), not of the store. ``transform`` is called with each sample. ``source`` is
        an open store, or a handle that ``store.reader()`` gave, which then has to stay open as long as workers may start.
        ``dram`` is the budget of the pool in each process (default: 64 MiB, or four times the largest tensor); ``options`` are
        others of ``TieredStore.open``.

        Raises KeyNotFound for a key that the generation lacks, CapacityError for a ``dram`` that is too small for a tensor, and
        MisuseError.
        """
        if not isinstance(source, StoreReader) and not hasattr(source, "reader"):
            raise MisuseError(f"a data set reads an open store, or what store.reader() gives, not {shown(repr(source))}")
        self._reader = source if isinstance(source, StoreReader) else source.reader()
        if isinstance(samples, str | Mapping):
            raise MisuseError("samples is a list, of keys or of dicts of keys")
        self._small = small
        self._samples: list[Sample] = [] if samples is None else list(samples)
        for sample in self._samples:
            refuse_keys(listed(_keys_of(sample)))
        budget = None if dram is None else budget_of("a DRAM", dram, SMALLEST_DRAM)  # here, and not first in a worker
        largest = self._look(samples is None, budget) if small is None else 0
        self._options = {"dram": max(SMALLEST_BUDGET, LARGEST_IN_BUDGET * largest) if dram is None else dram, **options}
        if small is not None:
            self._look_at_small(small, samples is None)
        self._transform = transform
        self._opened: tuple[int, Any, Callable[[], object]] | None = None

    def _look(self, take_all: bool, budget: int | None) -> int:
        """Look for all samples, or take all keys for samples; return the bytes of the largest tensor. Raises CapacityError
        where a pool of ``budget`` bytes has no room for one."""
        largest = 0
        with StoreAtRest(self._reader.folder, paths=self._reader.paths, generation=self._reader.generation) as rest:
            if take_all:
                self._samples = [*sorted(rest)]
            for sample in self._samples:
                for key in _keys_of(sample):
                    nbytes = rest.spec(key).nbytes
                    largest = max(largest, nbytes)
                    room = -(-nbytes // rest.disk.alignment) * rest.disk.alignment
                    if budget is not None and room > budget:
                        raise CapacityError(
                            f"{key!r} needs {room:,} bytes, and the pool of each process has dram={budget:,} bytes: "
                            f"give the data set at least that, better {LARGEST_IN_BUDGET} times as much"
                        )
        return largest

    def _look_at_small(self, name: str, take_all: bool) -> None:
        with self._reader.open(**self._options) as store:
            there = set(store.small(name))
        if take_all:
            self._samples = [*sorted(there)]
        for sample in self._samples:
            for key in _keys_of(sample):
                if key not in there:
                    said = f"there is no tensor {key!r} among the small tensors {name!r} in {self._reader.folder}"
                    raise KeyNotFound(said, key, there)

    @property
    def generation(self) -> int:
        """Number of the generation that all samples are of."""
        return self._reader.generation

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``. Raises IndexError, and what ``TieredStore.get`` and ``StoreReader.open`` raise."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples, whose tensors are read together. DataLoader calls this with the indices of a batch."""
        try:
            chosen = [self._samples[index] for index in indices]
        except IndexError:
            there = len(self._samples)
            wrong = next(index for index in indices if not -there <= index < there)
            raise IndexError(f"there is no sample {wrong}: the data set has {there}, numbered from 0 on") from None
        found = iter(self._tensors().get_many([key for sample in chosen for key in _keys_of(sample)]))
        samples = [next(found) if isinstance(one, str) else {name: next(found) for name in one} for one in chosen]
        return samples if self._transform is None else [self._transform(sample) for sample in samples]

    def _tensors(self) -> Any:
        """Return this process's own store, or small tensors of it. What a forked process has inherited is its parent's."""
        process = os.getpid()
        if self._opened is None or self._opened[0] != process:
            store = self._reader.open(**self._options)
            closing = util.Finalize(self, store.close, exitpriority=100)  # a worker process ends without collecting garbage
            self._opened = process, store if self._small is None else store.small(self._small), closing
        return self._opened[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def close(self) -> None:
        """Close this process's store; another sample opens it again. The generation stays pinned. Idempotent."""
        if self._opened is not None and self._opened[0] == os.getpid():
            self._opened[2]()
        self._opened = None


def _keys_of(sample: Sample) -> list[Key]:
    return [sample] if isinstance(sample, str) else list(sample.values())
