"""Runs pytest with an extension that was built elsewhere: ``python -m tests.stress.sanitized EXTENSION ARGUMENTS...``."""

from __future__ import annotations

import importlib.util
import sys

import pytest

if __name__ == "__main__":
    extension, *arguments = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("tiered.io._aio", extension)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiered.io._aio"] = module
    spec.loader.exec_module(module)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *arguments]))
