"""Promise 24: what a store or a peer says is data. Manifests, checkpoint records, safetensors headers, what ranks tell each
other, metadata of torch.distributed.checkpoint, reports, machines and configurations, changed behind checksums that fit: only
our errors, which can be printed; of what is refused nothing was done."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.stress.tally import Tally

PROMISE = "24 (what a store or a peer says is data)"
COUNTS: dict[str, tuple[int, int]] = {"files": (80, 5000)}
COUNTS |= {"records": (6, 2000), "manifests": (12, 2000), "headers": (40, 2000), "peers": (75, 1500)}
"""Changed ones: in every run, and in the long one."""


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *((kind, quick) for kind, (quick, _) in COUNTS.items()),
        *(pytest.param(kind, full, marks=pytest.mark.soak) for kind, (_, full) in COUNTS.items()),
    ],
)
def test_what_was_changed_is_refused_or_is_data(tmp_path: Path, kind: str, count: int, tally: Tally) -> None:
    """In a process of its own, whose memory is limited."""
    command = [sys.executable, "-m", "tests.stress.hostile", kind, str(count), str(tmp_path)]
    ran = programs.run(command, cwd=programs.ROOT, capture_output=True, text=True, timeout=7000)
    assert ran.returncode == 0, ran.stderr[-3000:]
    seen = json.loads(ran.stdout.splitlines()[-1])
    for _ in range(seen["refused"]):
        tally.count(kind, 1)
    for _ in range(seen.get("accepted", 0)):
        tally.ran()
    print(f"{kind}: {seen}")
    assert sum(seen.values()) == count
    assert seen["refused"] > count // 2, seen


UNPICKLING = {
    *("pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"),
    *("recv_object_list", "eval", "exec", "load"),
}
"""Names that unpickle, or run what they are given. (``load`` of torch, and of numpy.)"""


def test_nothing_is_unpickled() -> None:
    """In no file of the package, also between ranks."""
    found = []
    for path in sorted((programs.ROOT / "tiered").rglob("*.py")):
        writes = set(re.findall(r"pickle\.\w+", path.read_text())) == {"pickle.Pickler"}  # the one class that only writes
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names if not (writes and alias.name == "pickle")]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0], *(alias.name for alias in node.names)]
                names = [] if (node.module or "").startswith("tiered") else names
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                whose = ast.unparse(node.func.value)
                names = [node.func.attr] if node.func.attr != "load" or whose in ("torch", "numpy", "np", "pickle") else []
                names = [] if names == ["eval"] and not node.args else names  # a module's
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = [node.func.id] if node.func.id in ("eval", "exec") else []
            found += [f"{path}:{getattr(node, 'lineno', 0)}: {name}" for name in names if name in UNPICKLING]
    assert found == []
