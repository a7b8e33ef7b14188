"""``tiered bench io`` beyond its default: sweeps, floods, sustained writes, pictures."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import programs
from tests.backends import HERE
from tests.cli.bench.test_bench import found, needs_fio
from tests.cli.train.test_train import MIB, ONE_THREAD, command, failure, message
from tests.filesystems import mounted, root
from tiered import MisuseError, TieredError
from tiered.cli import output
from tiered.cli.arguments import seconds
from tiered.cli.bench import sustained, sweep
from tiered.cli.main import main
from tiered.cli.stop import StopRequest
from tiered.measuring import fio

SWEEP = ["bench", "io", "--sweep", "--size", "1MiB", "--rounds", "2", "--seconds", "10"]
STORE = ["bench", "io", "--size", "4MiB", "--dram", "1MiB", "--rounds", "2"]
FEW = ["--block", "64KiB", "--depth", "1,4", "--backends", "posix", "--mode", "read,mixed", "--order", "random"]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TestSweep:
    def test_every_combination(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        sizes = ["--block", "64KiB,256KiB", "--depth", "1,4"]
        report = found(capsys, *SWEEP, *sizes, "--checksums", "off,on", "--drive", tmp_path)
        points = report["points"]
        assert len(points) == 3 * 2 * 2 * 2 * 2
        keys = ("mode", "order", "block_bytes", "depth", "checksums")
        assert len({tuple(point[key] for key in keys) for point in points}) == len(points)
        for point in points:
            assert list(point["by"]) == HERE
            assert list(point["ratios"]) == HERE[1:]
            for name in HERE:
                one = point["by"][name]
                assert len(one["bytes_per_second"]["all"]) == 2
                assert one["bytes_per_second"]["min"] > 0
                times = one["latency_seconds"]
                assert 0 < times["p50"] <= times["p99"] <= times["p99.9"] <= times["max"]
                if report["direct"] and not report["in_memory"] and None not in one["kernel_bytes"] and name != "aiofiles":
                    assert all(counted >= MIB for counted in one["kernel_bytes"])  # a whole pass, by the drive itself
        assert not list(tmp_path.iterdir())

    def test_the_table(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*SWEEP, *FEW, "--drive", str(tmp_path), "--json", str(tmp_path / "it.json")]) == 0
        lines = capsys.readouterr().out.splitlines()
        head = next(at for at, line in enumerate(lines) if line.split()[:2] == ["block", "depth"])
        assert " ".join(lines[head].replace("MB/s", "GB/s").split()) == "block depth by GB/s CPU s per GiB p50 p99 p99.9"
        rows = [line.split()[:5] for line in lines[head + 1 : head + 5]]
        assert rows == [[mode, "random", "64KiB", depth, "posix"] for mode in ("read", "mixed") for depth in "14"]
        assert [line.split(":")[0] for line in lines[-2:]] == ["best of read, random", "best of mixed, random"]
        assert json.loads((tmp_path / "it.json").read_text())["points"]
        assert os.listdir(tmp_path) == ["it.json"]

    def test_buffered(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*SWEEP, *FEW, "--buffered", "--block", "1000B", "--drive", str(tmp_path)]) == 0
        assert "BUFFERED, through the page cache, as asked" in capsys.readouterr().out

    def test_blocks_that_cannot_be(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shown = failure(capsys, *SWEEP, "--block", "2MiB", "--drive", tmp_path)
        assert shown == "tiered: --block 2MiB is more than --size 1MiB"
        if found(capsys, *SWEEP, *FEW, "--drive", tmp_path)["direct"]:
            assert "--block 1,000B is not aligned: " in failure(capsys, *SWEEP, "--block", "1000B", "--drive", tmp_path)
        assert not list(tmp_path.iterdir())

    def test_a_backend_that_does_not_work(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sweep, "unavailable", lambda: {"libaio": "no such ring", "posix": None})
        words = [*SWEEP, *FEW, "--drive", tmp_path]
        report = found(capsys, *words, "--backends", "libaio,posix")
        assert report["unavailable"] == {"libaio": "no such ring"}
        assert list(report["points"][0]["by"]) == ["posix"]
        assert failure(capsys, *words, "--backends", "libaio") == "tiered: none of these backends works here: no such ring"

    @needs_fio
    def test_fio_does_the_same(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fio, "ENGINES", ("libaio", "nonsense"))
        monkeypatch.setattr(fio, "RESERVED", tmp_path / "nobody may reserve")
        (tmp_path / "disk").mkdir()
        report = found(capsys, *SWEEP, *FEW, "--fio", "--checksums", "off,on", "--drive", tmp_path / "disk")
        assert list(report["fio"]["unavailable"]) == ["nonsense"]
        for point in report["points"]:
            assert list(point["by"]) == (["posix", "fio libaio"] if point["checksums"] == "off" else ["posix"])
        assert not list((tmp_path / "disk").iterdir())

    @pytest.mark.parametrize("mode", ["read", "write", "mixed"])
    def test_what_fio_is_told(self, mode: fio.Mode) -> None:
        told = fio.Fio("/there", MIB, fio.PLAIN, "name").command(fio.Job(mode, "psync", 4096, 3, "random", "buffered", 0.5))
        assert {"--filename=/there/name", "--bs=4096", "--iodepth=3", "--direct=0", "--runtime=0.500s"} <= set(told)
        assert f"--rw={ {'read': 'randread', 'write': 'randwrite', 'mixed': 'randrw'}[mode]}" in told
        assert ("--end_fsync=1" in told) == (mode != "read")
        assert not any(word.startswith("--offset") for word in told)
        assert "--offset=3" in fio.Fio("/there", MIB, fio.PLAIN, "name", 3).command(fio.Job(mode, "psync"))

    @root
    def test_in_memory_it_says_so(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with mounted(tmp_path / "memory", "-t", "ramfs", "none") as memory:
            assert main([*SWEEP, *FEW, "--drive", str(memory)]) == 0
            assert "THIS IS MEMORY, not a drive" in capsys.readouterr().out

    def test_stopped(self, tmp_path: Path) -> None:
        forever = ["bench", "io", "--sweep", "--size", "4MiB", *FEW, "--rounds", "1000000", "--drive", str(tmp_path)]
        with programs.Popen(command(*forever), stderr=subprocess.PIPE, text=True, env=ONE_THREAD) as child:
            try:
                assert child.stderr is not None
                assert any("round " in line for line in child.stderr)
                child.send_signal(signal.SIGTERM)
                errors = child.communicate(timeout=60)[1]
            finally:
                child.kill()
        assert child.returncode == 143
        assert message(errors.splitlines()[-1]) == "tiered: stopped; the scratch files are removed"
        assert not list(tmp_path.iterdir())


class TestStoreModes:
    def test_latencies_of_tensors(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        report = found(capsys, *STORE, "--mode", "write,read", "--drive", tmp_path)
        assert list(report["modes"]) == ["read", "write"]
        for series in report["modes"].values():
            times = series["tiered"]["latency_seconds"]
            assert 0 < times["p50"] <= times["p99"] <= times["p99.9"] <= times["max"]
        assert "flood" not in report

    def test_in_random_order(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        report = found(capsys, *STORE, "--mode", "read", "--order", "random", "--drive", tmp_path)
        assert report["order"] == "random"
        assert min(report["modes"]["read"]["tiered"]["bytes"]) > 0

    def test_flood(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        report = found(capsys, *STORE, "--mode", "flood", "--drive", tmp_path)
        assert report["modes"] == {}
        flood = report["flood"]
        assert flood["leases"] == 2 * report["tensors"] == 64
        for name in "p50", "p99", "p99.9", "max":
            assert flood["ratios"][name] == pytest.approx(flood["flooded_seconds"][name] / flood["alone_seconds"][name])
        assert flood["written_bytes_per_second"]["min"] > 0
        assert not list(tmp_path.iterdir())

    def test_flood_as_a_table(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*STORE, "--mode", "read,flood", "--drive", str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[-4:]] == ["one", "alone", "in", "ratio"]
        assert any(line.startswith("read  tiered  ") for line in lines)

    def test_what_stops_the_flood_is_said(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tiered.cli.bench.series import StoreWorkload

        replace = StoreWorkload.replace

        def fails(self: StoreWorkload, key: str) -> None:
            if isinstance(self._stop, StopRequest) and not self._stop._before:  # the other thread's
                raise TieredError("the drive is gone")
            replace(self, key)

        monkeypatch.setattr(StoreWorkload, "replace", fails)
        capsys.readouterr()
        assert main([*STORE, "--mode", "flood", "--drive", str(tmp_path)]) == 1
        assert capsys.readouterr().err.splitlines()[-1] == "tiered: the drive is gone"
        assert not list(tmp_path.iterdir())


class TestSustained:
    def test_windows(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sustained, "SHORTEST", 0.01)
        report = found(capsys, *STORE[:-2], "--duration", "0.2s", "--drive", tmp_path)["sustained"]
        windows = report["windows"]
        assert windows[0]["began_seconds"] == 0
        assert all(one["ended_seconds"] == two["began_seconds"] for one, two in itertools.pairwise(windows))
        assert sum(window["bytes"] for window in windows) == report["whole"]["bytes"] > 0
        assert report["whole"]["ended_seconds"] >= 0.2
        assert report["least"]["bytes_per_second"] == min(window["bytes_per_second"] for window in windows)
        assert (report["first"], report["last"]) == (windows[0], windows[-1])
        assert not list(tmp_path.iterdir())

    def test_the_table(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*STORE[:-2], "--duration", "0.1", "--drive", str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-5].split()[0] in ("GB/s", "MB/s")
        assert [line.split()[0] for line in lines[-4:]] == ["whole", "first", "last", "least"]

    @pytest.mark.parametrize(("text", "value"), [("90", 90.0), ("1.5s", 1.5), ("2min", 120.0), ("1h", 3600.0), ("\n5s", 5.0)])
    def test_times(self, text: str, value: float) -> None:
        assert seconds(text) == value

    @pytest.mark.parametrize("text", ["", "s", "5\ns\n", "\n", "1e308h", "1e400", "nan", "-1s", "0"])
    def test_no_times(self, text: str) -> None:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a time; write one like"):
            seconds(text)


class TestPlot:
    def test_without_matplotlib(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        for words in (STORE, SWEEP, [*STORE[:-2], "--duration", "1s"]):
            shown = failure(capsys, *words, "--drive", tmp_path, "--plot", tmp_path / "it.png")
            assert shown == "tiered: --plot needs matplotlib: pip install '.[plot]' in a clone, or pip install matplotlib"
        assert not list(tmp_path.iterdir())

    def test_another_kind_of_file(self) -> None:
        with pytest.raises(MisuseError, match=r"it\.pdf does not end in \.png"):
            output.refuse_unplottable("it.pdf")

    @pytest.mark.parametrize("words", [STORE, [*SWEEP, *FEW], [*STORE[:-2], "--duration", "0.1s"]], ids=["io", "sweep", "time"])
    def test_pictures(self, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
        picture = tmp_path / "it.png"
        for _ in range(2):  # its own picture is replaced
            assert main([*words, "--drive", str(tmp_path), "--plot", str(picture)]) == 0
            assert picture.read_bytes().startswith(b"\x89PNG")
        picture.write_bytes(b"\x89PNG of a cat")
        assert "not a report of tiered, so it stays" in failure(capsys, *words, "--drive", tmp_path, "--plot", picture)
        assert picture.read_bytes() == b"\x89PNG of a cat"


class TestUsage:
    @pytest.mark.parametrize(
        ("words", "names"),
        [
            (["--mode", "read,fast"], "'fast' is none of read, write, mixed, flood"),
            (["--sweep", "--mode", "flood"], "no mode flood"),
            (["--sweep", "--backend", "posix"], "--backends instead"),
            (["--sweep", "--duration", "60s"], "not allowed with"),
            (["--sweep", "--depth", "1,0"], "--depth"),
            (["--sweep", "--checksums", "maybe"], "--checksums"),
            (["--block", "1MiB"], "--block needs --sweep"),
            (["--buffered"], "--buffered needs --sweep"),
            (["--order", "sequential,random"], "name one"),
            (["--duration", "soon"], "'soon' is not a time"),
            (["--duration", "1s", "--fio"], "--duration only writes"),
            (["--mode", "flood", "--plot", "it.png"], "--plot draws rates"),
        ],
    )
    def test_bad_usage_is_2(self, words: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "io", *words]) == 2
        shown = capsys.readouterr()
        assert names in shown.err.splitlines()[-1]
        assert not shown.out

    def test_files_that_are_there_stay(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "thesis").write_text("years of work")
        for words in (STORE, SWEEP, [*STORE[:-2], "--duration", "1s"]):
            assert "so it stays: name another file with --json" in failure(
                capsys, *words, "--drive", tmp_path, "--json", tmp_path / "thesis"
            )
        assert (tmp_path / "thesis").read_text() == "years of work"
