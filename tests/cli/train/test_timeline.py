"""``tiered train --timeline`` and ``--plot``: a trace that its viewers take, with every byte in it, and a picture."""

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.cli.train.test_train import TINY, failure, tiered, train_tiny
from tests.store.test_timeline import quiet
from tiered import TieredStore, Timeline, TransferEvent
from tiered.cli.main import main
from tiered.cli.train.timeline import as_trace, describe_timeline, shares, write_timeline
from tiered.reporting.timeline import TimelinePart, activity, lanes
from tiered.telemetry import PoolEvent, SpanEvent, StallEvent
from tiered.types import Direction, Urgency

Line = list[tuple[float, float]]


def check(trace: dict[str, Any]) -> dict[str, list[Line]]:
    """Every rule of the format that the viewers rely on. Returns the lines of each group, each a list of (ts, end) in ns."""
    events = trace["traceEvents"]
    assert all(isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"] for event in events)
    assert {event["ph"] for event in events} <= {"M", "X", "C"}
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    assert not times or times[0] >= 0
    found: dict[str, dict[int, Line]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        assert event["pid"] in groups
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert (event["pid"], event["tid"]) in named
            began = round(event["ts"] * 1000)
            found[groups[event["pid"]]][event["tid"]].append((began, began + round(event["dur"] * 1000)))
        if event["ph"] == "C":
            assert event["args"]["used"] >= 0
    return {group: list(lines.values()) for group, lines in found.items()}


def apart(line: Line) -> bool:
    return all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(line))


def nested(line: Line) -> bool:
    until: list[float] = []
    for began, ended in line:
        while until and until[-1] <= began:
            until.pop()
        if until and ended > until[-1]:
            return False
        until.append(ended)
    return True


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """A trace of a real training, and what was printed."""
    folder = tmp_path_factory.mktemp("timeline")
    more = ["--steps", 8, "--timeline", folder / "it.json", "--timeline-steps", 2]
    done = tiered("train", *TINY, *more, folder / "store")
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "it.json").read_text()), done.stdout


class TestTrace:
    def test_the_viewers_take_it(self, recorded: tuple[dict[str, Any], str]) -> None:
        lines = check(recorded[0])
        assert set(lines) >= {"step", "compute", "nvme to dram", "dram to nvme", "leases"}
        for group, own in lines.items():
            assert all(nested(line) if group in ("step", "compute") else apart(line) for line in own), group
        assert len(lines["compute"]) == len(lines["step"]) == 1

    def test_what_is_in_it(self, recorded: tuple[dict[str, Any], str]) -> None:
        events = [event for event in recorded[0]["traceEvents"] if event["ph"] == "X"]
        assert [event["name"] for event in events if event["cat"] == "step"] == ["step 6", "step 7"]
        compute = {event["name"].split()[0] for event in events if event["cat"] == "compute"}
        assert compute == {"forward", "backward", "update"}
        reads = [event for event in events if event["cat"] == "nvme to dram"]
        assert all(event["args"]["bytes"] > 0 and event["args"]["queued_us"] >= 0 for event in reads)
        assert {event["args"]["urgency"] for event in reads} <= {"demand", "prefetch"}
        leases = [event["args"] for event in events if event["cat"] == "leases"]
        assert {lease["access"] for lease in leases} == {"read", "write"}
        assert any(event["ph"] == "C" and event["name"] == "dram" for event in recorded[0]["traceEvents"])

    def test_it_is_told(self, recorded: tuple[dict[str, Any], str]) -> None:
        assert "timeline  2 steps, " in recorded[1]
        assert "transfers under way: nvme to dram" in recorded[1]
        other = recorded[0]["otherData"]
        assert sum(other["activity_seconds"].values()) == pytest.approx(other["seconds"])
        assert other["dropped_events"] == 0

    def test_fewer_steps_than_warm_up(self, tmp_path: Path) -> None:
        done = train_tiny(tmp_path / "store", "--timeline", tmp_path / "it.json", "--timeline-steps", 1)
        assert done.returncode == 0, done.stderr
        events = json.loads((tmp_path / "it.json").read_text())["traceEvents"]
        assert [event["name"] for event in events if event.get("cat") == "step"] == ["step 2"]


def made(began: float = 100.0, ended: float = 110.0) -> Timeline:
    timeline = Timeline({"dram": 1000, "nvme": 10_000}, began, 100)
    timeline.ended = ended
    return timeline


def transfer(started: float, ended: float, way: Direction = Direction.UP, nbytes: int = 10) -> TransferEvent:
    return TransferEvent("dram", "nvme", way, "w", nbytes, Urgency.DEMAND, started, started, ended, None)


