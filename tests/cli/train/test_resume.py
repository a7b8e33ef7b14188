"""``tiered train --existing resume``: training that was stopped goes on bit for bit as if nothing had been.

Kills are in ``tests/stress/test_kill_training.py``.
"""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.cli.train.trainings import TINY, losses, same, stop_at, tiered, training, values
from tests.quick import quick
from tiered import ManifestError, TieredStore
from tiered.cli.main import main
from tiered.cli.train import resume as resuming

MIB = 1 << 20
STEPS = 20
SMALL = [*TINY, "--steps", STEPS, "--lr", "3e-3"]


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that fails in this process."""
    capsys.readouterr()
    assert main(list(map(str, arguments))) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("tiered: ")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that nothing disturbed, in ``store``, and its report, ``it.json``."""
    folder = tmp_path_factory.mktemp("whole")
    done = tiered("train", *SMALL, folder / "store", "--json", folder / "it.json")
    assert done.returncode == 0, done.stderr
    return folder


def test_stopped_and_resumed(whole: Path, tmp_path: Path) -> None:
    """By Ctrl-C within a step, then by SIGTERM; ended; and more steps were wanted. The steps that --steps says are in all."""
    folder, report = tmp_path / "store", tmp_path / "it.json"
    arguments: Sequence[object] = SMALL
    before = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        with training(*arguments, folder) as running:
            assert running.wait_for_step()
            running.child.send_signal(number)
            shown = running.end()
            assert running.child.returncode == 128 + number
        found = re.fullmatch(
            r"tiered: stopped at step (\d+); generation (\d+) has step \1; continue with: "
            rf"tiered train {folder} --existing resume\n",
            shown,
        )
        assert found, shown
        assert before < int(found[1]) < STEPS
        before, arguments = int(found[1]), ["--existing", "resume"]
        with TieredStore.open(folder, dram=MIB) as store:
            assert (store.generation, store.meta["step"]) == (int(found[2]), before)
            store.close()
    done = tiered("train", folder, "--existing", "resume", "--json", report)
    assert done.returncode == 0, done.stderr
    assert f"resumed   after step {before}, generation 2" in done.stdout
    assert losses(report) == losses(whole / "it.json")
    assert same(values(folder), values(whole / "store"))


