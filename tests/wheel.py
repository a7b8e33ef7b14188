"""Says whether an installed wheel works: ``python tests/wheel.py``, in an environment without libaio and its headers.

Opens stores with the libaio backend, trains some steps, and looks which libaio the process has mapped. cibuildwheel runs it for
each wheel, and tests/test_packaging.py for the one that it builds.
"""

import re
import tempfile
from pathlib import Path

import torch

import tiered
from tiered import TieredStore, zero

package = Path(tiered.__file__).parent
assert package.parent.name == "site-packages", f"not installed: {package}"
with tempfile.TemporaryDirectory() as folder:
    with TieredStore.open(f"{folder}/state", dram="4MiB", backend="libaio") as store:
        for number in range(16):
            store.put(f"w{number}", torch.full((1 << 18,), float(number)))  # 16 MiB
        store.commit({"step": 1})
        assert all(float(store.get(f"w{number}")[-1]) == number for number in range(16))
    losses = []
    with TieredStore.open(f"{folder}/training", dram="1MiB", backend="libaio") as store:
        torch.manual_seed(0)
        model = zero.page(torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)]), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 128)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
mapped = set(re.findall(r"/\S*libaio\S*", Path("/proc/self/maps").read_text()))
print(f"tiered {tiered.__version__}, libaio: {', '.join(sorted(mapped)) or 'linked into the extension'}")
assert all(path.startswith(str(package.parent)) for path in mapped), "libaio of the system"
