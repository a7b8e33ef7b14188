"""A machine as numbers: rates of its drive, its memory, its processor and its network. Kept as a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tiered.errors import MisuseError, expect_type, meant, quoted, shown, whole_number
from tiered.format.foreign.documents import json_of
from tiered.planning.simulated import DriveRates
from tiered.system import to_stay_free
from tiered.types import parse_size

__all__ = ["Machine"]

FORMAT = "machine 1"
MOST_BYTES = 1 << 20
"""Of a machine's file."""
LARGEST = 2.0**80
"""Of its numbers: what is computed with them stays finite."""
SLOWEST = 1e5
"""Bytes a second: what a file or numbers say of a drive below that was meant in another unit."""
COUNTS = ("cores", "threads", "ranks_per_node")
NUMBERS = {
    **dict.fromkeys(("read", "write", "memory", "hashing", "network", "device_memory", "link"), "bytes a second"),
    **dict.fromkeys(("flops", "flops_half", "flops_half_backward", "device_flops"), "operations a second"),
    "update": "elements a second",
    **dict.fromkeys(("transfer", "operation", "lease", "gradient", "handling", "latency"), "seconds"),
    **dict.fromkeys(("dram", "base", "rated_life", "hbm"), "bytes"),
}
"""What the numbers of a machine are in, but for counts."""
MEASURE = "measure one with tiered info --machine FILE"


