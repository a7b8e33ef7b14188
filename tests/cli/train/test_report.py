"""The summary that ``tiered train`` ends with, without a training."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.train.trainings import TINY, tiered
from tiered import ActivationStatistics
from tiered.cli.train.options import Options
from tiered.cli.train.report import Summary, describe
from tiered.measuring.meters import Rates, Usage
from tiered.zero import PagingStatistics

MIB = 1 << 20


def summary(
    evictions: int, options: dict[str, Any] | None = None, paging: dict[str, Any] | None = None, **changed: Any
) -> Summary:
    dram = SimpleNamespace(name="dram", capacity=4 * MIB, peak=3 * MIB)
    seen: Any = SimpleNamespace(
        evictions=evictions, tier=lambda name: dram, tiers=[dram], backend="posix", direct=False
    )
    values: dict[str, Any] = {
        "options": Options.of(options or {}), "paging": PagingStatistics(1, 1, 1, 0.25, (), **(paging or {})),
        "steps": 1, "losses": (2.0,), "earlier_losses": (), "tokens": 8, "parameters": MIB, "seen": seen,
        "moved": Usage(2.0, 1.0, 10 * MIB, 0, None, None, 0.5, 0.25),
        "rates": Rates(4e6, 2e6), "peak_rss": 100 * MIB, "baseline_rss": 60 * MIB, "generation": 1,
        "folder": "/data/my store",
    }  # fmt: skip
    return Summary(**{**values, **changed})


def test_memory_is_divided_into_torch_the_pool_and_the_rest() -> None:
    shown = describe(summary(7), None, "tiered train it --existing resume")
    assert "100.0 MiB at the peak: 60.0 MiB Python and torch, 3.0 MiB the store,\n" in shown
    assert "\n          37.0 MiB activations and everything else" in shown
    assert "state     12.0 MiB of parameters and states of adamw, 3.0 times --dram\n" in shown
    assert "\n          (4.0 MiB, of which 3.0 MiB were used)\n" in shown
    assert "states of adamw alone would take 16.0 MiB" in shown


def test_a_state_that_fitted_is_said_to_have_fitted() -> None:
    shown = describe(summary(0), None, "again")
    assert "state     12.0 MiB of parameters and states of adamw, all in the memory of --dram\n" in shown
    assert "\n          (4.0 MiB, of which 3.0 MiB were used): nothing was evicted, and less may work, too\n" in shown


def test_one_step_and_a_slow_disk() -> None:
    shown = describe(summary(7), None, "again")
    assert "in 1 step of 8 tokens, 2 s" in shown
    assert "waited    0.75 s per step for the disk; alone it needs 2.62 s for these bytes\n" in shown
    assert "\n          (just now: read 4.0, write 2.0 MB/s): 71% of its work was hidden behind computing\n" in shown
    slow = describe(summary(7, moved=Usage(9.0, 1.0, 10 * MIB, 0, None, None, 5.0, 0.25)), None, "again")
    assert "waited    5.25 s per step for the disk; alone it needs 2.62 s" in slow
    assert "write 2.0 MB/s): none of its work was hidden\n" in slow
    little = describe(summary(7, moved=Usage(9.0, 1.0, MIB // 2, 0, None, None, 5.0, 0.25)), None, "again")
    assert "write 2.0 MB/s)\n" in little


@pytest.mark.parametrize(("ranks", "exported"), [(1, "'/data/my store'"), (2, "/data")])
def test_it_ends_with_what_to_do_next(ranks: int, exported: str) -> None:
    shown = describe(summary(7, ranks=ranks), "tiered train --no-prefetch", "tiered train it --existing resume")
    assert shown.splitlines()[-5:] == [
        "without prefetching: tiered train --no-prefetch",
        "more steps: tiered train it --existing resume --steps 2",
        f"weights as safetensors: tiered export {exported} --out weights",
        "text of your own: tiered train STORE --text FILE",
        "model of your own: docs/training.md",
    ]


def test_it_shows_what_the_model_writes() -> None:
    assert "its text  " not in describe(summary(7), None, "again")
    shown = describe(summary(7, sample="\nTo be,\n\n" + "or not " * 20), None, "again")
    lines = shown[shown.index("its text  after 1 step:\n") :].splitlines()
    assert lines[1:3] == ["          To be,", ""]
    assert " ".join(lines[3:6]).split() == ["or", "not"] * 20
    assert max(map(len, lines[:6])) <= 78
    command = "tiered generate '/data/my store' --prompt ROMEO: --temperature 0.7 --top-p 0.8 --dram 256MiB"
    assert f"\nmore of its text: {command}\n" in shown


def test_it_says_where_activations_were() -> None:
    assert "\nbackward" not in describe(summary(7), None, "")
    found = ActivationStatistics(
        saved=9, left=2, shared=0, offloaded=4 * 10**9, restored=2 * 10**9, hidden=10**9, in_memory=0, in_store=0,
        waited_in_forward=0.5, waited_in_backward=1.0,
    )  # fmt: skip
    stored = summary(7, {"activations": "store"}, {"activations": found}, steps=2)
    shown = describe(stored, None, "")
    assert "backward  2.00 GB per step went into the store, 1.00 GB came back, 50% of them in time;" in shown
    assert "forward waited 0.25 s per step for room, backward 0.50 s for bytes" in shown
    assert stored.as_json()["activations"] == {
        "where": "store", "offloaded_bytes": 4 * 10**9, "restored_bytes": 2 * 10**9, "hidden_bytes": 10**9,
        "waited_in_forward_seconds": 0.5, "waited_in_backward_seconds": 1.0,
    }  # fmt: skip
    again = summary(7, {"activations": "recompute"}, {"computed_again": 12}, steps=2)
    assert "backward  computed the insides of 6 modules per step again" in describe(again, None, "")
    assert again.as_json()["activations"] == {"where": "recompute", "modules_computed_again": 12}


def test_a_training_writes_a_page_and_its_json_makes_the_same(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)
    given = [*TINY, "--text", "text", "s", "--steps", "9", "--activations", "recompute"]
    done = tiered("train", *given, "--json", "run.json", "--report", "run.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "report    run.html" in done.stdout
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["series"]["step"] == list(range(1, 10))
    assert run["series"]["tokens"] == [32] * 9
    assert run["losses"]["values"] == run["loss"]["all"]
    assert [step[0] for step in run["timeline"]["steps"]] == ["step 6", "step 7", "step 8"]
    assert run["predicted"]["seconds"] > 0
    assert run["predicted"]["read"] == pytest.approx(sum(run["series"]["read"][5:]) / 4, rel=0.25)
    done = tiered("report", "run.json", "--out", "again.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again.html").read_text() == (tmp_path / "run.html").read_text()
    done = tiered("report", "run.json", "--out", "text", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "tiered: text exists already and is no report of tiered, so it stays: name another file\n"
    done = tiered("report", "text", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("tiered: text is damaged: 'utf-8'")


def test_a_training_chooses_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)
    given = [*TINY, "--text", "text", "s", "--steps", "6", "--auto", "--activation-memory", "64KiB"]
    done = tiered("train", *given, "--json", "run.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "plan      measuring for some steps" in done.stdout
    assert "plan      activations after a warm-up: of " in done.stdout
    assert "plan      chosen 1 time: activations of modules " in done.stdout
    plan = json.loads((tmp_path / "run.json").read_text())["plan"]
    assert plan["choices"] == 1
    assert set(plan["ways"].values()) <= {"memory", "recompute", "store"}
    done = tiered("train", *TINY, "--activation-memory", "1MiB", cwd=tmp_path)
    assert done.returncode == 2
    assert "--activation-memory needs --auto" in done.stderr
