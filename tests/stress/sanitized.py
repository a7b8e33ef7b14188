"""Run pytest with extensions that were built elsewhere: ``python -m tests.stress.sanitized MODULE=FILE... -- ARGUMENTS...``"""

from __future__ import annotations

import importlib.util
import sys

import pytest

if __name__ == "__main__":
    end = sys.argv.index("--")
    for name, _, file in (one.partition("=") for one in sys.argv[1:end]):
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[end + 1 :]]))