@dataclass(frozen=True)
class Machine:
    """What a plan needs to know of a machine: rates in bytes, operations or elements per second, others in seconds or bytes.

    ``read``, ``write``: the drive, one way at a time. ``transfer``: seconds for each tensor beside its bytes. ``dram``: bytes
    of host memory. ``flops``: floating point operations of fp32 products (``flops_half``: of bf16 ones; 0: as fp32;
    ``flops_half_backward``: of those of a backward pass, which some processors compute far slower; 0: as ``flops_half``).
    ``memory``: bytes of operands of operations that compute little, ``operation``: seconds of the smallest operation of torch.
    ``lease``: seconds of a lease and of what paging does around it; ``update``: elements that Adam updates; ``gradient``:
    seconds of storing a gradient, beside its bytes. ``hashing``: bytes that the store's thread checks, ``handling``: seconds
    that a transfer takes of it beside that; both are taken from computing where torch has as many ``threads`` as there are
    ``cores``, with a device from updates alone. ``base``: bytes of a process after its imports.
    ``hbm``: bytes of memory of a device that computes (0: the processor does); ``device_flops``, ``device_memory``: its
    operations a second, and bytes of its memory a second; ``link``: bytes a second to it, each way.
    ``network``, ``latency``: between nodes; ``ranks_per_node`` share drive, network and ``dram``, exchange by ``memory`` where
    one node has all ranks, and have a device each.
    ``rated_life``: bytes that the drive may be written in its life (0: not known).
    """

    read: float
    write: float
    transfer: float = 1e-4
    dram: int = 0
    flops: float = 1e11
    flops_half: float = 0.0
    flops_half_backward: float = 0.0
    memory: float = 1e10
    operation: float = 5e-6
    lease: float = 1.5e-4
    update: float = 5e8
    gradient: float = 1e-4
    hashing: float = 8e9
    handling: float = 2.5e-4
    cores: int = 2
    threads: int = 1
    base: int = 240 << 20
    hbm: int = 0
    device_flops: float = 3e13
    device_memory: float = 5e11
    link: float = 2e10
    network: float = 1.25e9
    latency: float = 5e-5
    ranks_per_node: int = 1
    rated_life: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            if not _is_number(value) or value < 0 or (value == 0 and _is_rate(name)):
                raise MisuseError(f"a machine's {_described(name)}, not {quoted(value)}")
        for name in COUNTS:
            whole_number(f"a machine's {name} is a count", getattr(self, name))
        expect_type(self.name, str, "a machine's name is text")

    @property
    def drive(self) -> DriveRates:
        return DriveRates(self.read, self.write, self.transfer)

    @property
    def room(self) -> int:
        """Return the bytes of host memory that processes may take: what is left of ``dram`` for the system is at least 64 MiB,
        and a sixteenth. 0 where ``dram`` is not known."""
        return max(1, self.dram - to_stay_free(self.dram)) if self.dram else 0

    @classmethod
    def of(cls, what: Machine | str | os.PathLike[str] | Mapping[str, Any]) -> Machine:
        """Return a machine from itself, from a file, or from numbers by name ("2GB" is a number of bytes, too).

        Raises MisuseError for a file that is none, and for numbers that are unknown or missing.
        """
        if isinstance(what, Machine):
            return what
        if isinstance(what, Mapping):
            return cls._from(what, "these numbers")
        expect_type(what, str | os.PathLike, "a machine is a tiered.Machine, a file, or numbers by name")
        told = shown(str(what), 1000)
        try:
            found = json_of(what, MOST_BYTES)
        except MisuseError as error:
            raise MisuseError(f"{error}; {MEASURE}") from None
        if not isinstance(found, dict) or found.pop("tiered", FORMAT) != FORMAT:
            raise MisuseError(f"{told} is no machine: {MEASURE}, or write one by hand (tiered plan --help)")
        return cls._from(found, told)

    @classmethod
    def _from(cls, found: Mapping[str, Any], where: str) -> Machine:
        known = {one.name: one.type for one in fields(cls)}
        unknown = sorted(quoted(name) if not isinstance(name, str) else shown(name) for name in found if name not in known)
        if unknown:
            near = meant(unknown[0], known) or f"; it has {', '.join(known)}"
            raise MisuseError(f"{where}: a machine has no {', '.join(unknown[:5])}{near}")
        if not {"read", "write"} <= set(found):
            raise MisuseError(f"{where}: a machine has read= and write= at least, the drive's bytes per second")
        values = dict(found)
        for name, value in found.items():
            if isinstance(value, str) and name != "name":
                try:
                    values[name] = parse_size(value)
                except MisuseError:
                    text = ", or a text such as '7GB'" if "bytes" in NUMBERS.get(name, "") else ""
                    told = f"a machine's {_described(name)}, not {quoted(value)}; write a number{text}"
                    raise MisuseError(f"{where}: {told}") from None
        for name in ("read", "write"):
            given = values[name]
            if _is_number(given) and 0 < given < SLOWEST:
                raise MisuseError(
                    f"{where}: {name}={given:g} is in bytes a second, slower than any drive: did you mean '{given:g}GB'?"
                )
        try:
            return cls(**values)
        except MisuseError as error:
            raise MisuseError(f"{where}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the machine to a file. Raises MisuseError where that cannot be written."""
        try:
            Path(path).write_text(json.dumps({"tiered": FORMAT, **asdict(self)}, indent=1) + "\n")
        except OSError as error:
            raise MisuseError(f"cannot write the machine to {path}: {error.strerror}") from error

    def computing(self, width: int, *, device: bool, backward: bool = False) -> tuple[float, float]:
        """Return operations and bytes a second of what computes with elements of ``width`` bytes."""
        if device:
            return self.device_flops, self.device_memory
        half = (backward and self.flops_half_backward) or self.flops_half or self.flops
        return half if width == 2 else self.flops, self.memory

    def assumes(self, name: str) -> bool:
        """Return whether a number is the one that is taken where nobody measured or gave it."""
        return bool(getattr(self, name) == next(one.default for one in fields(self) if one.name == name))

    def but(self, **numbers: Any) -> Machine:
        """Return this machine with other numbers."""
        return replace(self, **numbers)


def _is_rate(name: str) -> bool:
    """Return whether a number is a rate that cannot be 0; that of bf16 products is then as of fp32 ones."""
    return NUMBERS[name].endswith("a second") and not name.startswith("flops_half")


def _described(name: str) -> str:
    if name in COUNTS:
        return f"{name} is a count, a whole number"
    return f"{name} is {'a rate above 0' if _is_rate(name) else 'a number from 0 on'}, in {NUMBERS[name]}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST  # no NaN either
