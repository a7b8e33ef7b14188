"""Striped extents of ``NvmeTier``, beside a model that knows of each block of 4 KiB whether it is in use."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tests.filesystems import fill, root, small_ext4, two_ext4
from tests.striping import lower_stripes
from tiered.errors import ManifestError
from tiered.format import stripes
from tiered.tiers.disk import FILE_BITS
from tiered.tiers.nvme import NvmeConfig, NvmeTier
from tiered.types import Slot

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 4096
STRIPE, WHOLE = 2 * BLOCK, 6 * BLOCK


@pytest.fixture(autouse=True)
def lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_stripes(monkeypatch, STRIPE, WHOLE)


def take(tier: NvmeTier, nbytes: int) -> Slot:
    slot = tier.allocate(nbytes)
    assert slot is not None, tier.refusal
    return slot


def is_striped(tier: NvmeTier, slot: Slot) -> bool:
    return tier.extent(slot)[0] == len(tier.files)


def commit(folder: Path) -> None:
    """As far as the tier looks."""
    (folder / "manifest.1").write_bytes(b"x")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in "abc"]


@pytest.fixture
def tier(folder: Path, paths: list[Path]) -> Iterator[NvmeTier]:
    tier = NvmeTier.open(NvmeConfig(folder, 3 * MIB, growth=128 * KIB, paths=paths))
    yield tier
    tier.close()


class TestAllocating:
    def test_more_than_the_limit_lies_on_all_drives(self, tier: NvmeTier) -> None:
        assert not is_striped(tier, take(tier, WHOLE))
        slot = take(tier, WHOLE + 1)
        assert is_striped(tier, slot)
        assert slot.nbytes == WHOLE + BLOCK
        assert [(file, nbytes) for file, _, nbytes in tier.ranges(slot)] == [(0, STRIPE + BLOCK), (1, STRIPE), (2, STRIPE)]
        assert len({offset for _, offset, _ in tier.ranges(slot)}) == 1
        location = tier.locate(slot)
        assert [part.path for part in location.parts] == [file.path for file in tier.files]
        assert location[:3] == location.parts[0][:3]

    def test_a_small_one_has_no_part_on_drives_that_it_does_not_reach(
        self, tier: NvmeTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stripes, "LARGEST_WHOLE", 0)
        slot = take(tier, STRIPE + 1)
        assert [(file, nbytes) for file, _, nbytes in tier.ranges(slot)] == [(0, STRIPE), (1, BLOCK)]
        assert [file.used for file in tier.files] == [STRIPE, BLOCK, 0]
        tier.free(slot)
        assert tier.used == 0

    def test_a_single_file_has_none(self, folder: Path) -> None:
        tier = NvmeTier.open(NvmeConfig(folder, MIB))
        slot = take(tier, MIB // 2)
        assert tier.extent(slot) == (0, slot.offset)
        assert tier.locate(slot).parts == ()
        tier.close()

    def test_one_drive_of_several_in_name_has_none(self, folder: Path, paths: list[Path]) -> None:
        tier = NvmeTier.open(NvmeConfig(folder, MIB, paths=paths[:1]))
        assert tier.extent(take(tier, MIB // 2))[0] == 0
        tier.close()

    def test_what_was_freed_is_used_again(self, tier: NvmeTier) -> None:
        slots = [take(tier, 100_000) for _ in range(5)]
        before = tier.file_bytes
        tier.free(slots[2])
        assert take(tier, 100_000) == slots[2]
        assert tier.file_bytes == before

    def test_the_tightest_range_is_taken(self, tier: NvmeTier) -> None:
        large, _, small, _ = (take(tier, nbytes) for nbytes in (300_000, 30_000, 100_000, 30_000))
        tier.free(large)
        tier.free(small)
        assert take(tier, 90_000).offset == small.offset

    def test_all_of_a_budget_can_be_had(self, folder: Path, paths: list[Path]) -> None:
        """The growth of the first drive leaves the others what they need."""
        tier = NvmeTier.open(NvmeConfig(folder, 96 * BLOCK, paths=paths))
        slot = take(tier, 96 * BLOCK)
        assert is_striped(tier, slot)
        assert tier.used == tier.capacity == 96 * BLOCK
        assert tier.allocate(1) is None
        tier.free(slot)
        assert [is_striped(tier, take(tier, 48 * BLOCK)) for _ in range(2)] == [True, True]
        tier.close()

    def test_without_a_range_in_common_it_lies_on_one_drive(self, folder: Path, paths: list[Path]) -> None:
        tier = NvmeTier.open(NvmeConfig(folder, 96 * BLOCK, paths=paths))
        first = [take(tier, 6 * BLOCK) for _ in range(15)]  # 30 of 32 blocks of each
        assert [tier.extent(slot)[0] for slot in first] == [0, 1, 2] * 5
        for slot in first[:9:3] + first[4:9:3] + first[14:]:
            tier.free(slot)
        slot = take(tier, 12 * BLOCK)
        assert tier.extent(slot)[0] == 0
        tier.free(slot)
        tier.free(first[1])  # now there is one at the beginning of two, not of the third
        assert not is_striped(tier, take(tier, 12 * BLOCK))
        tier.close()

    def test_it_is_refused_where_no_drive_can_take_it_whole_either(self, tier: NvmeTier) -> None:
        assert tier.allocate(4 * MIB) is None
        assert tier.refusal is not None
        assert tier.refusal.startswith("the capacity of 3.0 MiB in ")
        assert tier.used == 0
        take(tier, 2 * MIB)
        assert tier.refusal is None

    def test_a_tensor_that_no_single_drive_could_take(self, folder: Path, paths: list[Path]) -> None:
        tier = NvmeTier.open(NvmeConfig(folder, 300 * BLOCK, paths=paths))
        for _ in range(6):
            take(tier, 6 * BLOCK)
        assert max(file.largest for file in tier.files) < 200 * BLOCK
        assert is_striped(tier, take(tier, 250 * BLOCK))
        tier.close()


class TestReopening:
    def test_in_any_order(self, folder: Path, paths: list[Path], tier: NvmeTier) -> None:
        slots = [take(tier, nbytes) for nbytes in (100_000, 5000, 300_000)]
        places = [[part[1:] for part in tier.locate(slot).parts] for slot in slots]
        used = tier.used
        tier.close()
        commit(folder)
        for number in range(4):
            random.Random(number).shuffle(paths)
            again = NvmeTier.open(NvmeConfig(folder, 3 * MIB, paths=paths))
            for slot in slots:
                again.claim(slot)
            assert again.used == used
            assert [[part[1:] for part in again.locate(slot).parts] for slot in slots] == places
            again.close()

    @pytest.mark.parametrize(
        "why", ["twice", "a part that is in use", "beyond", "misaligned", "unaligned size", "no such file"]
    )
    def test_what_a_manifest_cannot_name_is_refused_and_takes_nothing(self, tier: NvmeTier, why: str) -> None:
        slot, plain = take(tier, 100_000), take(tier, 5000)
        tier.free(slot)
        count = len(tier.files)
        wrong = {
            "twice": slot,
            "a part that is in use": tier.slot(count, tier.extent(plain)[1], 100_000),
            "beyond": tier.slot(count, tier.files[2].nbytes - 8 * BLOCK, 26 * BLOCK),
            "misaligned": Slot(slot.offset + 512 * count, slot.nbytes),
            "unaligned size": Slot(slot.offset, slot.nbytes - 1),
            "no such file": Slot(-(1 << FILE_BITS) + BLOCK, BLOCK),
        }[why]
        if why == "twice":
            tier.claim(slot)
            tier.free(plain)
            plain = slot
            wrong = tier.slot(count, tier.extent(slot)[1] + STRIPE, 5 * STRIPE)
        used = tier.used
        with pytest.raises(ManifestError, match="data file -1; there are 3" if why == "no such file" else "the manifest names"):
            tier.claim(wrong)
        assert tier.used == used
        tier.free(plain)
        assert tier.used == 0
        tier.claim(slot)

    def test_an_offset_that_no_file_can_have(self, tier: NvmeTier) -> None:
        with pytest.raises(ManifestError, match=f"{tier.folder}: an extent of .* beyond"):
            tier.slot(len(tier.files), 1 << FILE_BITS, 100_000)


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Path]]:
    """Two ext4 filesystems, of 16 and of 32 MiB."""
    with two_ext4(tmp_path, 16 * MIB, 32 * MIB) as found:
        yield found


@root
class TestFullDisks:
    def test_a_full_drive_is_left_out_until_it_has_room_again(self, disks: list[Path], folder: Path) -> None:
        tier = NvmeTier.open(NvmeConfig(folder, growth=MIB, paths=disks))
        first = take(tier, 2 * MIB)
        assert is_striped(tier, first)
        fill(disks[0])
        slots = [take(tier, 2 * MIB) for _ in range(3)]
        assert [tier.extent(slot)[0] for slot in slots] == [1, 1, 1]
        (disks[0] / "neighbour").unlink()
        tier.free(slots[0])
        assert is_striped(tier, take(tier, 4 * MIB))
        tier.close()

    def test_no_drive_grows_in_vain(self, disks: list[Path], folder: Path, tmp_path: Path) -> None:
        """A part on the second drive would take of the budget what the whole tensor needs on the first one."""
        (tmp_path / "z").mkdir()
        with small_ext4(tmp_path / "z", 8 * MIB) as last:
            tier = NvmeTier.open(NvmeConfig(folder, 12 * MIB, growth=MIB, paths=[disks[1], disks[0], last]))
            fill(last)
            slot = take(tier, 11 * MIB)
            assert not is_striped(tier, slot)
            assert [file.extents for file in tier.files[1:]] == [0, 0]
            tier.close()

    @pytest.mark.parametrize("order", [1, -1])
    def test_drives_of_different_sizes_are_used_to_the_end(self, disks: list[Path], folder: Path, order: int) -> None:
        tier = NvmeTier.open(NvmeConfig(folder, growth=MIB, paths=disks[::order]))
        small, large = (0, 1) if order == 1 else (1, 0)
        slots = []
        while (slot := tier.allocate(2 * MIB)) is not None:
            slots.append(slot)
        found = [tier.extent(slot)[0] for slot in slots]
        most = found.index(large)
        assert set(found[:most]) == {2}, "striped"
        assert found.count(2) + 2 > tier.files[small].used // MIB > 8
        assert tier.free_on_device() < 5 * MIB
        assert tier.refusal is not None
        for disk in disks:
            assert f"{disk} has " in tier.refusal
        for slot in slots:
            tier.free(slot)
        assert tier.used == 0
        tier.close()


# Any history


class AgainstBlocks(RuleBasedStateMachine):
    """``live`` and ``kept`` are the slots that the store and its generations reference, as a model has them."""

    @initialize(drives=st.integers(2, 4), limited=st.booleans(), growth=st.sampled_from([1, 16, 64]))
    def begin(self, drives: int, limited: bool, growth: int) -> None:
        self.home = Path(tempfile.mkdtemp())
        self.paths = [self.home / f"drive-{number}" for number in range(drives)]
        self.limit = 64 * drives * BLOCK if limited else None
        self.growth = growth * BLOCK
        self.live: list[Slot] = []
        self.kept: dict[int, list[Slot]] = {}
        self.generation = 0
        self.tier = self.opened()

    def opened(self) -> NvmeTier:
        return NvmeTier.open(NvmeConfig(self.home / "store", self.limit, self.growth, self.paths))

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.home)

    @property
    def in_use(self) -> set[Slot]:
        return {slot for slots in (self.live, *self.kept.values()) for slot in slots}

    def ranges(self, slot: Slot) -> list[tuple[int, int, int]]:
        """Each block of a slot by itself, by the rule of the format."""
        count = len(self.paths)
        file, at = self.tier.extent(slot)
        found = []
        for begin in range(0, slot.nbytes, BLOCK):
            stripe = begin // STRIPE
            there = (stripe % count, at + stripe // count * STRIPE + begin % STRIPE) if file == count else (file, at + begin)
            found.append((*there, BLOCK))
        return found

    def maps(self) -> list[bytearray]:
        """Of each file, a byte for each block: whether it is in use."""
        found = [bytearray(file.nbytes // BLOCK) for file in self.tier.files]
        for blocks in found:
            blocks[0] = 1
        for slot in self.in_use:
            for file, offset, _ in self.ranges(slot):
                assert not found[file][offset // BLOCK], "two extents have a block in common"
                found[file][offset // BLOCK] = 1
        return found

    @rule(blocks=st.integers(1, 60), short=st.integers(0, BLOCK - 1))
    def allocate(self, blocks: int, short: int) -> None:
        maps, sizes = self.maps(), [file.extents for file in self.tier.files]
        nbytes = blocks * BLOCK - short
        slot = self.tier.allocate(nbytes)
        if slot is not None:
            assert slot.nbytes == blocks * BLOCK
            assert not {slot} & self.in_use
            self.live.append(slot)
            assert not is_striped(self.tier, slot) or nbytes > WHOLE
        if nbytes > WHOLE and (slot is None or not is_striped(self.tier, slot)):
            assert self.limit is not None, "these drives never fill"
            self.refute_stripes(maps, sizes, blocks)
        if slot is None:
            assert self.limit is not None
            assert sum(sizes) + blocks * BLOCK > self.limit or self.limit // BLOCK - sum(sizes) // BLOCK < blocks
            assert not any(bytes(blocks) in bytes(one) for one in maps)

    def refute_stripes(self, maps: list[bytearray], sizes: list[int], blocks: int) -> None:
        """Nowhere were free blocks in common, nor would have been had the files grown to the limit."""
        assert self.limit is not None
        spare = (self.limit - sum(sizes)) // BLOCK
        parts = [sum(block // 2 % len(maps) == file for block in range(blocks)) for file in range(len(maps))]
        for at in range(1, max(map(len, maps)) + 1):
            if not any(any(one[at : at + part]) for one, part in zip(maps, parts, strict=True)):
                missing = sum(max(0, at + part - len(one)) for one, part in zip(maps, parts, strict=True) if part)
                assert missing > spare, f"block {at} of each file had room"

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 999))
    def free(self, pick: int) -> None:
        self.tier.free(self.live.pop(pick % len(self.live)))

    @rule()
    def retain(self) -> None:
        self.generation += 1
        self.tier.retain(self.generation, self.live)
        self.kept[self.generation] = list(self.live)
        assert self.tier.striped(self.generation) == any(is_striped(self.tier, slot) for slot in self.live)

    @precondition(lambda self: self.kept)
    @rule(pick=st.integers(0, 999))
    def release(self, pick: int) -> None:
        generation = sorted(self.kept)[pick % len(self.kept)]
        self.tier.release(generation)
        del self.kept[generation]

    @precondition(lambda self: self.kept)
    @rule(pick=st.integers(0, 999))
    def roll_back(self, pick: int) -> None:
        chosen = self.kept[sorted(self.kept)[pick % len(self.kept)]]
        for slot in set(self.live) - set(chosen):
            self.tier.free(slot)
        for slot in set(chosen) - set(self.live):
            self.tier.claim(slot)
        self.live = list(chosen)

    @rule(source=st.randoms(use_true_random=False))
    def restore(self, source: random.Random) -> None:
        self.live = [slot for slot in self.live if source.random() < 0.7]
        self.tier.restore(self.live)

    @precondition(lambda self: self.kept)
    @rule(source=st.randoms(use_true_random=False))
    def reopen(self, source: random.Random) -> None:
        self.tier.close()
        commit(self.home / "store")
        source.shuffle(self.paths)
        self.tier = self.opened()
        for generation, slots in sorted(self.kept.items()):
            for slot in slots:
                self.tier.claim(slot)
            self.tier.retain(generation, slots)
            if generation != max(self.kept):
                for slot in slots:
                    self.tier.free(slot)
        self.live = list(self.kept[max(self.kept)])

    @invariant()
    def as_the_model_says(self) -> None:
        if not hasattr(self, "tier"):
            return
        maps = self.maps()
        assert [file.used for file in self.tier.files] == [(sum(blocks) - 1) * BLOCK for blocks in maps]
        assert self.tier.used == sum(slot.nbytes for slot in self.in_use)
        assert self.tier.file_bytes == sum(Path(file.path).stat().st_size for file in self.tier.files)
        assert self.limit is None or sum(file.extents for file in self.tier.files) <= self.limit
        for one, other in pairwise(sorted(self.in_use)):
            assert one.offset + one.nbytes <= other.offset, "slots overlap, as ranges of a tier's space"
        for slot in self.in_use:
            there = sorted(self.tier.ranges(slot))
            assert sum(nbytes for _, _, nbytes in there) == slot.nbytes
            assert all(file != next_file for (file, _, _), (next_file, _, _) in pairwise(there))
            assert {(file, at) for file, offset, size in there for at in range(offset, offset + size, BLOCK)} == {
                (file, offset) for file, offset, _ in self.ranges(slot)
            }


QUICK = settings(deadline=None, max_examples=40, stateful_step_count=40, suppress_health_check=list(HealthCheck))
SOAK = settings(QUICK, max_examples=2000, stateful_step_count=80)


@pytest.mark.parametrize("how_often", [QUICK, pytest.param(SOAK, marks=pytest.mark.soak)], ids=["quick", "full"])
def test_any_history(how_often: settings) -> None:
    run_state_machine_as_test(AgainstBlocks, settings=how_often)
