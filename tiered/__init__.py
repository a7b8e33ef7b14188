"""A tensor store over HBM, DRAM and NVMe that moves tensors to where they are needed.

Start with ``TieredStore.open``; ``tiered.zero`` trains models that are larger than memory. The names below are imported on
first use, so that the parts without torch (manifests, errors) import quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tiered.types import VERSION

if TYPE_CHECKING:
    from tiered import zero
    from tiered.engine.policy import LRU, NextUse, Touch
    from tiered.errors import (
        CapacityError,
        ChangedInPlace,
        CommitError,
        CorruptionError,
        ForkedStore,
        GgufError,
        InterruptedStep,
        InterruptedStore,
        KeyNotFound,
        LeaseConflict,
        ManifestError,
        MisuseError,
        QuantizedWarning,
        RankError,
        ReadError,
        SafetensorsError,
        SharedMemoryWarning,
        ShortTransfer,
        StoreClosed,
        StoreLocked,
        TieredError,
        TorchFileError,
        TransferError,
        UncommittedWarning,
        WriteError,
    )
    from tiered.interfaces import EvictionPolicy, IOBackend
    from tiered.planning.machine import Machine
    from tiered.planning.plan import Plan, Sweep, plan
    from tiered.planning.sources import Numbers, Workload
    from tiered.small.tensors import SmallTensors
    from tiered.store.activations import offload_activations
    from tiered.store.importing import import_safetensors
    from tiered.store.memory_watch import MemoryNotice, MemoryWatch
    from tiered.store.opening import Eviction, Generation
    from tiered.store.readers import StoreReader, TieredDataset
    from tiered.store.store import TieredStore
    from tiered.store.verify import CheckedGeneration, Damage, Verification, verify
    from tiered.tables.embedding import TieredEmbedding
    from tiered.tables.sparse import RowwiseAdagrad, SparseAdagrad, SparseAdamW
    from tiered.tables.table import Table
    from tiered.telemetry import (
        ActivationStatistics,
        FlowStatistics,
        LeaseEvent,
        LinkStatistics,
        MemoryStatistics,
        Offloaded,
        PoolEvent,
        Span,
        SpanEvent,
        StallEvent,
        StoreStatistics,
        TierStatistics,
        Timeline,
        TransferEvent,
    )
    from tiered.types import Access, Owner, TensorSpec, Use

__version__ = VERSION

__all__ = [
    "LRU",
    "Access",
    "ActivationStatistics",
    "CapacityError",
    "ChangedInPlace",
    "CheckedGeneration",
    "CommitError",
    "CorruptionError",
    "Damage",
    "Eviction",
    "EvictionPolicy",
    "FlowStatistics",
    "ForkedStore",
    "Generation",
    "GgufError",
    "IOBackend",
    "InterruptedStep",
    "InterruptedStore",
    "KeyNotFound",
    "LeaseConflict",
    "LeaseEvent",
    "LinkStatistics",
    "Machine",
    "ManifestError",
    "MemoryNotice",
    "MemoryStatistics",
    "MemoryWatch",
    "MisuseError",
    "NextUse",
    "Numbers",
    "Offloaded",
    "Owner",
    "Plan",
    "PoolEvent",
    "QuantizedWarning",
    "RankError",
    "ReadError",
    "RowwiseAdagrad",
    "SafetensorsError",
    "SharedMemoryWarning",
    "ShortTransfer",
    "SmallTensors",
    "Span",
    "SpanEvent",
    "SparseAdagrad",
    "SparseAdamW",
    "StallEvent",
    "StoreClosed",
    "StoreLocked",
    "StoreReader",
    "StoreStatistics",
    "Sweep",
    "Table",
    "TensorSpec",
    "TierStatistics",
    "TieredDataset",
    "TieredEmbedding",
    "TieredError",
    "TieredStore",
    "Timeline",
    "TorchFileError",
    "Touch",
    "TransferError",
    "TransferEvent",
    "UncommittedWarning",
    "Use",
    "Verification",
    "Workload",
    "WriteError",
    "import_safetensors",
    "offload_activations",
    "plan",
    "verify",
    "zero",
]

_HOME = {
    name: f"tiered.{module}"
    for module, names in {
        "engine.policy": ("LRU", "NextUse", "Touch"),
        "store.activations": ("offload_activations",),
        "planning.machine": ("Machine",),
        "planning.plan": ("Plan", "Sweep", "plan"),
        "planning.sources": ("Numbers", "Workload"),
        "store.importing": ("import_safetensors",),
        "store.memory_watch": ("MemoryNotice", "MemoryWatch"),
        "store.opening": ("Eviction", "Generation"),
        "interfaces": ("EvictionPolicy", "IOBackend"),
        "telemetry": (
            "ActivationStatistics",
            "FlowStatistics",
            "LeaseEvent",
            "LinkStatistics",
            "MemoryStatistics",
            "Offloaded",
            "PoolEvent",
            "Span",
            "SpanEvent",
            "StallEvent",
            "StoreStatistics",
            "TierStatistics",
            "Timeline",
            "TransferEvent",
        ),
        "store.readers": ("StoreReader", "TieredDataset"),
        "small.tensors": ("SmallTensors",),
        "store.store": ("TieredStore",),
        "tables.embedding": ("TieredEmbedding",),
        "tables.sparse": ("RowwiseAdagrad", "SparseAdagrad", "SparseAdamW"),
        "tables.table": ("Table",),
        "types": ("Access", "Owner", "TensorSpec", "Use"),
        "store.verify": ("CheckedGeneration", "Damage", "Verification", "verify"),
    }.items()
    for name in names
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'tiered' has no attribute {name!r}")
    if name == "zero":
        return import_module("tiered.zero")
    found = getattr(import_module(_HOME.get(name, "tiered.errors")), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