def test_more_steps_than_were_said_at_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "store"
    assert main(["train", *TINY, "--steps", "3", str(folder), "--warmup", "1"]) == 0
    assert f"more steps: tiered train {folder} --existing resume --steps 6" in capsys.readouterr().out
    assert "has completed 3 of its 3 steps: for more give --steps" in failure(capsys, "train", folder, "--existing", "resume")
    again = ["train", str(folder), "--existing", "resume", "--steps", "5", "--dram", "2MiB", "--no-prefetch", "--json", "-"]
    assert main([*again, "--text", _shipped(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["resumed_after"], report["steps"], len(report["loss"]["all"])) == (3, 2, 5)
    assert report["pool"]["budget_bytes"] == 2 * MIB
    assert report["prefetch"] == "off"
    with TieredStore.open(folder, dram=MIB) as store:
        assert (store.generation, store.meta["step"]) == (2, 5)
        store.close()


def _shipped(folder: Path) -> str:
    from contextlib import ExitStack

    from tiered.cli.train.model import open_text

    with ExitStack() as stack:
        path = folder / "the same text elsewhere"
        path.write_bytes(Path(open_text(None, 16, stack).path).read_bytes())
    return str(path)


def test_continue_begins_goes_on_and_is_content_with_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["train", str(tmp_path / "store"), *TINY, "--existing", "continue", "--steps"]
    assert main([*run, "2"]) == 0
    told = capsys.readouterr().out
    assert "resumed  " not in told
    assert f"without prefetching: tiered train {tmp_path}/store " in told
    assert "--existing overwrite" in told
    assert "--existing continue" not in told
    assert main([*run, "3"]) == 0
    assert "resumed   after step 2, generation 1" in capsys.readouterr().out
    assert main([*run, "3"]) == 0
    ended = capsys.readouterr()
    assert "has completed 3 of its 3 steps: for more give --steps" in ended.err
    assert not ended.out


def test_with_a_device_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["train", *TINY, str(tmp_path / "store"), "--steps", "6"]
    assert main([*run[:-1], "2", "--hbm", "1MiB", "--device", "cpu"]) == 0
    assert "1.0 MiB on cpu and 1.0 MiB of memory" in capsys.readouterr().out
    assert main(["train", "--existing", "resume", *run[-3:-1], "4"]) == 0
    assert "device    1.0 MiB for parameters" in capsys.readouterr().out
    assert main(["train", "--existing", "resume", *run[-3:-1], "6", "--hbm", "0"]) == 0
    assert "device  " not in capsys.readouterr().out


def test_what_would_be_another_training_is_refused(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"something else " * 9)
    resume = ["train", whole / "store", "--existing", "resume", "--steps", 100]
    for option, wanted, kept in (
        ("--layers", 3, 2),
        ("--width", 128, 64),
        ("--heads", 2, 4),
        ("--context", 32, 16),
        ("--batch", 3, 2),
        ("--accumulate", 2, 1),
        ("--micro-batch", 2, 1),
        ("--optimizer", "lion", "adamw"),
        ("--update", "in_backward", "on_fetch"),
        ("--lr", 0.5, 0.003),
        ("--warmup", 9, 5),
        ("--weight-decay", 0.0, 0.1),
        ("--clip", 2.0, 1.0),
        ("--seed", 1, 0),
    ):
        shown = failure(capsys, *resume, option, wanted)
        assert shown.startswith(f"{option} {wanted} would make this a different training; "), shown
        assert f"; this one has {option} {kept}: " in shown
    shown = failure(capsys, *resume, "--text", text)
    assert re.search(r"has 135 bytes, that of this training had [\d,]+: name the text", shown)
    with TieredStore.open(whole / "store", dram=MIB) as store:
        assert (store.generation, store.meta["step"]) == (1, STEPS)
        store.close()


@pytest.mark.parametrize(
    "opening",
    [{}, {"dram": "much"}, {"dram": MIB, "hbm": -1.5}, {"dram": MIB, "hbm": None, "device": 3}, {"dram": MIB, "backend": "nn"}],
)
def test_a_commit_that_does_not_say_how_it_is_opened(
    tmp_path: Path, opening: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.commit({"command": "train", "opening": opening})
    assert "does not say how its store is opened" in failure(capsys, "train", tmp_path / "state", "--existing", "resume")


@pytest.mark.parametrize(
    "changes",
    [
        *({"options": 3}, {"options": {}}, {"options": torch.ones(2)}),
        *({"step": "3"}, {"step": -1}, {"seconds": None}, {"text_bytes": 1.5}),
        *({"losses": [1.0]}, {"losses": torch.ones(2, 2)}),
    ],
)
def test_what_no_training_says_of_itself(tmp_path: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"options": {}, "step": 3, "seconds": 1.0, "text_bytes": 5, "losses": torch.ones(3)}
    monkeypatch.setattr(resuming, "read_record", lambda store, name: {"extra": {**kept, **changes}})
    with pytest.raises(ManifestError, match="the training in it is damaged, or of a version"):
        resuming.earlier({}, "it", "model", {})  # type: ignore[arg-type]


def test_where_there_is_nothing_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere, empty, other = tmp_path / "nowhere", tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    for folder in nowhere, empty:
        assert f"nothing is committed in {folder}: name the STORE" in failure(capsys, "train", folder, "--existing", "resume")
    assert not nowhere.exists()
    assert not list(empty.iterdir())
    with TieredStore.open(other, dram=MIB) as store:
        store.put("mine", torch.arange(3))
    assert "is not that of a training that can be resumed" in failure(capsys, "train", other, "--existing", "resume")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--existing", "resume", "--check"], "--existing"),
        (["--existing", "continue", "--check"], "--existing"),
        (["--check", "--commit-every", "3"], "--commit-every"),
        (["--commit-every", "0"], "--commit-every"),
    ],
)
def test_bad_usage(arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *arguments]) == 2
    assert names in capsys.readouterr().err.splitlines()[-1]


def test_room_for_every_generation_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    huge = ["train", "--width", 32768, "--heads", 32, "--layers", 400, tmp_path / "store"]

    def needed(*more: object) -> float:
        found = re.search(r"needs ([\d.]+) TiB of disk", failure(capsys, *huge, *more))
        assert found
        return float(found[1])

    assert needed("--commit-every", 5) == pytest.approx(3 * needed(), rel=0.01)
    assert "leave --commit-every out" in failure(capsys, *huge, "--commit-every", 5)


# In this process, a request to stop comes at a chosen moment


@pytest.mark.parametrize(
    "more",
    quick(
        [
            ["--accumulate", "2", "--checkpoint"],
            ["--micro-batch", "2", "--commit-every", "1"],
            ["--update", "in_backward"],
            ["--activations", "store"],
        ],
        [["--accumulate", "2", "--checkpoint"]],
    ),
    ids=" ".join,
)
def test_stopped_anywhere_in_a_step(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forward of one block, in backward of another, between steps: what is committed is the last whole step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        begin = ["train", *TINY, "--steps", "4", "--warmup", "1", *more]
        with monkeypatch.context() as patch:
            checks = stop_at(patch, 0)
            assert main([*begin, str(tmp_path / "whole"), "--json", str(tmp_path / "whole.json")]) == 0
        each = (len(checks) - 2) // 4  # steps; one is before the first, one after the last commit
        places = range(2 + each, 2 + 3 * each)  # the second and the third
        for at in random.Random(each).sample(places, min(3, len(places))):
            folder, report = tmp_path / f"{at}", tmp_path / f"{at}.json"
            with monkeypatch.context() as patch:
                stop_at(patch, at)
                ended = main([*begin, str(folder)])
            assert ended == 130
            shown = capsys.readouterr().err
            assert re.search(r"stopped at step ([123]); generation \d has step \1; continue with", shown), shown
            assert main(["train", str(folder), "--existing", "resume", "--json", str(report)]) == 0
            assert losses(report) == losses(tmp_path / "whole.json"), f"stopped at call {at}"
            assert same(values(folder), values(tmp_path / "whole")), f"stopped at call {at}"
    finally:
        torch.set_num_threads(threads)
