"""The processes of ``tiered train``: one, or as many ranks as torchrun started.

Ranks act together. When one rank is asked to stop, all leave the same step. When one rank cannot start, none starts. Each error
is printed once.
"""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any, NoReturn

import msgspec
import torch

from tiered import RankError, TieredStore, zero
from tiered.cli.arguments import Launched
from tiered.cli.stop import StopNoted, StopRequest
from tiered.zero.collectives import Ranks
from tiered.zero.rank_stores import shared_json

__all__ = ["Peers", "RankGroup", "joined"]

PATIENCE = 5.0
"""Seconds that a silent rank leaves to the rank that prints the error."""
ANSWER = 2.0
"""Seconds to wait for an answer of torch's rendezvous store, because its own process may be the one that was lost."""
SIGNUMS = frozenset(map(int, signal.valid_signals()))
STAGES: dict[int, zero.Stage] = {1: zero.Stage1(), 2: zero.Stage2(), 3: zero.Stage3()}


class Peers:
    """What a training needs of the other ranks; these are the peers of a process that trains alone. ``launched``: the number of
    this rank, and of all."""

    def __init__(self, launched: Launched | None = None) -> None:
        self.launched = Launched() if launched is None else launched
        self._stop: StopRequest | None = None

    def open(self, folder: str, **options: Any) -> TieredStore:
        """Open this rank's store."""
        return TieredStore.open(folder, **options)

    def staged(self, stage: int) -> dict[str, Any]:
        """Return the arguments of ``zero.page`` for ``stage``."""
        return {}

    def disk_share(self, stage: int) -> float:
        """Return the share of the 16 bytes per parameter that the ranks of this node keep."""
        return 1.0

    def clock(self) -> float:
        """Return seconds, which are the same on all ranks until the next ``agree``."""
        return time.monotonic()

    def agree(self, loss: torch.Tensor) -> float:
        """Return the mean loss over all ranks. Raises StopNoted, on all ranks, where one rank was asked to stop."""
        return float(loss.item())

    def together(self, but: type[Exception] | None = None) -> AbstractContextManager[None]:
        """End all ranks where one rank fails in this block; the first failing rank prints. All ranks raise an exception of type
        ``but`` where all of them fail with it."""
        return nullcontext()

    def said(self, value: Any, kind: Any) -> list[Any]:
        """Return the JSON ``value`` of every rank, each converted to ``kind``."""
        return [msgspec.convert(value, kind)]

    def watch(self, stop: StopRequest) -> None:
        """Make ``agree`` and ``check`` look at ``stop`` from now on."""
        self._stop = stop

    def start(self) -> None:
        """Start the clock at 0."""

    def check(self) -> None:
        """Raise as ``stop.check`` does where this rank may leave without the others."""
        if self._stop is not None:
            self._stop.check()

    def check_together(self) -> None:
        """Raise StopNoted on all ranks where one of them was asked to stop."""
        self.check()


class _How(IntEnum):
    """How a rank left ``together``. EXCEPTED: with the exception that all may raise."""

    FAILED = 0
    FINE = 1
    EXCEPTED = 2


