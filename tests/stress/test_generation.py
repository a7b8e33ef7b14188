"""Promise 4, of a model that generates: a read of weights that fails, comes short or brings other bytes is an error that names
the tensor, the file and the place; the next call gives the tokens of the model in memory, in the same process. And ten minutes
of generating leave memory, descriptors, threads and the disk as they were."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402

from tests import programs  # noqa: E402
from tests.quick import quick  # noqa: E402
from tests.stress.fusefs import FaultyDisk, Rule  # noqa: E402
from tests.stress.tally import Tally, counts  # noqa: E402
from tiered import TieredStore, TransferError  # noqa: E402
from tiered.integrations.transformers import TieredCache, import_model, open_model  # noqa: E402
from tiered.integrations.transformers.kv_model import ARGUMENT  # noqa: E402
from tiered.zero.paging.pager import pager_of  # noqa: E402

PROMISE = "4 (errors are typed, the rest stays readable)"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
SIZES = {"vocab_size": 500, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.2}
FAULTS: dict[str, dict[str, Any]] = {
    "EIO": {"effect": "error", "errno": errno.EIO, "times": -1},
    "short": {"effect": "short", "moves": 0, "times": -1},
    "another byte": {"effect": "flip", "times": -1},
}


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    threads, level = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(level)


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, intermediate_size=384, **SIZES)).eval()
    experts = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 384, "head_dim": 64}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=3, **experts, **SIZES)).eval()


def tokens(model: Any) -> list[int]:
    given = {"attention_mask": torch.ones(1, 3, dtype=torch.int64), "pad_token_id": 0, "do_sample": False}
    found: list[int] = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, **given)[0].tolist()
    return found


@pytest.mark.parametrize(
    ("family", "fault"),
    quick(product(["llama", "qwen3_moe"], FAULTS), [("llama", "short"), ("qwen3_moe", "EIO"), ("llama", "another byte")]),
)
@counts(3, 60)
def test_a_read_of_weights_fails(
    disk: FaultyDisk, tmp_path: Path, family: str, fault: str, count: int, tally: Tally
) -> None:
    folder = disk.folder / f"{family}-{fault}-{count}".replace(" ", "-")
    reference = model_of(family)
    reference.save_pretrained(tmp_path / "model")
    with TieredStore.open(folder, dram="48MiB") as store:
        import_model(tmp_path / "model", store, largest_unit=600_000)
        store.close()
    with TieredStore.open(folder, dram="3MiB", access="read") as store:
        model = open_model(store)
        expected = tokens(reference)
        assert tokens(model) == expected
        units = {unit.key for unit in pager_of(model).units}
        for number in range(count):
            disk.add(Rule("read", name=r".*data.*", skip=number * 7 % 23, **FAULTS[fault]))
            with pytest.raises(TransferError) as caught:
                tokens(model)
            (fired,) = disk.clear()
            tally.count(fault, fired)
            error = caught.value
            assert error.key in units
            assert repr(error.key) in str(error)
            assert str(folder) in error.path
            assert re.search(r"\d", str(error))
            assert tokens(model) == expected, "the next call works"


READER = """if True:
    import sys, torch
    from tiered import TieredStore
    from tiered.integrations.transformers import open_model
    torch.set_num_threads(1)
    with TieredStore.open(sys.argv[1], dram="3MiB", access="read") as store:
        model = open_model(store)
        class Told:
            def put(self, made): print("token", flush=True)
            def end(self): pass
        ids = torch.tensor([[1, 2, 3]])
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=500, do_sample=False, streamer=Told())
"""


def test_a_reader_that_is_killed_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    """In the middle of a token, beside another reader."""
    reference = model_of("llama")
    reference.save_pretrained(tmp_path / "model")
    with TieredStore.open(tmp_path / "store", dram="48MiB") as store:
        import_model(tmp_path / "model", store, largest_unit=600_000)
        store.close()
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*") if path.is_file()}
    command = [sys.executable, "-c", READER, str(tmp_path / "store")]
    with programs.Popen(command, stdout=subprocess.PIPE, text=True, imported=programs.MODELS) as child:
        assert child.stdout is not None
        for _ in range(4):
            assert child.stdout.readline() == "token\n"
        child.kill()
    with TieredStore.open(tmp_path / "store", dram="3MiB", access="read") as store:
        assert tokens(open_model(store)) == tokens(reference)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*") if path.is_file()} == files
    TieredStore.open(tmp_path / "store", dram="3MiB").close()


SECONDS = 600
"""Of one run of ``test_ten_minutes_of_generation``."""


@pytest.mark.soak
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_ten_minutes_of_generation(family: str, tmp_path: Path) -> None:
    """Weights of twice the memory for them, and keys and values of five times the memory for those, in two stores: prompts of
    several lengths, greedy, drawn and by beams, each conversation kept. Every answer is that of the model in memory."""
    reference = model_of(family)
    reference.save_pretrained(tmp_path / "model")
    with TieredStore.open(tmp_path / "store", dram="48MiB") as store:
        import_model(tmp_path / "model", store, largest_unit=600_000)
        store.close()
    weights = sum(parameter.nbytes for parameter in reference.parameters())
    asked = [
        (prompt, {"max_new_tokens": 12, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)} | how)
        for length in (5, 350, 60)
        for prompt in [torch.randint(10, 500, (1, length), generator=torch.Generator().manual_seed(length))]
        for how in ({"do_sample": False}, {"do_sample": True, "top_k": 20}, {"do_sample": False, "num_beams": 2})
    ]

    def answered(model: Any, at: int, **given: Any) -> list[int]:
        prompt, how = asked[at]
        torch.manual_seed(at)
        return model.generate(prompt, **how, **given)[0].tolist()  # type: ignore[no-any-return]

    expected = [answered(reference, at) for at in range(len(asked))]
    seen: list[tuple[int, ...]] = []
    rounds = 0
    with (
        TieredStore.open(tmp_path / "store", dram=weights // 2, access="read") as store,
        TieredStore.open(tmp_path / "kept", dram="1MiB") as keys,
    ):
        model = open_model(store)
        cache = TieredCache(model, keys, block=16)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end or rounds < 6:
            for at in range(len(asked)):
                cache.reset()
                assert answered(model, at, **{ARGUMENT: cache}) == expected[at]
                cache.commit()
                assert answered(model, at) == expected[at]
            rounds += 1
            files = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
            own = Path("/proc/self")
            resident = int((own / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            descriptors, threads = (len(os.listdir(own / folder)) for folder in ("fd", "task"))
            seen.append((resident, descriptors, threads, sum(files), len(files), len(keys)))
        keys.close()
    early, late = seen[1 : len(seen) // 2], seen[len(seen) // 2 :]
    print(f"{family}: {rounds} rounds of {2 * len(asked)} answers; early {early[0]}, late {late[-1]}")
    assert max(one[0] for one in late) < max(one[0] for one in early) + (8 << 20)
    for at in range(1, 6):
        assert max(one[at] for one in late) <= max(one[at] for one in early) + (8192 if at == 3 else 0)
