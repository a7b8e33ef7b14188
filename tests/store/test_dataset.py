"""``store.reader()`` and ``TieredDataset``: workers that are forked or spawned, each with a store of its own."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests import programs
from tests.fakes import in_child
from tests.stress.contents import content
from tiered import CapacityError, ForkedStore, Generation, KeyNotFound, MisuseError, StoreClosed, TieredDataset, TieredStore
from tiered.format.generations import generations

MIB = 1 << 20
COUNT = 12


def pins(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith("reader.")]


def fill(store: TieredStore, version: int) -> None:
    for number in range(COUNT):
        store.put(f"x{number:02}", content("x", 100 * version + number, 3000))
        store.put(f"y{number:02}", torch.tensor(100 * version + number))
    store.commit({"version": version})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore.open(tmp_path / "state", dram=MIB, keep=1) as opened:
        fill(opened, 1)
        yield opened
        opened.close()


def of_version(batches: list[dict[str, torch.Tensor]], version: int) -> None:
    images = torch.cat([batch["image"] for batch in batches])
    labels = torch.cat([batch["label"] for batch in batches])
    assert labels.tolist() == [100 * version + number for number in range(COUNT)]
    for number in range(COUNT):
        assert torch.equal(images[number], content("x", 100 * version + number, 3000))


def in_dicts() -> list[dict[str, str]]:
    return [{"image": f"x{number:02}", "label": f"y{number:02}"} for number in range(COUNT)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", ["writer", "reader", "handle"])
def test_a_loader_of_forked_workers(store: TieredStore, workers: int, source: str) -> None:
    """Beside the writer that made it, which goes on committing, epoch after epoch."""
    folder = Path(store.folder)
    reading = TieredStore.open(folder, dram=MIB, access="read")
    data = TieredDataset({"writer": store, "reader": reading, "handle": reading.reader()}[source], in_dicts(), dram="2MiB")
    reading.close()
    assert data[3]["label"].item() == 103, "this process has a store of its own, too, before it forks"
    loader = DataLoader(data, batch_size=5, num_workers=workers, multiprocessing_context="fork" if workers else None)
    for version in (2, 3, 4):
        of_version(list(loader), 1)
        fill(store, version)
        assert data.generation == 1
        assert generations(folder)[0] == 1
    data.close()
    assert len(pins(folder)) == 1, "only the handle's: workers have closed theirs"
    newest = TieredDataset(store, in_dicts())
    of_version(list(DataLoader(newest, batch_size=4)), 4)
    newest.close()


SPAWNED = """
import sys
import torch
from torch.utils.data import DataLoader
from tiered import TieredDataset, TieredStore

if __name__ == "__main__":
    torch.set_num_threads(1)
    with TieredStore.open(sys.argv[1], dram="1MiB", keep=1) as store:
        data = TieredDataset(store, [f"y{number:02}" for number in range(12)], dram="1MiB")
        loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="spawn", persistent_workers=True)
        for number in range(2):
            print([batch.tolist() for batch in loader])
            store.put("y00", torch.tensor(-1))
            store.commit()
        del loader
