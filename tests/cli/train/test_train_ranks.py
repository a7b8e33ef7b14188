"""``tiered train`` in the processes that torchrun starts: what rank 0 tells, resuming, stopping, and a rank that is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests import programs
from tests.cli.train.launched import PIDS
from tests.cli.train.trainings import ONE_THREAD, TINY, command, losses, same, tiered
from tiered import MisuseError
from tiered.cli.arguments import Launched
from tiered.cli.train.ranks import Peers
from tiered.cli.train.resume import refuse_others
from tiered.format.generations import generations
from tiered.store.at_rest import StoreAtRest
from tiered.zero.rank_stores import newest_set

STEPS = 6
TRAINING = [*TINY, "--lr", "3e-3", "--warmup", "2", "--steps", STEPS, "--accumulate", 2]
ENVIRONMENT = ONE_THREAD | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
TORCHRUN = "torch.distributed.run"


def launch(ranks: int, *arguments: object, restarts: int = 0) -> list[str]:
    torchrun = ["-m", TORCHRUN, "--standalone", "--nproc-per-node", ranks, "--max-restarts", restarts]
    return [sys.executable, *map(str, [*torchrun, "-m", "tiered", "train", *arguments])]


def on_ranks(ranks: int, *arguments: object, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    given = launch(ranks, *arguments, restarts=restarts)
    return subprocess.run(given, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)


@contextmanager
def started(pids: Path, *arguments: object, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Two ranks, whose processes' numbers are in files of ``pids``; torchrun and they are forked. Killed at the end of the
    block at the latest."""
    pids.mkdir()
    given = ["tests.cli.train.launched" if word == TORCHRUN else word for word in launch(2, *arguments, restarts=restarts)]
    environment = ENVIRONMENT | {PIDS: str(pids)}
    with programs.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        try:
            yield child
        finally:
            for process in [*psutil.Process(child.pid).children(recursive=True), child] if child.poll() is None else []:
                process.kill()


