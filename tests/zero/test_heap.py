"""When memory that was freed goes back to the system, and what is refused because there is no room for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiered.system
from tests.zero.models import Tied
from tiered import CapacityError, TieredStore, zero
from tiered import system as heap
from tiered.system import BESIDE_POOL, SCARCE, CgroupRoom, Trimmer, beside_pool

MIB = 1 << 20
POOL = 1 << 30


class Process:
    """What a process has, and what trimming would give back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, in_use: int) -> None:
        self.others, self.in_use, self.mapped = 200 * MIB, in_use, 0
        self.kept = self.trims = self.asked = 0
        self.left = 2 * SCARCE  # what it could still take
        monkeypatch.setattr(Trimmer, "_size", lambda trimmer: self.others + self.in_use + self.mapped + self.kept)
        monkeypatch.setattr(Trimmer, "_in_use", lambda trimmer: self.ask())
        monkeypatch.setattr(heap, "headroom", lambda: self.left)

    def ask(self) -> tuple[int, int]:
        self.asked += 1
        return self.in_use, self.mapped

    def trimmer(self, pool: int = POOL, largest: int = 0) -> Trimmer:
        made = Trimmer(pool, largest)
        made._trim = self.trim
        return made

    def trim(self, pad: int) -> None:
        self.trims += 1
        self.kept = 0


def test_a_little_that_was_freed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 100 * MIB)
    trimmer = process.trimmer()
    asked = process.asked
    process.kept = 32 * MIB
    for _ in range(100):
        trimmer.passed(16 * MIB)
    assert (process.trims, process.asked) == (0, asked)
    process.kept += 1
    trimmer.passed(15 * MIB)
    assert process.trims == 0, "it looks every 16 MiB"
    trimmer.passed(MIB)
    assert (process.trims, process.kept) == (1, 0)


def test_what_is_in_use_is_not_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 100 * MIB)
    trimmer = process.trimmer()
    process.in_use = 1000 * MIB
    process.mapped = 500 * MIB
    for _ in range(10):
        trimmer.passed(16 * MIB)
    assert process.trims == 0


def test_what_is_in_use_as_backward_begins_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first gradients come when the last layers' activations are gone already."""
    process = Process(monkeypatch, 100 * MIB)
    trimmer = process.trimmer()
    for _ in range(10):
        process.in_use, process.kept = 600 * MIB, 30 * MIB
        trimmer.look()
        process.in_use, process.kept = 100 * MIB, 530 * MIB
        trimmer.passed(16 * MIB)
    assert process.trims == 0


def test_a_trimmer_looks_once_in_each_backward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(Trimmer, "look", lambda trimmer: looks.append(trimmer))
    with TieredStore.open(tmp_path / "store", dram="4MiB") as store:
        model = zero.page(Tied(48, 2), store)
        for number in range(3):
            model.loss(number).backward()
            assert len(looks) == number + 1
        store.close()


def test_what_a_step_takes_again_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its activations, which are freed in the middle of each step."""
    process = Process(monkeypatch, 100 * MIB)
    trimmer = process.trimmer()
    for _ in range(10):
        process.in_use, process.kept = 600 * MIB, 30 * MIB
        trimmer.passed(16 * MIB)
        process.in_use, process.kept = 100 * MIB, 530 * MIB
        trimmer.passed(16 * MIB)
    assert process.trims == 0
    process.kept += 3 * MIB
    trimmer.passed(16 * MIB)
    assert process.trims == 1


def test_what_a_step_takes_and_frees_between_two_looks_costs_one_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 100 * MIB)
    trimmer = process.trimmer()
    for _ in range(10):
        process.kept = 44 * MIB  # free at each look, because the step had it in use before
        trimmer.passed(16 * MIB)
    assert process.trims == 1
    process.kept = 45 * MIB
    trimmer.passed(16 * MIB)
    assert process.trims == 2, "more than it had before is returned"


def test_what_fragments_leave_over_is_returned_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 100 * MIB)
    trimmer = process.trimmer()
    for _ in range(10):
        process.kept = 45 * MIB
        trimmer.passed(16 * MIB)
    assert process.trims == 10


def test_what_is_mapped_beside_the_heap_is_no_reason_to_keep_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns by itself; what the heap kept meanwhile would not."""
    process = Process(monkeypatch, 100 * MIB)
    trimmer = process.trimmer()
    process.mapped = 400 * MIB
    trimmer.passed(16 * MIB)
    process.mapped, process.kept = 0, 33 * MIB
    trimmer.passed(16 * MIB)
    assert process.trims == 1


