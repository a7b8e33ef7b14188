"""Configurations of DeepSpeed's documentation, its tests and transformers' tests of it: each runs, or is refused by key.

``known.json`` has their values, each with its source: the blocks of docs/ and the files of DeepSpeed at commit edaa7221 (August
2026) that are configurations, and what transformers' tests make of their own files: of the four in tests/deepspeed, and of the
two in tests/trainer/distributed, which have taken their place. What is in a source only in pieces ("...") is not there. A batch
size of 16 was added where a source says none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.deepspeed.test_config import ARGUMENTS
from tiered import MisuseError, zero
from tiered.integrations.deepspeed.config import Config

KNOWN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "known.json").read_text())
RUN = [known for known in KNOWN if not known["refused"]]


def test_how_many_there_are() -> None:
    assert (len(KNOWN), len(RUN)) == (145, 93)
    assert len({json.dumps(known["config"], sort_keys=True) for known in KNOWN}) == len(KNOWN)


@pytest.mark.parametrize("known", RUN, ids=lambda known: known["source"].rpartition("/")[2])
def test_it_is_taken(known: dict[str, Any]) -> None:
    made = Config.of(known["config"], ranks=1, arguments=ARGUMENTS)
    assert made.train_batch_size == made.micro_batch_size * made.accumulation_steps


@pytest.mark.parametrize(
    "known", [known for known in KNOWN if known["refused"]], ids=lambda known: known["source"].rpartition("/")[2]
)
def test_it_is_refused_by_key(known: dict[str, Any]) -> None:
    with pytest.raises(MisuseError) as raised:
        Config.of(known["config"], ranks=1, arguments=ARGUMENTS)
    for key in known["refused"]:
        assert key in str(raised.value)


@pytest.mark.soak
@pytest.mark.parametrize("known", RUN, ids=lambda known: known["source"].rpartition("/")[2])
def test_it_trains(known: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, of samples as small as they can be; with an optimizer of the caller's where the configuration has none."""
    monkeypatch.chdir(tmp_path)
    config = {**known["config"], "tiered": {"path": str(tmp_path / "store"), "dram": "1MiB"}}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    own = None if "optimizer" in config else torch.optim.AdamW(model.parameters(), 1e-3)
    try:
        engine, optimizer, _, _ = zero.initialize(ARGUMENTS, model, own, config=config)
    except MisuseError as error:
        if "tensorboard" in str(error) or f"torch ({torch.__version__}) has no Muon" in str(error):
            pytest.skip(str(error))
        raise
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    for _ in range(2 * engine.gradient_accumulation_steps()):
        x = torch.randn(1, 8, dtype=next(model.parameters()).dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 2
    changed = [name for name, value in engine.module_state_dict().items() if not torch.equal(value, before[name])]
    assert changed or engine.skipped_steps or max(group["lr"] for group in optimizer.param_groups) < 1e-2
    engine.destroy()