@contextmanager
def side_by_side(*arguments: object, start: int = 0, starts: int = 0) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks without a torchrun that would end the others when one ends: the store in which they meet is rank 0's. ``start``
    of as many as ``starts`` more. Killed at the latest at the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    said |= {"TORCHELASTIC_RESTART_COUNT": start, "TORCHELASTIC_MAX_RESTARTS": starts}
    with ExitStack() as stack:
        children = []
        for rank in range(2):
            environment = ENVIRONMENT | {name: str(value) for name, value in {**said, "RANK": rank, "LOCAL_RANK": rank}.items()}
            child = programs.Popen(
                command("train", *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
            children.append(stack.enter_context(child))
            stack.callback(child.kill)
        yield children


def forked_ranks(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Both of ``side_by_side``, once they have ended: what all said, and 0 where all ended with it."""
    with side_by_side(*arguments) as children:
        said = [child.communicate(timeout=300) for child in children]
        codes = [child.returncode for child in children]
    return subprocess.CompletedProcess([], max(codes, key=abs), *("".join(words) for words in zip(*said, strict=True)))


def ours(stderr: str) -> list[str]:
    """Without what torchrun says itself."""
    return [line.removeprefix("tiered: ") for line in stderr.splitlines() if line.startswith("tiered: ")]


def values(folder: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Parameters and moments of all ranks, as of the last commit of all of them."""
    newest = newest_set(folder)
    assert newest is not None
    assert newest.ranks == ranks
    found = {}
    for rank, (where, joint) in enumerate(zip(newest.folders, newest.joints, strict=True)):
        with StoreAtRest(where, generation=joint.generation) as store:
            found |= {f"{rank} {key}": store.get(key) for key in store if not key.startswith("model/checkpoint")}
    return found


def step_of(folder: Path) -> int:
    """Of the newest commit of all ranks."""
    newest = newest_set(folder)
    assert newest is not None
    with StoreAtRest(newest.folders[0], generation=newest.joints[0].generation) as store:
        return int(store.manifest.meta["step"])  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A training of two ranks that nothing disturbed, in ``many``, and its report ``many.json``."""
    folder = tmp_path_factory.mktemp("whole")
    done = forked_ranks(*TRAINING, folder / "many", "--json", folder / "many.json")
    assert done.returncode == 0, done.stderr
    return folder, done


def report(whole: tuple[Path, subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((whole[0] / "many.json").read_text())
    return found


def test_rank_0_prints_for_all(whole: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = whole
    assert ours(done.stderr) == []
    assert done.stdout.count("model     GPT") == 1
    assert len(re.findall(rf"^step {STEPS}/{STEPS} ", done.stdout, re.MULTILINE)) == 1
    assert "ranks     2, stage 3" in done.stdout
    assert f"torchrun --nproc-per-node 2 -m tiered train {folder}/many --existing resume --steps 12" in done.stdout
    found = report(whole)
    assert (found["ranks"], found["stage"], found["steps"]) == (2, 3, STEPS)
    assert found["tokens_per_second"] * found["seconds"] == pytest.approx(2 * 2 * 2 * 16 * STEPS)
    assert sorted(path.name for path in (folder / "many").iterdir()) == ["rank-0-of-2", "rank-1-of-2"]


def test_it_is_the_training_of_one_process_with_the_batch_of_all(
    whole: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The same texts in the same order, from the same initial values; sums are in another order."""
    arguments = [*TRAINING]
    arguments[arguments.index("--batch") + 1] = 4
    assert tiered("train", *arguments, tmp_path / "one", "--json", tmp_path / "one.json").returncode == 0
    assert losses(whole[0] / "many.json") == pytest.approx(losses(tmp_path / "one.json"), abs=1e-4)


@pytest.mark.soak
def test_a_rank_is_killed_and_torchrun_starts_all_again(
    whole: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """With --existing continue from the first start on, which begins anew; what ends is bit for bit what was never killed."""
    folder, written = tmp_path / "many", tmp_path / "many.json"
    arguments = [*TRAINING, folder, "--existing", "continue", "--json", written, "--commit-every", 1, "--timeout", 30]
    with started(tmp_path / "pids", *arguments, restarts=3) as child:
        # The first generation is of each rank alone, the next one of all.
        stores = [folder / f"rank-{rank}-of-2" for rank in range(2)]
        while not all(path.is_dir() and max(generations(path), default=0) > 1 for path in stores):
            assert child.poll() is None
            time.sleep(0.01)
        os.kill(int((tmp_path / "pids" / "1").read_text()), signal.SIGKILL)
        out, err = child.communicate(timeout=200)
    assert child.returncode == 0, err
    found = re.findall(r"^resumed   after step (\d)", out, re.MULTILINE)
    assert found
    assert 1 <= int(found[-1]) < STEPS
    assert all("rank 1 ended" in line for line in ours(err) if "waited for" in line), err  # unless torchrun ends it before
    assert losses(written) == losses(whole[0] / "many.json")
    assert same(values(folder, 2), values(whole[0] / "many", 2))


def test_ctrl_c_stops_all_after_one_step_and_resuming_goes_on(
    whole: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder, written = tmp_path / "many", tmp_path / "many.json"
    with started(tmp_path / "pids", *TRAINING, folder) as child:
        assert child.stdout is not None
        assert any(line.startswith("step 1/") for line in child.stdout)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=100)
    (line,) = ours(err)
    found = re.fullmatch(
        r"stopped at step (\d); generation 2 has step \1; continue with: torchrun --nproc-per-node 2 -m tiered train "
        rf"{folder} --existing resume",
        line,
    )
    assert found, line
    assert step_of(folder) == int(found[1]) < STEPS
    done = forked_ranks(folder, "--existing", "resume", "--json", written)
    assert done.returncode == 0, done.stderr
    assert losses(written) == losses(whole[0] / "many.json")
    assert same(values(folder, 2), values(whole[0] / "many", 2))


@pytest.mark.soak
def test_other_numbers_of_ranks_go_on_with_the_newest_commit(
    whole: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """One process takes over from two ranks, and goes on with its own; then two take over from that, whose own is older."""
    folder, written = shutil.copytree(whole[0] / "many", tmp_path / "many"), tmp_path / "one.json"
    old = losses(whole[0] / "many.json")
    done = tiered("train", folder, "--existing", "resume", "--steps", STEPS + 2, "--json", written)
    assert done.returncode == 0, done.stderr
    assert f"resumed   after step {STEPS}, the commit of another number of ranks in {folder}" in done.stdout
    assert losses(written)[:STEPS] == old
    assert len(losses(written)) == STEPS + 2
    done = tiered("train", folder, "--existing", "resume", "--steps", STEPS + 3, "--json", written)
    assert f"resumed   after step {STEPS + 2}, generation 1" in done.stdout
    one = losses(written)
    for ranks in (1, 2):
        with pytest.raises(MisuseError, match="a training of one process already"):
            refuse_others(str(folder), ranks)
    done = forked_ranks(folder, "--existing", "resume", "--steps", STEPS + 4, "--stage", 1, "--json", tmp_path / "two.json")
    assert done.returncode == 0, done.stderr
    assert f"resumed   after step {STEPS + 3}, the commit of another number of ranks" in done.stdout
    assert losses(tmp_path / "two.json")[: STEPS + 3] == one
    assert step_of(folder) == STEPS + 4
    done = tiered("train", *TRAINING, folder)
    assert done.returncode == 1
    assert f"{folder} has a training of 2 ranks already: continue it with --existing resume" in done.stderr


def test_what_one_rank_cannot_do_is_said_once(whole: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    folder = shutil.copytree(whole[0] / "many", tmp_path / "many")
    (folder / "rank-1-of-2" / "data.0").write_bytes(b"damaged")
    done = forked_ranks(folder, "--existing", "resume", "--steps", 99)
    assert done.returncode == 1
    (line,) = ours(done.stderr)
    assert line.startswith("rank 1: ")
    assert "rank-1-of-2" in line


@pytest.mark.soak
def test_a_host_that_hangs_with_the_store_in_which_ranks_met_is_told_by_the_others(tmp_path: Path) -> None:
    """Asked whether somebody told already, that store does not answer; nor need it, for the process to end."""
    with side_by_side(*TRAINING, "--steps", 100_000, tmp_path / "many", "--timeout", "3s") as (lost, other):
        assert lost.stdout is not None
        assert any(line.startswith("step 1/") for line in lost.stdout)
        lost.send_signal(signal.SIGSTOP)
        _, err = other.communicate(timeout=60)
    assert other.returncode == 1
    (line,) = ours(err)
    assert "and rank 0 did not answer" in line


@pytest.mark.soak
def test_a_training_that_is_over_is_no_failure_when_all_start_again(
    whole: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """As when a rank was lost after the last commit. Otherwise it is one, which is told once."""
    many, said = whole[0] / "many", []
    with side_by_side(many, "--existing", "continue", start=1, starts=3) as children:
        for child in children:
            said += ours(child.communicate(timeout=100)[1])
        assert [child.returncode for child in children] == [0, 0]
    done = forked_ranks(many, "--existing", "resume")
    assert done.returncode == 1
    for line in (*said, *ours(done.stderr)):
        said_by_one = re.sub(r"^rank \d: ", "", line)
        assert said_by_one.startswith(f"the training in {many} has completed {STEPS} of its {STEPS} steps: ")
    assert len(said) == len(ours(done.stderr)) == 1


@pytest.mark.soak
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_training_that_diverges_ends_all(stage: int, tmp_path: Path) -> None:
    done = on_ranks(2, *TRAINING, tmp_path / "many", "--stage", stage, "--lr", "1e30", "--warmup", 1)
    assert done.returncode == 1
    (line,) = ours(done.stderr)
    assert re.match(r"rank \d: the (loss|norm of the gradients) of step \d is (nan|inf): training diverged", line)


@pytest.mark.soak
def test_a_time_limit_is_the_same_for_all(tmp_path: Path) -> None:
    """Ranks whose learning rates differed would end with other parameters, which resuming compares."""
    arguments = [*TRAINING[:-4], "--minutes", 0.05, "--update", "in_backward"]
    done = on_ranks(2, *arguments, tmp_path / "many", "--stage", 2, "--json", tmp_path / "it.json")
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "it.json")) >= 1
    kept = values(tmp_path / "many", 2)
    for key, value in kept.items():
        if key.startswith("0 ") and "/param/" in key and "#" not in key:
            assert value.equal(kept["1" + key[1:]])


@pytest.mark.soak
def test_what_is_said_of_the_command_line_is_said_once(tmp_path: Path) -> None:
    done = on_ranks(2, "--stage", 4, tmp_path)
    assert done.stderr.count("is none of") == 1
    done = on_ranks(2, *TRAINING, tmp_path, "--existing", "overwrite", restarts=1)
    assert done.stderr.count("--max-restarts: --existing continue") == 2  # once for each start


def test_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Launched(1, 4, 2).command == ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "-m", "tiered"]
    assert Launched(0, 2, 2).command == ["torchrun", "--nproc-per-node", "2", "-m", "tiered"]
    assert Peers().launched.command == ["tiered"]
    assert "RANK" not in os.environ
