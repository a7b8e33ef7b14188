"""``tiered train`` on filesystems that are in the way."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from tests import programs
from tests.cli.train.test_train import MIB, ONE_THREAD, TINY, command, message, tiered
from tests.filesystems import fill, mounted, root, small_ext4
from tiered import TieredStore


@root
def test_without_o_direct_it_says_so_and_goes_on(tmp_path: Path) -> None:
    with mounted(tmp_path / "memory", "-t", "ramfs", "none") as memory:
        done = tiered("train", *TINY, "--steps", 2, memory / "store")
        assert done.returncode == 0, done.stderr
        notes = [line for line in done.stderr.splitlines() if line.startswith("tiered: note: ")]
        assert len(notes) == 1
        assert "O_DIRECT" in notes[0]
        assert "no O_DIRECT here" in done.stdout


@root
def test_a_neighbour_fills_the_disk_during_training(tmp_path: Path) -> None:
    """One line, exit code 1, and the commit before still loads."""
    with small_ext4(tmp_path, 128 * MIB) as disk:
        with TieredStore.open(disk / "store", dram="2MiB", keep=1) as store:
            store.commit(meta={"step": 0})
        larger = [*TINY, "--layers", "6", "--width", "256", "--dram", "4MiB"]  # 57 MiB of state: it cannot be there already
        running = programs.Popen(
            command("train", *larger, "--steps", 50, disk / "store"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ONE_THREAD,
        )
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("writing initial values"):
                running.send_signal(signal.SIGSTOP)
                fill(disk)
                running.send_signal(signal.SIGCONT)
                break
        _, errors = running.communicate(timeout=120)
        assert running.returncode == 1, errors
        said = message(errors)
        assert "no space left" in said or "free" in said
        assert str(disk / "store") in said
        (disk / "neighbour").unlink()
        with TieredStore.open(disk / "store", dram="2MiB") as store:
            assert store.meta == {"step": 0}
            assert len(store) == 0
