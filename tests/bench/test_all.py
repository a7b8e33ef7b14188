"""Every benchmark can be imported: most are only run by hand."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import bench


@pytest.mark.parametrize("name", [found.name for found in pkgutil.iter_modules(bench.__path__)])
def test_it_imports(name: str) -> None:
    module = importlib.import_module(f"bench.{name}")
    assert module.__doc__, "what it measures, and how to run it"
