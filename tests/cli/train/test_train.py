"""``tiered train`` as a person meets it: what it prints, what it leaves on disk, how it fails, how it stops."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.cli.train.trainings import ONE_THREAD, TINY, command, stop_at, tiered
from tiered import TieredStore
from tiered.cli.main import main
from tiered.cli.output import Progress
from tiered.measuring.meters import Usage

MIB = 1 << 20


def message(stderr: str) -> str:
    """The one line that a failure prints."""
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("tiered: ")
    return lines[0]


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The message of a command that fails in this process."""
    capsys.readouterr()
    assert main(list(map(str, arguments))) == 1
    return message(capsys.readouterr().err)


def train_tiny(folder: Path, *more: object) -> subprocess.CompletedProcess[str]:
    return tiered("train", *TINY, "--steps", 2, folder, *more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder with a store, and the run that made it."""
    folder = tmp_path_factory.mktemp("trained") / "deep" / "store"
    words = command("train", *TINY, "--steps", 12, "--lr", "3e-3", folder, "--json", "-")
    done = subprocess.run(words, capture_output=True, text=True, env=ONE_THREAD, timeout=300)  # an interpreter of its own
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture
def copied(trained: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> Path:
    """The same store, in a folder of one's own."""
    return shutil.copytree(trained[0], tmp_path / "store")


@pytest.fixture
def report(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(trained[1].stdout)
    return found


class TestTraining:
    def test_loss_falls(self, report: dict[str, Any]) -> None:
        assert report["steps"] == len(report["loss"]["all"]) == 12
        assert report["loss"]["last"] < report["loss"]["first"] - 0.5

    def test_memory_is_what_was_allowed_and_the_state_is_larger(self, report: dict[str, Any]) -> None:
        assert report["pool"]["budget_bytes"] == MIB
        assert 0 < report["pool"]["peak_bytes"] <= MIB < report["state_bytes"] == 12 * report["parameters"]

    def test_time_and_bytes_add_up(self, report: dict[str, Any]) -> None:
        assert sum(report["time"].values()) == pytest.approx(report["seconds"])
        assert min(report["time"].values()) >= 0
        assert report["per_step"]["seconds"] * 12 == pytest.approx(report["seconds"])
        waited = report["time"]["waiting_for_reads_seconds"] + report["time"]["waiting_for_room_seconds"]
        assert report["io"]["waited_seconds"] == pytest.approx(waited)
        for way in "read", "written":
            per_parameter = report["per_step"][f"{way}_bytes_per_parameter"]
            assert per_parameter * report["parameters"] == pytest.approx(report["per_step"][f"{way}_bytes"])

    def test_the_disk_was_used(self, report: dict[str, Any]) -> None:
        if not report["direct"] and report["io"]["counted_by"] == "kernel":
            pytest.skip("the page cache hides transfers from the kernel's counters")
        assert report["per_step"]["read_bytes"] > 0
        assert report["per_step"]["written_bytes"] > 0

    def test_the_store_holds_the_model(self, trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
        with TieredStore.open(trained[0], dram=MIB) as store:
            assert store.generation == 1
            assert store.meta["step"] == 12
            assert sum(store.spec(key).nbytes for key in store if re.search("/[mv]#", key)) >= 8 * 117_504

    def test_progress_and_summary_are_for_people(self, trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
        shown = trained[1].stderr
        first = r"^step 1/12  loss \d\.\d+, \d+ tokens/s, waiting for the disk \d+% of the time  disk: reads .*, writes .*B/s"
        second = r"  memory: store \d+% of \d+\.0 MiB, rest of process \d.* MiB, free \d.* [MG]iB( \(cgroup\))?  0:\d\d to go$"
        assert re.search(first + second, shown, re.M)
        assert re.search(r"^step 12/12 ", shown, re.M)
        for line in (
            "loss ",
            "state ",
            "memory ",
            "disk ",
            "time ",
            "waited ",
            "its text  after 12 steps:",
            "saved ",
            "without prefetching: tiered train",
            "weights as safetensors: tiered export",
            "model of your own: docs/training.md",
        ):
            assert re.search(f"^{line}", shown, re.M), line
        assert "--no-prefetch" in shown

    def test_minutes_end_it_and_the_summary_goes_to_a_file(self, tmp_path: Path) -> None:
        done = tiered("train", *TINY, "--minutes", 0.01, "--no-prefetch", "--checkpoint", "--json", "it.json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        report = json.loads((tmp_path / "it.json").read_text())
        assert report["steps"] >= 1
        assert report["prefetch"] == "off"
        assert (tmp_path / "tiered-store").is_dir()
        assert re.match(
            r"tiered: no STORE was named: a GPT of [\d,]+ parameters is trained in \./tiered-store, which takes about .* of "
            "disk; Ctrl-C ends it with a commit, and this goes on from there: tiered train tiered-store --existing resume$",
            message(done.stderr),
        )
        again = tiered("train", "tiered-store", "--existing", "resume", "--steps", report["steps"] + 1, cwd=tmp_path)
        assert (again.returncode, again.stderr) == (0, ""), again.stderr


class TestCheck:
    @pytest.mark.parametrize(
        ("steps", "more"),
        [
            (20, []),
            (6, ["--checkpoint", "--no-prefetch", "--steps", "6"]),
            (4, ["--hbm", "1MiB", "--device", "cpu", "--update-tier", "hbm", "--steps", "4"]),
        ],
    )
    def test_same_numbers_as_in_memory(self, tmp_path: Path, steps: int, more: list[str]) -> None:
        done = tiered("train", "--check", *TINY, *more, "--json", "-", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads(done.stdout)
        assert report["identical"]
        assert report["steps"] == steps
        assert report["evictions"] > 20
        assert {what: compared["difference"] for what, compared in report["compared"].items()} == dict.fromkeys(
            ("losses", "gradient norms", "final parameters", "optimizer states")
        )
        assert report["compared"]["losses"]["numbers"] == 2 * steps
        assert report["compared"]["optimizer states"]["numbers"] > 2 * 117_504
        assert not list(tmp_path.iterdir())  # nothing stays

    def test_a_difference_is_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import torch

        from tiered.cli.train import check

        in_memory = check._in_memory

        def wrong(*arguments: Any) -> check.Outcome:
            outcome = in_memory(*arguments)
            outcome.parameters["norm.bias"][3] += 1
            return outcome

        monkeypatch.setattr(check, "_in_memory", wrong)
        monkeypatch.chdir(tmp_path)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            assert main(["train", "--check", *TINY, "--steps", "1"]) == 1
        finally:
            torch.set_num_threads(threads)
        shown = capsys.readouterr().out
        assert "parameter 'norm.bias' differs first at element 3" in shown
        assert shown.endswith("different\n")


class TestUsage:
    @pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
    def test_help_has_an_example_and_needs_no_torch(self, arguments: list[str]) -> None:
        script = "import sys; from tiered.cli.main import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
        assert done.stdout.endswith("0 False\n"), done.stdout + done.stderr
        assert "example" in done.stdout
        assert "tiered train --" in done.stdout

    @pytest.mark.parametrize(
        ("arguments", "names"),
        [
            (["nonsense"], "nonsense"),
            (["train", "--layers", "0"], "--layers"),
            (["train", "--dram", "1XB"], "1XB"),
            (["train", "--lr", "nan"], "--lr"),
            (["train", "--width", "10", "--heads", "3"], "--heads 3"),
            (["train", "--backend", "io_uring"], "--backend"),
            (["train", "--check", "--minutes", "1"], "--minutes"),
            (["train", "--check", "--hbm", "1MiB"], "--device cpu"),
            (["train", "--device", "cpu"], "--hbm SIZE"),
            (["train", "--seed", str(1 << 64)], "--seed"),
            (["train", "--batch", str(1 << 64)], "--batch"),
        ],
    )
    def test_bad_usage_is_2(self, arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(arguments) == 2
        shown = capsys.readouterr()
        assert names in shown.err.splitlines()[-1]
        assert not shown.out


class TestBadWorld:
    """Each time: one line that names the thing and the mend, and nothing lost."""

    def test_texts(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        text = tmp_path / "text"
        run = ["train", *TINY, tmp_path / "store", "--text"]
        assert f"{text}: No such file" in failure(capsys, *run, text)
        assert "is not a file" in failure(capsys, *run, tmp_path)
        text.write_bytes(b"")
        assert f"{text} is empty" in failure(capsys, *run, text)
        text.write_bytes(b"0123456789abcdef")
        assert "16 bytes, a context of 16 needs 17" in failure(capsys, *run, text)
        assert not (tmp_path / "store").exists()

    def test_folders_that_cannot_be_a_store(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        plain = tmp_path / "plain"
        plain.write_text("mine")
        assert str(plain) in failure(capsys, "train", *TINY, plain)
        assert str(plain) in failure(capsys, "train", *TINY, plain / "below")
        assert plain.read_text() == "mine"
        assert "/proc/nowhere" in failure(capsys, "train", *TINY, "/proc/nowhere")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_read_only_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        tmp_path.chmod(0o500)
        assert str(tmp_path) in failure(capsys, "train", *TINY, tmp_path / "store")

    def test_foreign_folder_is_left_alone(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        shown = failure(capsys, "train", *TINY, tmp_path, "--existing", "overwrite")
        assert f"{tmp_path} is not a tiered store" in shown
        assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("thesis.txt", "years of work")]

    def test_report_that_cannot_be_written_is_known_before_training(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shown = failure(capsys, "train", *TINY, tmp_path / "store", "--json", tmp_path / "no" / "it.json")
        assert "it.json: No such file" in shown
        assert not (tmp_path / "store").exists()

    def test_a_training_that_diverges_keeps_what_was_finite(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = ["train", *TINY, tmp_path / "store", "--steps", 9, "--warmup", 1, "--commit-every", 1, "--lr", "1e30"]
        assert re.search(r"of step (\d) is (nan|inf): training diverged, .* smaller --lr", failure(capsys, *run))
        with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
            assert store.meta["step"] >= 1
            assert math.isfinite(store.meta["loss"])
            store.close()

    def test_disk_too_small(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        huge = ["--width", 32768, "--heads", 32, "--layers", 400]
        shown = failure(capsys, "train", *huge, tmp_path / "store")
        assert re.search(rf"needs .* TiB of disk, {re.escape(str(tmp_path))}/store has .* free", shown)

    def test_models_beyond_all_bounds_are_not_built(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tiered.cli.train import check
        from tiered.cli.train import run as training

        for module in check, training:
            monkeypatch.setattr(module, "build", lambda shape: pytest.fail("it was built"))
        for more in [], ["--check"]:
            shown = failure(capsys, "train", *more, "--layers", 99_999_999, tmp_path / "store")
            assert re.search(r"99,999,999 layers need .* of memory .* lower --layers", shown)
            shown = failure(capsys, "train", *more, "--layers", 100_000, "--width", 76_800, tmp_path / "store")
            assert re.search(r"needs .* TiB of disk", shown)

    @pytest.mark.parametrize("shape", [(1, 8, 2, 16), (3, 64, 4, 128)])
    def test_parameters_are_counted_without_a_model(self, shape: tuple[int, int, int, int]) -> None:
        from tiered.cli.train.model import Shape, build

        parameters = sum(parameter.numel() for parameter in build(Shape(*shape)).parameters())
        assert Shape(*shape).parameters == parameters

    def test_budget_below_the_smallest_names_it_and_it_works(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Also for layers that are larger than a third of it."""
        wide = ["--layers", 1, "--width", 192, "--heads", 4, "--context", 16, "--steps", 2, tmp_path / "store"]
        shown = failure(capsys, "train", *wide, "--dram", "512KiB")
        found = re.search(r"the smallest is ([\d,]+) bytes", shown)
        assert found, shown
        done = tiered("train", *wide, "--dram", found[1].replace(",", ""))
        assert done.returncode == 0, done.stderr

    def test_existing_model_is_refused_and_can_be_replaced(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "store"
        assert train_tiny(folder).returncode == 0
        shown = failure(capsys, "train", *TINY, folder)
        assert f"{folder} has a model already (generation 1, step 2)" in shown
        assert "continue it with --existing resume, name another STORE, or replace it with --existing overwrite" in shown
        done = train_tiny(folder, "--existing", "overwrite", "--backend", "posix")
        assert done.returncode == 0, done.stderr
        with TieredStore.open(folder, dram=MIB) as store:
            assert store.generation == 2

    def test_damaged_store(self, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
        manifest = next(copied.glob("manifest*"))
        damaged = bytearray(manifest.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        manifest.write_bytes(damaged)
        assert manifest.name in failure(capsys, "train", *TINY, copied, "--existing", "overwrite")
        assert manifest.read_bytes() == damaged

    def test_second_process(self, tmp_path: Path) -> None:
        folder = tmp_path / "store"
        with TieredStore.open(folder, dram=MIB):
            done = train_tiny(folder)
        assert done.returncode == 1
        assert f"{folder} is in use by process {os.getpid()}" in message(done.stderr)


class TestStopping:
    @pytest.fixture
    def running(self, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
        """A training that would take hours and has done a step."""
        arguments = command("train", *TINY, "--steps", 1_000_000, tmp_path / "store", "--existing", "overwrite")
        with programs.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ONE_THREAD) as child:
            try:
                yield child
            finally:
                child.kill()

    def wait_for_a_step(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        assert any(line.startswith("step 1/") for line in child.stdout)

    def test_ctrl_c_in_the_first_step_commits_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stop_at(monkeypatch, 3)
        assert main(["train", *TINY, str(tmp_path / "store")]) == 130
        shown = message(capsys.readouterr().err)
        assert re.search(r"stopped at step 0; nothing was committed; the store in .*/store reopens", shown)
        with TieredStore.open(tmp_path / "store", dram=MIB) as store:
            assert len(store) == 0

    def test_before_the_first_step_the_model_of_before_stays(
        self, copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with TieredStore.open(copied, dram=MIB) as store:
            before = {key: store.get(key) for key in store}
        stop_at(monkeypatch, 3)
        assert main(["train", *TINY, str(copied), "--existing", "overwrite"]) == 130
        assert "the last commit is generation 1;" in message(capsys.readouterr().err)
        with TieredStore.open(copied, dram=MIB) as store:
            assert store.meta["step"] == 12
            assert set(store) == set(before)
            assert all(store.get(key).equal(value) for key, value in before.items())

    def test_a_second_signal_leaves_at_once(self, running: subprocess.Popen[str], tmp_path: Path) -> None:
        """Both in one moment: whichever comes first, the second finds it there."""
        self.wait_for_a_step(running)
        running.send_signal(signal.SIGSTOP)
        running.send_signal(signal.SIGINT)
        running.send_signal(signal.SIGTERM)
        running.send_signal(signal.SIGCONT)
        _, stderr = running.communicate(timeout=60)
        assert running.returncode in (130, 143)
        assert re.fullmatch(r"tiered: left at step \d+ without a commit; the store in .*/store reopens\n", stderr)
        with TieredStore.open(tmp_path / "store", dram=MIB) as store:
            assert len(store) == store.generation == 0

    def test_while_the_model_is_written(self, tmp_path: Path) -> None:
        large = ["--layers", 400, "--width", 256, "--heads", 4, "--context", 16, "--dram", "8MiB"]
        arguments = command("train", *large, tmp_path / "store")
        with programs.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ONE_THREAD) as child:
            assert child.stdout is not None
            assert any(line.startswith("writing initial values") for line in child.stdout)
            child.send_signal(signal.SIGINT)
            _, stderr = child.communicate(timeout=60)
        assert child.returncode == 130
        assert "stopped at step 0; nothing was committed" in message(stderr)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    with Progress(terminal) as progress:
        progress.preparing(5, 10)
        progress.begin()
        progress.stepped(7, 40, 7 / 40, 4.321, 512, Usage(4.0, 0.0, 4 * 10**9, 2 * 10**9, None, None, 0.5, 0.5), 0.98)
    shown = terminal.getvalue()
    assert "step 7/40" in shown
    for line in (
        "loss 4.321, 128 tokens/s, waiting for the disk 25% of the time",
        "disk: reads 1.00, writes 0.50 GB/s",
        "memory: store 98%",
    ):
        assert line in shown
    assert shown.endswith("\x1b[?25h")  # the cursor is back