def test_it_gives_all_back_where_little_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 500 * MIB)
    trimmer = process.trimmer()
    process.in_use, process.left = 100 * MIB, SCARCE - 1
    for turn in range(3):
        process.kept = 417 * MIB
        trimmer.passed(16 * MIB)
        assert (process.trims, process.kept) == (turn + 1, 0)


def test_a_large_parameter_leaves_less_for_what_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 100 * MIB)
    trimmer = process.trimmer(largest=beside_pool(POOL))
    process.kept = 8 * MIB + 1
    trimmer.passed(8 * MIB)
    assert process.trims == 1


def test_others_that_grew_cost_one_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool, as it is touched."""
    process = Process(monkeypatch, 100 * MIB)
    trimmer = process.trimmer()
    process.others += 300 * MIB
    for _ in range(10):
        trimmer.passed(16 * MIB)
    assert process.trims == 1


def test_it_asks_the_system() -> None:
    """A block is seen while it is there, and gone when it was trimmed."""
    trimmer = Trimmer(POOL)
    if trimmer._trim is None or trimmer._info is None:
        pytest.skip("this C library says nothing of it")
    before = sum(trimmer._in_use())
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    assert 60 * MIB < sum(trimmer._in_use()) - before < 68 * MIB
    assert trimmer._size() > 64 * MIB
    del block
    trimmer.trim()
    assert sum(trimmer._in_use()) - before < 4 * MIB


# -- refused -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a cgroup leaves, as the test says."""
    left = [1 << 40]
    monkeypatch.setattr(tiered.system, "cgroup_room", lambda: CgroupRoom("/limited", 1 << 40, left[0]))
    return left


def test_a_model_for_which_there_is_no_room_is_not_begun(tmp_path: Path, room: list[int]) -> None:
    with TieredStore.open(tmp_path / "store", dram="10MiB") as store:
        needed = 11 * MIB + BESIDE_POOL - 16 * MIB
        room[0] = needed - 1
        said = rf"building a model may take {needed:,} bytes more.*/limited leaves {needed - 1:,} of its limit"
        with pytest.raises(CapacityError, match=said):
            zero.init(store).__enter__()
        with pytest.raises(CapacityError, match=f"paging this model may take {needed:,} bytes"):
            zero.page(Tied(width=16, layers=2), store)
        assert list(store) == []
        room[0] = needed
        with zero.init(store):
            model = Tied(width=16, layers=2)
        zero.page(model, store)
        store.close()


def test_the_first_asks_for_all_and_others_for_their_part(tmp_path: Path, room: list[int]) -> None:
    with TieredStore.open(tmp_path / "store", dram="10MiB") as store:
        model = zero.page(Tied(width=16, layers=2), store)
        room[0] = 60 * MIB
        zero.export(model, tmp_path / "out")
        room[0] = 32 * MIB
        with pytest.raises(CapacityError, match="an export may take"):
            zero.export(model, tmp_path / "again")
        assert not (tmp_path / "again").exists()
        with pytest.raises(CapacityError, match="training this model may take"):
            zero.AdamW(model.parameters())
        store.close()


def test_a_window_that_was_asked_for_is_counted(tmp_path: Path, room: list[int]) -> None:
    with TieredStore.open(tmp_path / "store", dram="8MiB") as store:
        room[0] = 200 * MIB
        with pytest.raises(CapacityError, match="building a model"):
            zero.init(store, window=100 * MIB).__enter__()
        with zero.init(store):
            pass
        store.close()


def test_a_parameter_that_is_more_than_was_said_is_refused_before_it_is_written(tmp_path: Path, room: list[int]) -> None:
    with TieredStore.open(None, dram="400MiB") as store:

        def build() -> None:
            with zero.init(store):
                room[0] = 500 * MIB
                torch.nn.Linear(4096, 8192, bias=False)

        with pytest.raises(CapacityError, match=r"parameter Linear.weight of 134,217,728 bytes may take"):
            build()
        store.close()