"""


@pytest.mark.soak
def test_a_loader_of_spawned_workers(store: TieredStore, tmp_path: Path) -> None:
    folder = store.folder
    store.close()
    (tmp_path / "spawned.py").write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(tmp_path / "spawned.py"), folder],
        capture_output=True,
        text=True,
        env={**programs.ONE_THREAD, "PYTHONPATH": os.getcwd()},
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[[100, 101, 102, 103], [104, 105, 106, 107], [108, 109, 110, 111]]"] * 2
    assert pins(Path(folder)) == []


def test_a_handle_in_other_processes(store: TieredStore) -> None:
    """It keeps what it is of; with it gone, others hear what it was for."""
    folder = Path(store.folder)
    handle = store.reader()
    sent = pickle.dumps(handle)
    fill(store, 2)
    fill(store, 3)

    def reads() -> None:
        for received in (handle, pickle.loads(sent)):
            with received.open(dram=MIB) as mine:
                assert (mine.generation, mine.meta) == (1, {"version": 1})
                assert mine.get("y03").item() == 103
        handle.close()  # its parent's pin stays

    in_child(reads)
    assert "generation 1" in repr(handle)
    assert f"pinned by process {os.getpid()}" in repr(handle)
    assert "not pinned" in repr(pickle.loads(sent))
    fill(store, 4)
    with pickle.loads(sent).open(dram=MIB) as mine:
        assert mine.get("y03").item() == 103
    handle.close()
    handle.close()
    fill(store, 5)
    assert generations(folder) == [5]
    with pytest.raises(MisuseError, match=r"no generation 1; there are: 5 \(a handle keeps its generation until"):
        pickle.loads(sent).open(dram=MIB)
    assert pins(folder) == []


def test_a_handle_that_nobody_refers_to_lets_go(store: TieredStore) -> None:
    folder = Path(store.folder)
    handle = store.reader()
    assert len(pins(folder)) == 1
    del handle
    assert pins(folder) == []
    with store.reader():
        assert len(pins(folder)) == 1
    assert pins(folder) == []


def test_another_store_in_the_same_place(store: TieredStore, tmp_path: Path) -> None:
    handle = store.reader()
    store.close()
    shutil.move(store.folder, tmp_path / "elsewhere")
    with TieredStore.open(tmp_path / "state", dram=MIB) as other:
        fill(other, 7)
    with pytest.raises(MisuseError, match="is not the one of this handle any more"):
        handle.open(dram=MIB)
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(MisuseError, match="is not a folder"):
        handle.open(dram=MIB)


def test_what_the_first_attempts_are_told(store: TieredStore) -> None:
    """To give a store itself to workers, or to use it in a forked child."""
    for attempt in (pickle.dumps, lambda it: DataLoader([it], num_workers=1, multiprocessing_context="spawn").__iter__()):
        with pytest.raises(MisuseError, match=r"store\.reader\(\), or DataLoader a TieredDataset\(store\)"):
            attempt(store)

    def use() -> None:
        with pytest.raises(ForkedStore, match=r"store\.reader\(\), or DataLoader a TieredDataset\(store\)"):
            store.get("x00")

    in_child(use)
    store.put("x00", torch.zeros(1))
    store.close()
    with pytest.raises(StoreClosed):
        store.reader()


def test_what_has_no_commit(tmp_path: Path) -> None:
    for path, durability in ((None, "commit"), (tmp_path / "scratch", "none"), (tmp_path / "new", "commit")):
        with TieredStore.open(path, dram=MIB, durability=durability) as store:  # type: ignore[arg-type]
            with pytest.raises(MisuseError, match="commit first"):
                store.reader()
            store.close()


def test_samples(store: TieredStore) -> None:
    data: Any = TieredDataset(store, transform=lambda tensor: tensor.sum().item())
    assert len(data) == 2 * COUNT
    assert data[COUNT] == 100, "the keys are sorted"
    assert data.__getitems__([-1, COUNT + 1, -1]) == [111, 101, 111]
    for wrong in (2 * COUNT, -2 * COUNT - 1):
        with pytest.raises(IndexError, match=f"no sample {wrong}: the data set has {2 * COUNT},"):
            data[wrong]
    mixed: Any = TieredDataset(store.reader(), ["y01", {"a": "y02", "b": "y03"}, {}])
    assert mixed[0].item() == 101
    assert {name: tensor.item() for name, tensor in mixed[1].items()} == {"a": 102, "b": 103}
    assert mixed[2] == {}
    mixed[0].zero_()
    assert mixed[0].item() == 101, "samples are copies"
    again = pickle.loads(pickle.dumps(mixed))
    assert again[0].item() == 101
    for one in (data, mixed, again):
        one.close()
        one.close()
    assert mixed[0].item() == 101, "it opens again"
    mixed.close()


def test_what_a_data_set_refuses(store: TieredStore) -> None:
    for wrong, error, words in (
        (["nothing"], KeyNotFound, "'nothing' in generation 1"),
        ([{"a": "nothing"}], KeyNotFound, "'nothing'"),
        (["x0"], KeyNotFound, "did you mean 'x"),
        ("x00", MisuseError, "samples is a list"),
        ({"a": "x00"}, MisuseError, "samples is a list"),
    ):
        with pytest.raises(error, match=words):
            TieredDataset(store, wrong)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="reads an open store"):
        TieredDataset("state/")  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="leave access, generation out"):
        store.reader().open(access="write", generation=1)
    assert pins(Path(store.folder)) == []


def test_a_tensor_larger_than_the_smallest_budget(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram="96MiB") as store:
        store.put("large", torch.zeros(70 * MIB, dtype=torch.uint8))
        store.commit()
        data: Any = TieredDataset(store)
        assert data[0].numel() == 70 * MIB
        data.close()
        for dram, words in (("1KiB", "smallest is 1,048,576 bytes"), ("64MiB", r"'large' needs 73,400,320 bytes.* dram=67,")):
            with pytest.raises(CapacityError, match=words):
                TieredDataset(store, dram=dram)
        exact: Any = TieredDataset(store, dram="70MiB")
        assert exact[0].numel() == 70 * MIB
        exact.close()
        store.close()


def test_a_number_that_was_given_again(store: TieredStore) -> None:
    """The job went back, and commits something else under the number that a closed handle has."""
    fill(store, 2)
    handle = store.reader()
    handle.close()
    folder = store.folder
    fill(store, 3)
    store.close()
    for _ in range(2):
        TieredStore.open(folder, dram=MIB, generation=Generation(0, newer="drop")).close()
    with TieredStore.open(folder, dram=MIB) as again:
        fill(again, 8)
        fill(again, 9)
        assert again.generation == handle.generation
    with pytest.raises(MisuseError, match="is not the one of this handle any more"):
        handle.open(dram=MIB)


def one_by_one(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    return batch


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (1, "spawn")])
def test_small_tensors(store: TieredStore, workers: int, method: str | None) -> None:
    small = store.small("tokens", page="4KiB")
    small.update({f"{number:03}": torch.arange(number) for number in range(200)})
    store.commit()
    with store.reader() as reader:
        small["001"] = torch.zeros(7)
        store.commit()
        data = TieredDataset(reader, small="tokens")
        assert len(data) == 200
        loader = DataLoader(data, batch_size=32, num_workers=workers, multiprocessing_context=method, collate_fn=one_by_one)
        found = [one for batch in loader for one in batch]
        assert [one.tolist() for one in found] == [list(range(number)) for number in range(200)]
        pairs = TieredDataset(reader, [{"a": "003", "b": "150"}], small="tokens")
        assert {name: len(one) for name, one in pairs[0].items()} == {"a": 3, "b": 150}
        data.close()
        pairs.close()


def test_small_tensors_that_are_not_there(store: TieredStore) -> None:
    store.small("tokens")["a"] = torch.ones(1)
    store.commit()
    with store.reader() as reader:
        with pytest.raises(KeyNotFound, match="no tensor 'b' among the small tensors 'tokens'"):
            TieredDataset(reader, ["a", "b"], small="tokens")
        with pytest.raises(KeyNotFound, match="no small tensors 'other'"):
            TieredDataset(reader, small="other")
