"""docs/problems-elsewhere.md: each of its rows has a test or a page, which are there; and tests for rows that had none."""

from __future__ import annotations

import ast
import os
import re
import signal
from pathlib import Path
from types import FrameType

import pytest
import torch

from tiered import CapacityError, MisuseError, TieredStore, zero
from tiered.io.posix import PosixBackend

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "problems-elsewhere.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", PAGE)))
KIB, MIB = 1 << 10, 1 << 20


# The page


def test_it_has_twenty_rows_with_evidence_each() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 21))
    for number, _, _, evidence in ROWS:
        assert re.search(r"`tests/[\w/]+\.py::\w+|\]\([\w/.-]+\.md", evidence), number


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda part: part.rpartition("/")[2])
def test_the_tests_that_it_names_exist(file: str, name: str) -> None:
    """A function ``test_…`` of a module, or a method of a class ``Test…``, is what pytest collects."""
    *classes, function = name.split("::")
    body = ast.parse((ROOT / file).read_text()).body
    for each in classes:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == each)
    found = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function]
    assert len(found) == 1
    assert Path(file).name.startswith("test_")
    assert function.startswith("test_")


# 1: "Not enough buffers": prefetch and pool do not agree


def test_hints_for_more_than_the_pool_holds_fail_nobody(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=MIB, durability="none") as store:
        for number in range(64):
            store.put(f"w{number}", torch.full((16 * KIB,), float(number)))  # 4 MiB, four pools
        with store.lease("w0") as held, store.lease("w1") as also_held:
            store.prefetch([f"w{number}" for number in range(64)])
            for number in range(2, 64):
                with store.lease(f"w{number}") as w:
                    assert float(w[0]) == float(w[-1]) == number
                del w
            assert float(held[0]) == 0
            assert float(also_held[0]) == 1
        assert store.statistics().tier("dram").peak <= MIB


# 2: A tensor that is larger than a buffer


def test_no_size_of_a_buffer_bounds_a_tensor(tmp_path: Path) -> None:
    """One of exactly the pool's size goes through; one byte more is refused at once, with the number."""
    with TieredStore.open(tmp_path / "state", dram=2 * MIB, durability="none") as store:
        whole = torch.arange(2 * MIB, dtype=torch.int32).to(torch.uint8)
        for key in ("a", "b"):
            store.put(key, whole)
        assert torch.equal(store.get("a"), whole)
        with pytest.raises(CapacityError, match=r"2,097,15[23]"):
            store.put("c", torch.zeros(2 * MIB + 1, dtype=torch.uint8))
        assert torch.equal(store.get("b"), whole)


# 3: "buffer nbytes != file bytes" after a change of shape, or beside an old file


