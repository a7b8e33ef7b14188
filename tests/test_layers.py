"""The import table of docs/design.md, section 2, enforced over the sources; and a check that this check finds what it should.

Imports are counted wherever they stand, inside functions too; only those under ``if TYPE_CHECKING`` are free.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 600
LONGER: dict[str, str] = {}

# Module pattern (below ``tiered``) -> layer. The first that matches counts; a module that none matches is an error.
LAYERS = {
    "errors": "values",
    "types": "values",
    "stats": "values",
    "space": "values",
    "sizes": "values",
    "directio": "values",
    "wakeup": "values",
    "folder": "values",
    "closing": "values",
    "locked": "values",
    "memory": "values",
    "datafile": "values",
    "drives": "values",
    "data": "values",
    "flow": "values",
    "checksum": "values",
    "timeline": "values",
    "safetensors": "values",
    "shards": "values",
    "interfaces": "interfaces",
    "io": "parts",
    "io.*": "parts",
    "tiers": "parts",
    "tiers.*": "parts",
    "links": "parts",
    "links.*": "parts",
    "eviction": "parts",
    "residency": "decisions",
    "compaction": "decisions",
    "prefetch": "decisions",
    "keep": "decisions",
    "manifest": "decisions",
    "generations": "protocol",
    "config": "config",
    "requests": "requests",
    "claims": "requests",
    "flush": "requests",
    "ahead": "requests",
    "traffic": "admission",
    "explain": "admission",
    "occupancy": "admission",
    "admission": "admission",
    "background": "admission",
    "leaving": "admission",
    "behind": "requests",
    "engine": "engine",
    "tensors": "store",
    "commits": "store",
    "encoding": "store",
    "lease": "store",
    "opening": "store",
    "verification": "store",
    "atrest": "store",
    "reading": "store",
    "listing": "store",
    "importing": "store",
    "store": "store",
    "": "package",
    "zero": "zero",
    "zero.*": "zero",
    "cli": "cli",
    "cli.*": "cli",
    "__main__": "cli",
}

# Layer -> layers that its modules may import.
MAY_IMPORT = {
    "values": {"values"},
    "interfaces": {"values"},
    "parts": {"values", "interfaces"},  # never each other
    "decisions": {"values", "interfaces"},
    "protocol": {"values", "decisions"},
    "config": {"values", "interfaces", "parts"},
    "requests": {"values", "interfaces", "decisions", "requests"},  # what the engine works off
    "admission": {"values", "interfaces", "decisions", "requests", "admission"},  # what it may start
    "engine": {"values", "interfaces", "decisions", "requests", "admission"},
    "store": {
        *("values", "interfaces", "parts", "decisions", "protocol", "config", "requests", "admission", "engine", "store")
    },
    "package": {"values", "interfaces", "parts", "decisions", "config", "requests", "admission", "engine", "store", "zero"},
    "zero": {"package", "zero"},  # the public API only, and:
    "cli": set(LAYERS.values()),
}
ALSO = {"zero": {"atrest", "errors", "listing", "memory", "types", "safetensors", "shards"}}  # modules, not layers

# Compiled, without layers below it.
EXTENSIONS = {"io._aio": "io.*"}

# Who must do without torch, so that crash trials start in milliseconds and I/O stays about bytes.
WITHOUT_TORCH = (
    *(pattern for pattern, layer in LAYERS.items() if layer in ("values", "interfaces", "decisions", "protocol")),
    *("io", "io.*", "tiers.nvme", "links.disk", "links.memory", "eviction"),
)

THREADS = ("threading", "_thread", "concurrent", "multiprocessing")
MAY_THREAD = {
    "engine": "the one engine thread and the one lock",
    "behind": "commits and rollbacks in threads of their own",
    "cli.flood": "a caller that writes while another one's reads are timed; stores have callers in many threads",
    "cli.peers": "asks the store in which ranks met, which never answers where its host is lost",
    "io.aiofile": "the private event loop and the pool that does its blocking calls; no other part sees them",
    "links.cuda": "one thread a direction sleeps until CUDA events pass, which have no descriptor to poll",
    "links.memory": "the stand-in's streams are stepped by a test and, in close, by the engine: these take turns",
}


def layer_of(module: str) -> str | None:
    return next((layer for pattern, layer in LAYERS.items() if fnmatchcase(module, pattern)), None)


def module_of(path: Path, root: Path) -> str:
    """``tiered/io/posix.py`` -> ``io.posix``; ``tiered/__init__.py`` -> the empty name."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def live_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for other in child.orelse:
                yield from live_nodes(other)
        else:
            yield from live_nodes(child)


