"""The processes that ``tiered train`` runs in: one, or as many ranks as torchrun started.

Ranks end what they do together at the same place: a step that one of them was asked to stop in is left by all of them, what
one of them cannot begin none of them begins, and of what went wrong each thing is told once.
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
from typing import Any, NoReturn, Protocol

import msgspec
import torch

from tiered import RankError, TieredStore, zero
from tiered.cli.arguments import Launched
from tiered.cli.stop import StopNoted, StopRequest
from tiered.zero.collectives import Ranks
from tiered.zero.rank_stores import shared_json

__all__ = ["One", "Peers", "Several", "joined"]

PATIENCE = 5.0
"""Seconds that a rank has to tell what went wrong."""
ANSWER = 2.0
"""Seconds that the store in which the ranks met has for an answer: what it runs in may be what was lost."""
SIGNUMS = frozenset(map(int, signal.valid_signals()))
STAGES: dict[int, zero.Stage] = {1: zero.Stage1(), 2: zero.Stage2(), 3: zero.Stage3()}


class Peers(Protocol):
    """``launched``: as which of how many."""

    launched: Launched

    def open(self, folder: str, **options: Any) -> TieredStore:
        """This process's store."""
        ...

    def staged(self, stage: int) -> dict[str, Any]:
        """Arguments of ``zero.page``."""
        ...

    def disk_share(self, stage: int) -> float:
        """Of 16 bytes for each parameter: what is kept on this node."""
        ...

    def clock(self) -> float:
        """Seconds, the same for all until the next ``agree``."""
        ...

    def agree(self, loss: torch.Tensor) -> float:
        """The mean over all. Raises StopNoted, with several on all, where one was asked to stop."""
        ...

    def together(self, but: type[Exception] | None = None) -> AbstractContextManager[None]:
        """What one fails with in this block ends all of them, and the first that fails tells; but ``but``, where all fail so,
        all raise."""
        ...

    def said(self, value: Any, kind: Any) -> list[Any]:
        """Everybody's ``value``, which is JSON, each as a ``kind``."""
        ...

    def watch(self, stop: StopRequest) -> None:
        """From here on its request is what ``agree`` and ``check`` are about."""
        ...

    def start(self) -> None:
        """The clock, at 0."""
        ...

    def check(self) -> None:
        """Raises what ``stop.check`` does, where this one can leave alone."""
        ...

    def check_together(self) -> None:
        """The same on all."""
        ...


class One:
    """Nobody else."""

    def __init__(self) -> None:
        self.launched = Launched()
        self._stop: StopRequest | None = None

    def open(self, folder: str, **options: Any) -> TieredStore:
        return TieredStore.open(folder, **options)

    def staged(self, stage: int) -> dict[str, Any]:
        return {}

    def disk_share(self, stage: int) -> float:
        return 1.0

    def clock(self) -> float:
        return time.monotonic()

    def agree(self, loss: torch.Tensor) -> float:
        return float(loss.item())

    def together(self, but: type[Exception] | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def said(self, value: Any, kind: Any) -> list[Any]:
        return [msgspec.convert(value, kind)]

    def watch(self, stop: StopRequest) -> None:
        self._stop = stop

    def start(self) -> None: ...

    def check(self) -> None:
        if self._stop is not None:
            self._stop.check()

    def check_together(self) -> None:
        self.check()


class _How(IntEnum):
    """A rank came to the end of ``together``. EXCEPTED: with what all may raise."""

    FAILED = 0
    FINE = 1
    EXCEPTED = 2


class Several:
    """Ranks of the default process group. That one was asked to stop, all see in ``agree``; no rank leaves a step alone."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        self._ranks = Ranks.of(None)
        self._began, self._now = time.monotonic(), 0.0
        self._stop: StopRequest | None = None

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
        mine = torch.tensor([loss.item(), signum, time.monotonic() - self._began], dtype=torch.float64)
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
        said = self._ranks.all_gather(torch.tensor([how]), "whether all can begin (one that cannot says why)")
        try:
            return [_How(one) for one in said.view(-1).tolist()]
        except ValueError as error:
            raise RankError(f"a rank says what no rank of this release says: {error}") from error

    def said(self, value: Any, kind: Any) -> list[Any]:
        return shared_json(self._ranks, value, kind)

    def watch(self, stop: StopRequest) -> None:
        self._stop = stop

    def start(self) -> None:
        self._began = time.monotonic()

    def check(self) -> None: ...

    def check_together(self) -> None:
        signum = self._stop.signum if self._stop is not None else 0
        self._leave_together(self._ranks.all_gather(torch.tensor([signum]), "whether to stop"))

    def _leave_together(self, signums: torch.Tensor) -> None:
        signum = float(signums.amax())
        if signum:
            if signum not in SIGNUMS:
                raise RankError(f"a rank says that it was asked to stop by signal {signum:g}, which there is not")
            raise StopNoted(int(signum))


@contextmanager
def joined(launched: Launched, timeout: float) -> Iterator[Peers]:
    """Those that torchrun started. ``timeout``: seconds that a rank waits for the others. Raises RankError where they do not
    come together, and SystemExit in the place of an error that another rank tells."""
    if launched.ranks == 1:
        yield One()
        return
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    try:
        # torchrun keeps its store from one start to the next, with the addresses of ranks that are no more
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        own = dist.distributed_c10d.PrefixStore(f"start {launched.restarts}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise RankError(f"the {launched.ranks} ranks did not come together within {timeout:g} s: {error}") from error
    peers = Several(launched)
    try:
        yield peers
    except Exception as error:
        if not _is_to_be_told(error):
            _end_silently()
        raise
    dist.destroy_process_group()


def _end_silently() -> NoReturn:
    """Another rank tells; torchrun ends all as soon as one has ended."""
    time.sleep(PATIENCE)
    raise SystemExit(1) from None


def _is_to_be_told(error: Exception) -> bool:
    """What several ranks say in the same words, one tells; that a rank is lost is told unless that rank says why. Where the
    store in which the ranks met does not say, each tells: it blocks without a limit when its host or process is lost."""
    import torch.distributed as dist

    first: list[bool] = []

    def ask() -> None:
        with suppress(RuntimeError, ValueError):  # the store was rank 0's, which has ended
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