class RankGroup(Peers):
    """Peers in the default process group. All ranks learn in ``agree`` that one was asked to stop; none leaves a step alone."""

    def __init__(self, launched: Launched) -> None:
        super().__init__(launched)
        self._ranks = Ranks.of(None)
        self._began, self._now = time.monotonic(), 0.0

    def open(self, folder: str, **options: Any) -> TieredStore:
        return zero.open_store(folder, **options)

    def staged(self, stage: int) -> dict[str, Any]:
        return {"stage": STAGES[stage]}

    def disk_share(self, stage: int) -> float:
        ranks = self.launched.ranks
        everywhere = {1: 8, 2: 4, 3: 0}[stage]  # bytes: parameters, and with stage 1 gradients
        return self.launched.here * (everywhere + (16 - everywhere) / ranks) / 16

    def clock(self) -> float:
        return self._now

    def agree(self, loss: torch.Tensor) -> float:
        signum = self._stop.signum if self._stop is not None else 0
        mine = torch.tensor([loss.item(), signum, time.monotonic() - self._began], dtype=torch.float64, device="cpu")
        said = self._ranks.all_gather(mine, "the loss")
        self._now = float(said[0, 2])
        self._leave_together(said[:, 1])
        return float(said[:, 0].mean())

    @contextmanager
    def together(self, but: type[Exception] | None = None) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            with suppress(RankError):
                how = _How.EXCEPTED if but is not None and isinstance(error, but) else _How.FAILED
                said = self._everybody(how)
                if set(said) != {_How.EXCEPTED} and set(said[: self.launched.rank]) - {_How.FINE}:
                    _end_silently()
            raise
        if set(self._everybody(_How.FINE)) != {_How.FINE}:
            _end_silently()

    def _everybody(self, how: _How) -> list[_How]:
        mine = torch.tensor([how], dtype=torch.int64, device="cpu")
        said = self._ranks.all_gather(mine, "whether all can start (a rank that cannot prints why)")
        try:
            return [_How(one) for one in said.view(-1).tolist()]
        except ValueError as error:
            raise RankError(f"a rank sent a value that no rank of this release sends: {error}") from error

    def said(self, value: Any, kind: Any) -> list[Any]:
        return shared_json(self._ranks, value, kind)

    def start(self) -> None:
        self._began = time.monotonic()

    def check(self) -> None: ...

    def check_together(self) -> None:
        signum = self._stop.signum if self._stop is not None else 0
        self._leave_together(self._ranks.all_gather(torch.tensor([signum], dtype=torch.int64, device="cpu"), "whether to stop"))

    def _leave_together(self, signums: torch.Tensor) -> None:
        signum = float(signums.amax())
        if signum:
            if signum not in SIGNUMS:
                raise RankError(f"a rank was asked to stop by signal {signum:g}, which does not exist")
            raise StopNoted(int(signum))


@contextmanager
def joined(launched: Launched, timeout: float) -> Iterator[Peers]:
    """Join the ranks that torchrun started. ``timeout``: seconds that a rank waits for the others.

    Raises RankError where they do not meet in time, and SystemExit in the place of an error that another rank prints."""
    if launched.ranks == 1:
        yield Peers()
        return
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    try:
        # torchrun keeps its store over restarts, with the addresses of ranks that have ended
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        own = dist.distributed_c10d.PrefixStore(f"start {launched.restarts}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise RankError(f"the {launched.ranks} ranks did not meet within {timeout:g} s: {error}") from error
    peers = RankGroup(launched)
    try:
        yield peers
    except Exception as error:
        if not _is_to_be_printed(error):
            _end_silently()
        raise
    dist.destroy_process_group()


def _end_silently() -> NoReturn:
    """Exit without a message, because another rank prints it. Waits first: torchrun ends all ranks when one has ended."""
    time.sleep(PATIENCE)
    raise SystemExit(1) from None


def _is_to_be_printed(error: Exception) -> bool:
    """Whether this rank prints ``error``: of several ranks with the same error one does, and the loss of a rank is printed only
    where that rank does not print why.

    The ranks agree through torch's rendezvous store. Where it does not answer in time, as when its process was lost, every rank
    prints."""
    import torch.distributed as dist

    first: list[bool] = []

    def ask() -> None:
        with suppress(RuntimeError, ValueError):  # rank 0, whose store it was, has ended
            store = dist.distributed_c10d._get_default_store()
            if isinstance(error, RankError):
                first.append(store.add("tiered/told", 1) == 1)
            else:
                first.append(store.add(f"tiered/told/{hashlib.sha256(str(error).encode()).hexdigest()}", 1) == 1)
                store.add("tiered/told", 1)

    asking = threading.Thread(target=ask, name="tiered-told", daemon=True)
    asking.start()
    asking.join(ANSWER)
    return first[0] if first else True