def test_a_tensor_may_change_its_size_at_any_time(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.empty(0)
    for size in (1000, 1, 300_000, 0, 4097, 1024):
        with TieredStore.open(tmp_path / "state", dram=4 * MIB) as store:
            if "w" in store:
                assert torch.equal(store.get("w"), expected)
            expected = torch.randn(size, generator=generator)
            store.put("w", expected)
            store.put("w", expected[: size // 2])
            store.put("w", expected)
    with TieredStore.open(tmp_path / "state", dram=4 * MIB, access="read") as store:
        assert torch.equal(store.get("w"), expected)


# 6: Checkpoints that grow


def test_commits_take_no_more_disk_from_the_third_on(tmp_path: Path) -> None:
    taken = []
    with TieredStore.open(tmp_path / "state", dram=4 * MIB) as store:
        for number in range(12):
            for key in range(4):
                store.put(f"w{key}", torch.full((64 * KIB,), float(number)))  # 1 MiB, all of it new
            store.commit({"number": number})
            with os.scandir(tmp_path / "state") as found:
                taken.append(sum(entry.stat().st_blocks * 512 for entry in found))
            generations = [path.name for path in (tmp_path / "state").glob("manifest.*")]
            assert len(generations) <= 2
    assert max(taken[3:]) <= taken[2]


# 7: An EINTR ends the training


def test_signals_at_any_time_change_no_number(tmp_path: Path) -> None:
    def losses(folder: str) -> list[float]:
        torch.manual_seed(0)
        found = []
        with TieredStore.open(tmp_path / folder, dram=MIB) as store:
            model = zero.page(torch.nn.Sequential(*[torch.nn.Linear(96, 96) for _ in range(12)]), store)
            optimizer = zero.AdamW(model.parameters(), lr=1e-2)
            for _ in range(6):
                optimizer.zero_grad()
                loss = model(torch.ones(4, 96)).square().mean()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        return found

    alone, arrived = losses("alone"), []

    def handler(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        struck = losses("struck")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(arrived) >= 3
    assert struck == alone


# 14: Sizes and addresses that are not aligned


@pytest.mark.parametrize("backend", ["auto", "posix", "aiofiles"])
def test_no_size_and_no_address_has_to_be_aligned(tmp_path: Path, backend: str) -> None:
    memory = torch.arange(200_000, dtype=torch.int32).to(torch.uint8)
    sizes = (1, 2, 3, 511, 512, 513, 4095, 4096, 4097, 65_537, 131_071)
    with TieredStore.open(tmp_path / "state", dram=MIB, backend=backend) as store:  # type: ignore[arg-type]
        for at, size in enumerate(sizes):
            store.put(f"w{size}", memory[at + 1 : at + 1 + size])
    with TieredStore.open(tmp_path / "state", dram=MIB, backend=backend) as store:  # type: ignore[arg-type]
        for at, size in enumerate(sizes):
            assert torch.equal(store.get(f"w{size}"), memory[at + 1 : at + 1 + size])


# 18: A training that goes on from random weights, in silence


def test_states_and_weights_that_are_loaded_are_those_that_train(tmp_path: Path) -> None:
    """Three steps in memory, and a save; a model with other weights loads it into a store, and goes on bit for bit."""

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def made(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))

    memory = made(0)
    torchs = torch.optim.AdamW(memory.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        step(memory, torchs)
    saved = {name: value.clone() for name, value in memory.state_dict().items()}, torchs.state_dict()
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        model = zero.page(made(1), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        assert [step(model, optimizer) for _ in range(3)] == [step(memory, torchs) for _ in range(3)]
        zero.commit(model, optimizer)
    with TieredStore.open(tmp_path / "state", dram=MIB) as store, pytest.raises(MisuseError, match="continue"):
        zero.page(made(2), store)  # random weights over trained ones: only where that is said


# 19: Memory that is rounded up to a power of two


def test_a_pool_takes_what_it_was_given(tmp_path: Path) -> None:
    """What the kernel mapped to be written: the pool, a huge page that it begins on, stacks; not the next power of two."""
    budget = 65 * MIB

    def mapped() -> int:
        found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw", Path("/proc/self/maps").read_text(), re.MULTILINE)
        return sum(int(end, 16) - int(start, 16) for start, end in found)

    with TieredStore.open(tmp_path / "first", dram=MIB, durability="none"):
        before = mapped()
        with TieredStore.open(tmp_path / "state", dram=budget, durability="none") as store:
            taken = mapped() - before
            store.put("w", torch.zeros(budget, dtype=torch.uint8))  # all of it is of use
            assert store.statistics().tier("dram").peak == budget
    assert budget <= taken < budget + 32 * MIB


# 20: A backend of one's own is refused


def test_a_backend_of_ones_own_is_one_argument(tmp_path: Path) -> None:
    class Counted(PosixBackend):
        requests = 0

        def submit(self, batch):  # type: ignore[no-untyped-def]
            accepted = super().submit(batch)
            Counted.requests += accepted
            return accepted

    with TieredStore.open(tmp_path / "state", dram=MIB, backend=Counted) as store:
        for number in range(4):
            store.put(f"w{number}", torch.full((128 * KIB,), float(number)))
    with TieredStore.open(tmp_path / "state", dram=MIB, backend=Counted) as store:
        written = Counted.requests
        assert all(float(store.get(f"w{number}")[-1]) == number for number in range(4))
    assert 0 < written < Counted.requests