def imports_of(source: str, module: str, is_package: bool, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported. ``from a import b`` is ``a.b`` where that is a module, else ``a``."""
    known = {f"tiered.{name}".rstrip(".") for name in modules | set(EXTENSIONS)}
    for node in live_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = ["tiered", *filter(None, module.split("."))]
                parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*parts, *filter(None, [base])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in known else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            name = node.args[0].value
            if called in ("importlib.import_module", "import_module", "__import__") and isinstance(name, str):
                yield node.lineno, name


def violations(source: str, module: str, modules: set[str], *, is_package: bool = False) -> list[str]:
    """What is wrong with one file; ``modules`` are all modules of the package."""
    where = f"tiered.{module}".rstrip(".")
    layer = layer_of(module)
    if layer is None:
        return [f"{where}: has no layer; give it one in tests/test_layers.py and docs/design.md"]
    found = []
    lines = len(source.splitlines())
    if lines > MAX_LINES and module not in LONGER:
        found.append(f"{where}: {lines} lines, more than {MAX_LINES}")
    for line, name in imports_of(source, module, is_package, modules):
        top = name.split(".")[0]
        if top == "torch" and any(fnmatchcase(module, pattern) for pattern in WITHOUT_TORCH):
            found.append(f"{where}:{line}: imports torch, which this file does without")
        if top in THREADS and module not in MAY_THREAD:
            found.append(f"{where}:{line}: imports {name}; threads and locks live in engine.py")
        if top != "tiered":
            continue
        target = name.partition(".")[2]
        if target in EXTENSIONS:
            if not fnmatchcase(module, EXTENSIONS[target]):
                found.append(f"{where}:{line}: imports the extension {name}")
            continue
        while target and target not in modules:  # import tiered.types.Key is no import, but a name may be inside
            target = target.rpartition(".")[0]
        if target == module or target in ALSO.get(layer, ()):
            continue
        other = layer_of(target)
        if other not in MAY_IMPORT[layer]:
            found.append(f"{where}:{line}: imports {name} ({other}), and {layer} may import {sorted(MAY_IMPORT[layer])}")
    return found


SOURCES = sorted((ROOT / "tiered").rglob("*.py"))
MODULES = {module_of(path, ROOT / "tiered") for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_keeps_to_its_layer(path: Path) -> None:
    module = module_of(path, ROOT / "tiered")
    assert violations(path.read_text(), module, MODULES, is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize("module", [name for name in ("residency", "manifest", "prefetch", "interfaces") if name in MODULES])
def test_it_imports_without_torch(module: str) -> None:
    """Python itself says so: the sources could still reach torch through a third party."""
    program = f"import sys; sys.modules['torch'] = None; import tiered.{module}"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert child.returncode == 0, child.stderr


ALL = {name for name in LAYERS if "*" not in name} | {"io.posix", "io.libaio", "tiers.dram", "tiers.nvme", "zero.units"}


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("types", "from tiered.interfaces import Tier", "interfaces"),
        ("eviction", "from tiered.io.posix import PosixBackend", "parts"),
        ("io.posix", "from tiered.io import libaio", "parts"),
        ("io.posix", "from . import libaio", "parts"),
        ("io.posix", "from .libaio import LibaioBackend", "parts"),
        ("tiers.dram", "from ..io import posix", "parts"),
        ("residency", "def f():\n    import tiered.engine", "engine"),
        ("residency", "from tiered.manifest import encode", "decisions"),
        ("manifest", "import torch", "torch"),
        ("manifest", "def f():\n    from torch.nn import Module", "torch"),
        ("tiers.nvme", "import torch", "torch"),
        ("engine", "from tiered.config import StoreConfig", "config"),
        ("engine", "from tiered.tiers.dram import Dram", "parts"),
        ("config", "from tiered.residency import State", "decisions"),
        ("config", "if TYPE_CHECKING:\n    pass\nelse:\n    from tiered.engine import Engine", "engine"),
        ("store", "import tiered", "package"),
        ("store", "from tiered import zero", "zero"),
        ("store", "import threading", "threads"),
        ("cli", "from threading import Lock", "threads"),
        ("io.posix", "from concurrent.futures import ThreadPoolExecutor", "threads"),
        ("zero.units", "from tiered.store import TieredStore", "store"),
        ("zero.units", "from tiered import engine", "engine"),
        ("zero.units", "import importlib\nimportlib.import_module('tiered.engine')", "engine"),
        ("links", "from tiered.io._aio import lib", "extension"),
        ("helpers", "", "no layer"),
        ("types", "\n" * 601, "lines"),
    ],
)
def test_the_check_finds_what_is_wrong(module: str, source: str, complaint: str) -> None:
    found = violations(source, module, ALL | {module})
    assert len(found) == 1, found
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("types", "from tiered.errors import TieredError"),
        ("io.posix", "from tiered.types import IORequest\nfrom tiered.interfaces import IOBackend"),
        ("io.libaio", "from tiered.io._aio import ffi, lib"),
        ("residency", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("engine", "import threading\nfrom tiered.residency import State\nfrom tiered.requests import Request"),
        ("store", "import torch\nfrom tiered import config, engine\nfrom tiered.tiers.dram import Dram"),
        ("zero.units", "from tiered import TieredStore\nfrom tiered.errors import TieredError\nfrom . import page"),
        ("cli", "from tiered import TieredStore, zero\nfrom tiered.config import StoreConfig"),
    ],
)
def test_the_check_lets_pass_what_is_right(module: str, source: str) -> None:
    assert violations(source, module, ALL) == []
