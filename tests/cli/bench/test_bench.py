"""``tiered bench``: what is counted, what is refused, and that nothing stays behind, however it ends."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import programs
from tests.cli.train.test_train import MIB, ONE_THREAD, command, failure, message
from tests.filesystems import mounted, root
from tiered import MisuseError, TieredError, TieredStore
from tiered.cli.bench import io as bench_io
from tiered.cli.bench import series as walk
from tiered.cli.bench import store as bench_store
from tiered.cli.bench.series import in_rounds
from tiered.cli.main import main
from tiered.cli.output import Progress, refuse_unwritable, write_report
from tiered.cli.stop import StopRequest
from tiered.measuring import fio, meters

KIB = 1 << 10
STORE = ["bench", "store", "--sizes", "4KiB,64KiB,1MiB", "--dram", "1MiB", "--seconds", "0.01"]
IO = ["bench", "io", "--size", "4MiB", "--dram", "1MiB", "--rounds", "2"]
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Copies with one thread: with several on few busy cores they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def found(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


class TestStore:
    def test_lines(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        report = found(capsys, *STORE, "--drive", tmp_path)
        for nbytes in 4 * KIB, 64 * KIB:
            lines = [line for line in report["lines"] if line["size_bytes"] == nbytes]
            assert [(line["operation"].split()[0], line["where"]) for line in lines] == [
                *((name, "in memory") for name in ("put", "get", "lease", "prefetch")),
                ("put", "memory full"),
                *((name, "on disk") for name in ("get", "lease", "prefetch")),
                ("lease", "fetched ahead"),
            ]
            for line in lines:
                assert line["operations"] >= 3
                times = line["latency_seconds"]
                assert 0 <= times["p50"] <= times["p90"] <= times["p99"] <= times["max"]
                assert (line["bytes_per_second"] is None) == (
                    line["operation"].startswith("prefetch") or (line["operation"], line["where"]) == ("lease", "in memory")
                )
                if line["where"] == "in memory":
                    assert line["misses"] == 0
                if line["where"] == "on disk" and not line["operation"].startswith("prefetch"):
                    assert line["misses"] == line["operations"]
        assert [line["size_bytes"] for line in report["skipped"]] == [MIB]
        assert "needs room for two tensors, and --dram is 1.0 MiB" in report["skipped"][0]["why"]
        assert not list(tmp_path.iterdir())

    def test_the_table(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*STORE, "--drive", str(tmp_path)]) == 0
        shown = capsys.readouterr()
        lines = shown.out.splitlines()
        head = next(line for line in lines if line.startswith("size "))
        assert head.split() == ["size", "operation", "tensor", "runs", "per", "s", "rate", "p50", "p90", "p99", "max"]
        assert sum(line.startswith("64KiB ") for line in lines) == 9
        assert lines[-1].startswith("1MiB: skipped, ")
        assert shown.err.splitlines()[-1] == "done"

    @pytest.mark.parametrize(
        ("dram", "disk", "memory", "why"),
        [
            (8 << 30, 1 << 30, 1 << 40, "of disk, 1.0 GiB is free"),
            (8 << 30, 1 << 40, 1 << 30, "of memory, 1.0 GiB is available"),
            ((2 << 30) - 1, 1 << 40, 1 << 40, "room for two"),
        ],
    )
    def test_a_size_that_does_not_fit(self, dram: int, disk: int, memory: int, why: str) -> None:
        assert why in (bench_store.Measurement.of(1 << 30, dram).why_not(dram, disk, memory) or "")

    @pytest.mark.parametrize("nbytes", [1, 4096, 5000, MIB, 16 * MIB, 1 << 30])
    @pytest.mark.parametrize("dram", [MIB, 5 * MIB, 1 << 30, 4 << 30])
    def test_plans_leave_some_tensors_on_disk(self, nbytes: int, dram: int) -> None:
        plan = bench_store.Measurement.of(nbytes, dram)
        if plan.why_not(dram, 1 << 50, 1 << 50) is None:
            slot = -(-nbytes // 4096) * 4096
            assert plan.pool <= dram
            assert 2 * slot <= plan.pool < plan.tensors * slot < plan.disk_bytes


class TestIo:
    def test_bytes_are_counted_twice(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        report = found(capsys, *IO, "--drive", tmp_path)
        assert (report["pool_bytes"], report["tensor_bytes"], report["tensors"]) == (MIB, 128 * KIB, 32)
        for mode, nbytes in (("read", 4 * MIB), ("write", 4 * MIB), ("mixed", 8 * MIB)):
            ours = report["modes"][mode]["tiered"]
            if mode != "mixed":  # there, what was fetched ahead may be evicted again before its turn
                assert ours["bytes"] == [nbytes, nbytes]
            assert min(ours["bytes"]) >= nbytes  # nothing was answered from memory
            if report["direct"] and not report["in_memory"] and None not in ours["kernel_bytes"]:
                assert all(counted >= nbytes for counted in ours["kernel_bytes"])
            rates = ours["bytes_per_second"]
            assert 0 < rates["min"] <= rates["median"] <= rates["max"]
            assert len(rates["all"]) == 2
            assert report["modes"][mode]["ratios"] == {}
        assert not list(tmp_path.iterdir())

    def test_only_what_was_asked_for_and_moved_counts(self) -> None:
        usage = meters.Usage(2.0, 1.0, meters.GIB, meters.GIB, None, None)
        assert walk.passed(usage, 3 * meters.GIB).rate == meters.GIB
        assert walk.passed(usage, meters.GIB).rate == meters.GIB / 2
        assert walk.passed(usage, meters.GIB).cpu_seconds_per_gib == 1.0

    def test_the_table(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*IO, "--drive", str(tmp_path), "--backend", "posix", "--json", str(tmp_path / "it.json")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[-3:]] == ["read", "write", "mixed"]
        assert any(line.startswith("posix on ") for line in lines)
        assert json.loads((tmp_path / "it.json").read_text())["backend"] == "posix"

    def test_sizes_that_are_not_those_of_the_options_are_named(self) -> None:
        setup = walk.Setup.of(size=64 * MIB + 1, dram=256 * MIB, backend="auto")
        dram, tensors, size = setup.notes()
        assert dram.startswith("not --dram 256MiB: the store has a quarter of --size 67,108,865B")
        assert tensors.startswith("not tensors of 16MiB: ")
        assert tensors.endswith("; --size 512MiB is enough")
        assert size.startswith("not --size 67,108,865B: ")
        assert walk.Setup.of(size=1 << 30, dram=256 * MIB, backend="auto").notes() == []
        for dram, said in ((64, "; --dram 128MiB is enough"), (128, "")):
            assert "".join(walk.Setup.of(size=512 * MIB, dram=dram * MIB, backend="auto").notes()).endswith(said)
        [tensors] = walk.Setup.of(size=128 * MIB, dram=8 * MIB, backend="auto").notes()
        assert tensors.endswith("; --dram 128MiB and --size 512MiB is enough")

    @root
    def test_without_o_direct_it_says_so(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with mounted(tmp_path / "memory", "-t", "ramfs", "none") as memory:
            assert main([*IO, "--drive", str(memory)]) == 0
            shown = capsys.readouterr().out
            assert "THIS IS MEMORY, not a drive" in shown
            assert "kernel counted less than was moved" in shown

    def test_page_cache_is_named(self) -> None:
        from tiered.cli.output import told_io

        assert "NO O_DIRECT" in told_io({"backend": "posix", "filesystem": "nfs", "in_memory": False, "direct": False})

    @pytest.mark.parametrize(("option", "least"), [("--size", "4MiB"), ("--dram", "1MiB")])
    def test_too_small(self, option: str, least: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shown = failure(capsys, *IO, option, "64KiB", "--drive", tmp_path)
        assert shown == f"tiered: {option} 64KiB is too small to measure: the least is {least}"

    def test_full_disk(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(walk, "free_on", lambda folder: MIB)
        shown = failure(capsys, *IO, "--drive", tmp_path).splitlines()[-1]
        assert f"{tmp_path} has 1.0 MiB free: lower --size" in shown


class TestFio:
    @needs_fio
    def test_beside_ours(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fio, "ENGINES", ("libaio", "nonsense"))
        monkeypatch.setattr(fio, "RESERVED", tmp_path / "nobody may reserve")
        (tmp_path / "disk").mkdir()
        report = found(capsys, *IO, "--fio", "--drive", tmp_path / "disk")
        assert report["fio"]["version"].startswith("fio-")
        assert list(report["fio"]["unavailable"]) == ["nonsense"]
        assert "huge page" in report["fio"]["buffers"]
        for mode in "read", "write", "mixed":
            assert list(report["modes"][mode]) == ["tiered", "fio libaio", "ratios"]
            assert len(report["modes"][mode]["fio libaio"]["bytes_per_second"]["all"]) == 2
            assert report["modes"][mode]["ratios"]["fio libaio"]["median"] > 0
        assert not list((tmp_path / "disk").iterdir())

    @needs_fio
    @pytest.mark.parametrize("size", [17 * MIB, 64 * MIB], ids=["17 MiB", "64 MiB"])
    def test_fio_writes_where_the_store_writes_and_nothing_that_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
    ) -> None:
        monkeypatch.setattr(fio, "RESERVED", tmp_path / "nobody may reserve")
        (tmp_path / "disk").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "disk")
        setup = walk.Setup.of(size=size, dram=4 * MIB, backend="auto")
        with (
            meters.scratch_store(str(tmp_path / "link"), dram=setup.pool) as store,
            fio.huge_buffers(MIB) as buffers,
            StopRequest() as stop,
        ):
            passes = walk.Workload(store, setup, stop)
            passes.prepare()
            data = bench_io._descriptor(store.folder)
            assert data is not None
            beside = bench_io._Beside(str(tmp_path), data, setup.moved, buffers)
            assert beside.where == "the store's own data file"
            assert len(beside.writers) == 2
            for mode in ("write", "mixed", "write", "read"):
                beside.of(fio.Job(mode, "psync"))()  # type: ignore[arg-type]
                beside.of(fio.Job(mode, "psync", order="random"))()  # type: ignore[arg-type]
                passes.read()  # every checksum
                passes.mixed()
        assert not list((tmp_path / "disk").iterdir())

    def test_none_here(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        assert "apt-get install fio" in failure(capsys, *IO, "--fio", "--drive", tmp_path)

    def test_pages_are_reserved_and_given_back(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pages = tmp_path / "nr_hugepages"
        pages.write_text("3\n")
        monkeypatch.setattr(fio, "RESERVED", pages)
        monkeypatch.setattr(fio, "_free_pages", lambda: int(pages.read_text()))

        def interrupted() -> None:
            with fio.huge_buffers(16 * MIB) as buffers:
                assert pages.read_text() == str(3 + 16)
                assert buffers is fio.RESERVED_PAGES
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert pages.read_text() == "3"

    @pytest.mark.parametrize(("transparent", "buffers"), [(True, fio.TRANSPARENT), (False, fio.PLAIN)])
    def test_without_reserved_pages(
        self, transparent: bool, buffers: fio.Buffers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fio, "RESERVED", tmp_path / "none")
        monkeypatch.setattr(fio, "_free_pages", lambda: 0)
        monkeypatch.setattr(fio, "_transparent", lambda: transparent)
        with fio.huge_buffers(16 * MIB) as chosen:
            assert chosen is buffers

    @needs_fio
    def test_what_fio_says_reaches_the_caller(self, tmp_path: Path) -> None:
        with pytest.raises(TieredError, match="fio with ioengine=nonsense failed"):
            fio.Fio(str(tmp_path), MIB, fio.PLAIN).run(fio.Job("read", "nonsense"))


@pytest.mark.parametrize("many", [1, 2, 3, 4])
def test_each_begins_as_often(many: int) -> None:
    ran: list[int] = []

    def run(number: int) -> meters.MovedBytes:
        ran.append(number)
        return meters.MovedBytes(1, 1.0, 0.0)

    runs = {"read": {str(number): partial(run, number) for number in range(many)}}
    with StopRequest() as stop, Progress(io.StringIO()) as progress:
        in_rounds(runs, 2 * many, stop, progress)
    rounds = [ran[at : at + many] for at in range(0, len(ran), many)]
    assert all(sorted(one) == list(range(many)) for one in rounds)
    assert sorted(one[0] for one in rounds) == sorted([*range(many)] * 2)


class TestOtherPeoplesFolders:
    @pytest.mark.parametrize("run", [STORE, IO], ids=["store", "io"])
    def test_what_is_there_stays(self, run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        (tmp_path / "tiered-scratch-mine").mkdir()
        found(capsys, *run, "--drive", tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["thesis.txt", "tiered-scratch-mine"]
        assert (tmp_path / "thesis.txt").read_text() == "years of work"

    @pytest.mark.parametrize("run", [STORE, IO], ids=["store", "io"])
    def test_refused(self, run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with TieredStore.open(tmp_path / "store", dram=MIB) as store:
            store.put("mine", torch.arange(10))
        before = sorted(os.listdir(tmp_path / "store"))
        assert "holds a store, which stays as it is" in failure(capsys, *run, "--drive", tmp_path / "store")
        assert sorted(os.listdir(tmp_path / "store")) == before
        assert f"{tmp_path / 'none'} does not exist" in failure(capsys, *run, "--drive", tmp_path / "none")
        assert "cannot make a folder in /proc" in failure(capsys, *run, "--drive", "/proc")
        assert "it.json: No such file" in failure(capsys, *run, "--drive", tmp_path, "--json", tmp_path / "no" / "it.json")


class TestUsage:
    @pytest.mark.parametrize("arguments", [["info", "--help"], ["bench", "--help"], ["bench", "io", "--help"]])
    def test_help_has_an_example(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert f"examples:\n  tiered {arguments[0]}" in shown

    @pytest.mark.parametrize(
        ("arguments", "names"),
        [
            (["bench", "nonsense"], "nonsense"),
            (["bench", "store", "--sizes", "4KiB,,"], "--sizes"),
            (["bench", "store", "--sizes", "0"], "--sizes"),
            (["bench", "store", "--seconds", "0"], "--seconds"),
            (["bench", "io", "--rounds", "0"], "--rounds"),
            (["bench", "io", "--size", "1XB"], "1XB"),
            (["info", "--quickly"], "--quickly"),
        ],
    )
    def test_bad_usage_is_2(self, arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(arguments) == 2
        shown = capsys.readouterr()
        assert names in shown.err.splitlines()[-1]
        assert not shown.out


class TestStopping:
    """Whatever ends it, the disk is as before."""

    @pytest.fixture
    def running(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
        """A benchmark that would take hours and measures already."""
        forever = {
            "store": ["bench", "store", "--sizes", "64KiB", "--dram", "4MiB", "--seconds", "100000"],
            "io": ["bench", "io", "--size", "16MiB", "--rounds", "1000000"],
            "flood": ["bench", "io", "--size", "16MiB", "--rounds", "1000000", "--mode", "flood"],
            "duration": ["bench", "io", "--size", "16MiB", "--duration", "100h"],
        }[request.param]
        arguments = command(*forever, "--drive", tmp_path)
        begin = subprocess.Popen if request.param == "io" else programs.Popen  # one way in an interpreter of its own
        with begin(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ONE_THREAD) as child:
            try:
                assert child.stderr is not None
                begun = {"store": "64KiB: preparing", "duration": "writing, "}.get(request.param, "round ")
                assert any(begun in line for line in child.stderr)
                yield child
            finally:
                child.kill()

    @pytest.mark.parametrize(
        ("running", "signum", "code"),
        [
            ("store", signal.SIGINT, 130),
            ("store", signal.SIGTERM, 143),
            ("io", signal.SIGINT, 130),
            ("flood", signal.SIGTERM, 143),
            ("duration", signal.SIGINT, 130),
            pytest.param("io", signal.SIGTERM, 143, marks=pytest.mark.soak),
            pytest.param("flood", signal.SIGINT, 130, marks=pytest.mark.soak),
            pytest.param("duration", signal.SIGTERM, 143, marks=pytest.mark.soak),
        ],
        indirect=["running"],
    )
    def test_asked_to(self, running: subprocess.Popen[str], signum: int, code: int, tmp_path: Path) -> None:
        running.send_signal(signum)
        _, errors = running.communicate(timeout=60)
        assert running.returncode == code, errors
        assert message(errors.splitlines()[-1]) == "tiered: stopped; the scratch files are removed"
        assert not list(tmp_path.iterdir())

    def test_killed(self, tmp_path: Path) -> None:
        """Only an empty folder may stay: the data has no name from the beginning."""
        program = f"""if True:
            import os, signal, torch
            from tiered.measuring.meters import scratch_store
            with scratch_store({str(tmp_path)!r}, dram=1 << 20) as store:
                store.put("x", torch.zeros(1 << 19, dtype=torch.uint8))
                store.commit()
                os.kill(os.getpid(), signal.SIGKILL)
        """
        child = programs.run([*command()[:1], "-c", program], capture_output=True, text=True, env=ONE_THREAD)
        assert child.returncode == -signal.SIGKILL, child.stderr
        left = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in left) < 4096


PACKAGE = b'{\n  "name": "mine",\n  "dependencies": {\n    "tiered": "^1.0"\n  }\n}\n'


class TestReports:
    def test_ours_is_replaced(self, tmp_path: Path) -> None:
        path = str(tmp_path / "it.json")
        for number in 1, 2:
            refuse_unwritable(path)
            write_report(path, {"number": number})
        assert json.loads((tmp_path / "it.json").read_text())["number"] == 2

    @pytest.mark.parametrize("contents", [b"years of work", b"{}", b'{"a": 1}', b"\x89PNG of a cat", PACKAGE])
    def test_anything_else_stays(self, tmp_path: Path, contents: bytes) -> None:
        (tmp_path / "thesis").write_bytes(contents)
        with pytest.raises(MisuseError, match=r"thesis exists already and is not a report of tiered, .* with --plot"):
            refuse_unwritable(str(tmp_path / "thesis"), "--plot")
        assert (tmp_path / "thesis").read_bytes() == contents

    def test_nothing_is_left_by_the_check(self, tmp_path: Path) -> None:
        """As the command may fail, or be stopped; also where a link points to what is not there yet."""
        (tmp_path / "link").symlink_to("target")
        for name in "new", "link":
            refuse_unwritable(str(tmp_path / name))
        assert os.listdir(tmp_path) == ["link"]
        assert main(["verify", str(tmp_path / "none"), "--json", str(tmp_path / "new")]) == 1
        assert os.listdir(tmp_path) == ["link"]

    def test_a_fifo_without_a_reader(self, tmp_path: Path) -> None:
        """It is not waited for; a reader that comes finds the report, not the end that a check left."""
        os.mkfifo(tmp_path / "fifo")
        refuse_unwritable(str(tmp_path / "fifo"))
        with subprocess.Popen(["cat", str(tmp_path / "fifo")], stdout=subprocess.PIPE) as reader:
            refuse_unwritable(str(tmp_path / "fifo"))
            write_report(str(tmp_path / "fifo"), {"number": 1})
            assert json.loads(reader.communicate(timeout=60)[0])["number"] == 1

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(MisuseError, match="Is a directory"):
            refuse_unwritable(str(tmp_path))

    def test_what_is_no_file_is_written_to(self, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        for path in "/dev/null", "/dev/full", str(tmp_path / "empty"):
            refuse_unwritable(path)
