"""Everything that needs a CUDA device, in one call:

    python -m tests.gpu [files] [options of pytest]

Runs the contract suites on the device, the tests of this folder, and on CUDA those of training on a device; or the files that
are named. Without a device it says so in one line and exits 0; where there is one that this torch cannot use, it exits 1.
"""

from __future__ import annotations

import os
import sys

WHAT = ["tests/gpu", "tests/tiers/test_hbm.py", "tests/links/test_cuda.py"]
ON_CUDA = ["tests/zero/on_device.py"]
"""Which on a CPU is run by ``tests/zero/test_device.py``, with a device that is none."""
# Another torch, another Python: their news are shown and fail nothing. What our own threads and finalizers raise does.
WARNINGS = ["default", "error::pytest.PytestUnraisableExceptionWarning", "error::pytest.PytestUnhandledThreadExceptionWarning"]


def main(arguments: list[str]) -> int:
    from tests.gpu.device import NAME, why_not

    why = why_not()
    if why is not None:
        usable = os.path.exists("/dev/nvidiactl") and "without CUDA" in why
        mend = "; an NVIDIA driver is here: make setup TORCH=... with a torch that has CUDA" if usable else ""
        print(f"test-gpu: nothing was run: {why}{mend}")
        return int(usable)
    what = [*WHAT]
    if NAME.startswith("cuda"):
        os.environ["TIERED_TEST_DEVICE"] = NAME
        what += ON_CUDA
    if any(os.path.exists(argument.partition("::")[0]) for argument in arguments):
        what = []
    os.environ.setdefault("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of plugins that happen to be installed beside torch
    import pytest
    import torch

    name = torch.cuda.get_device_name(NAME) if NAME != "cpu" else "the stand-in"
    print(f"test-gpu: {name}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    return pytest.main(["-q", *(word for rule in WARNINGS for word in ("-W", rule)), *what, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