class TestParts:
    def test_bytes_add_up_to_the_statistics(self, tmp_path: Path) -> None:
        with TieredStore.open(tmp_path, dram="1MiB") as store:
            timeline, before, after = quiet(store)
        trace = as_trace(timeline)
        check(trace)
        reads, writes = after.up.bytes - before.up.bytes, after.down.bytes - before.down.bytes
        for group, moved in ("nvme to dram", reads), ("dram to nvme", writes):
            assert sum(event["args"]["bytes"] for event in trace["traceEvents"] if event.get("cat") == group) == moved > 0

    def test_lanes(self) -> None:
        spans = [(0.0, 4.0), (1.0, 2.0), (2.0, 3.0), (1.5, 5.0), (4.0, 6.0)]
        assert lanes(spans, lambda span: span) == [[(0.0, 4.0), (4.0, 6.0)], [(1.0, 2.0), (2.0, 3.0)], [(1.5, 5.0)]]
        assert lanes(spans, lambda span: span, "together") == [
            [(0.0, 4.0), (1.0, 2.0), (2.0, 3.0), (4.0, 6.0)],
            [(1.5, 5.0)],
        ]

    def test_the_innermost_counts_and_waiting_before_any(self) -> None:
        timeline = made()
        timeline.spans += [
            SpanEvent("step", "step 1", 100, 110),
            SpanEvent("forward", "all", 101, 107),
            SpanEvent("forward", "one", 102, 104),
            SpanEvent("update", "one#0", 105, 106),
        ]
        timeline.stalls += [StallEvent("reads", "a lease", 104.5, 105)]
        assert activity(timeline) == [
            TimelinePart("forward", 101, 104.5),
            TimelinePart("reads", 104.5, 105),
            TimelinePart("update", 105, 106),
            TimelinePart("forward", 106, 107),
        ]
        spent = shares(timeline)["activity_seconds"]
        assert spent == {"forward": 4.5, "recompute": 0, "backward": 0, "update": 1, "reads": 0.5, "room": 0, "other": 4}

    def test_time_on_the_links_counts_once(self) -> None:
        timeline = made()
        timeline.transfers += [transfer(101, 104), transfer(102, 103), transfer(103, 105), transfer(104, 106, Direction.DOWN)]
        assert shares(timeline)["link_seconds"] == {"nvme to dram": 4, "dram to nvme": 2, "none of them": 5}
        assert "nvme to dram 40%, dram to nvme 20%, none of them 50%" in describe_timeline(timeline, 1)

    def test_instants_can_be_seen_and_stay_apart(self) -> None:
        timeline = made()
        timeline.transfers += [transfer(101, 101), transfer(101, 101), transfer(101, 102)]
        lines = check(as_trace(timeline))["nvme to dram"]
        assert all(apart(line) for line in lines)
        assert sorted(end - began for line in lines for began, end in line) == [1, 1, 10**9]

    def test_nothing_happened(self, tmp_path: Path) -> None:
        write_timeline(str(tmp_path / "it.json"), made())
        assert check(json.loads((tmp_path / "it.json").read_text())) == {}

    def test_dropped_events_are_told(self) -> None:
        timeline = made()
        timeline.dropped = 7
        assert "recorded: the first 100 events; dropped: 7" in describe_timeline(timeline, 1)


class TestPicture:
    def test_it_is_drawn(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
        from tiered.cli.train.timeline import plot_timeline

        timeline = made()
        timeline.spans += [SpanEvent("step", "step 1", 100, 110), SpanEvent("forward", "one", 102, 104)]
        timeline.stalls += [StallEvent("room", "a put", 104, 105)]
        timeline.transfers += [transfer(101, 104), transfer(104, 106, Direction.DOWN)]
        timeline.pool += [PoolEvent(100, "dram", 0), PoolEvent(105, "dram", 900)]
        path = tmp_path / "it.png"
        for _ in range(2):  # ours may be replaced
            assert main(["train", "--plot", str(path), str(tmp_path / "none"), "--text", "/nowhere"]) == 1
            plot_timeline(str(path), timeline, "a model")
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_without_matplotlib(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        shown = failure(capsys, "train", "--plot", tmp_path / "it.png", tmp_path / "store")
        assert shown == "tiered: --plot needs matplotlib: pip install '.[plot]' in a clone, or pip install matplotlib"
        assert not list(tmp_path.iterdir())


class TestUsage:
    @pytest.mark.parametrize(
        ("more", "names"),
        [
            (["--check", "--timeline", "it.json"], "--check"),
            (["--timeline-steps", "2"], "--timeline-steps"),
            (["--micro-batch", "2", "--checkpoint"], "--micro-batch"),
            (["--micro-batch", "2", "--activations", "store"], "--activations store"),
            (["--checkpoint", "--activations", "recompute"], "--checkpoint"),
            (["--activations", "disk"], "disk"),
            (["--update", "in_backward", "--clip", "1"], "--clip"),
            (["--update", "in_backward", "--accumulate", "2"], "--accumulate"),
        ],
    )
    def test_bad_usage_is_2(self, more: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["train", *more]) == 2
        assert names in capsys.readouterr().err.splitlines()[-1]

    def test_a_file_that_is_not_ours(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "thesis").write_text("years of work")
        shown = failure(capsys, "train", "--timeline", tmp_path / "thesis", tmp_path / "store")
        assert "not a report of tiered, so it stays: name another file with --timeline" in shown


@pytest.mark.parametrize("more", [["--micro-batch", "2"], ["--update", "in_backward"], ["--activations", "store"]])
def test_check_finds_the_same_numbers(more: list[str], tmp_path: Path) -> None:
    done = tiered("train", "--check", *TINY, "--steps", 3, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "identical"
