"""Every benchmark can be imported: most are only run by hand."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import bench
import bench.train


@pytest.mark.parametrize("name", [found.name for found in pkgutil.iter_modules(bench.__path__)])
def test_it_imports(name: str) -> None:
    module = importlib.import_module(f"bench.{name}")
    assert module.__doc__, "what it measures, and how to run it"


def test_the_page_of_a_training_reads_the_options_of_the_command() -> None:
    found = bench.train.options_of(["--layers", "2", "--dram", "8MiB"])
    assert (found.shape.layers, found.pool) == (2, 8 << 20)


@pytest.mark.parametrize("name", ["calls", "engine", "leases"])
def test_what_runs_on_other_checkouts_asks_them_for_little(name: str) -> None:
    """``--against`` runs the file itself on another checkout, an older one perhaps, which lacks what this one measures with."""
    tree = ast.parse((Path(bench.__path__[0]) / f"{name}.py").read_text())
    above = {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module}
    assert not [module for module in above if module.startswith(("tiered.measuring", "tiered.cli"))]
