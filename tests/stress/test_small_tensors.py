"""Promises 1, 2, 3, 7 and 20 for small tensors, which share pages: SIGKILL, power loss, damage, and exceptions at any line."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends import NATIVE
from tests.stress import syscalls
from tests.stress.children import forked
from tests.stress.contents import content, extent
from tests.stress.powerloss import KINDS, Log, machine, mounted
from tests.stress.strikes import interrupted_at, is_free, lines_of, struck_at
from tests.stress.syscalls import Child
from tests.stress.tally import Tally, counts
from tiered import CorruptionError, KeyNotFound, LeaseConflict, MisuseError, SmallTensors, TieredError, TieredStore
from tiered.small.names import page_of
from tiered.small.tensors import _prepared

PROMISE = "1, 2, 3, 7, 20 (small tensors)"
MIB = 1 << 20
COUNT = 90
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")


def size(number: int) -> int:
    """Bytes of the tensor with this number: from none to more than a page of 4 KiB."""
    return (0, 1, 40, 333, 800, 5000)[number % 6]


def of(number: int, version: int) -> int | None:
    """Of which version the tensor with this number is in generation ``version``; None: there is none."""
    changed = next((at for at in range(version, max(0, version - 3), -1) if (at + number) % 3 == 0), None)
    return None if changed is None or (changed * 7 + number) % 11 == 0 else changed


def opened(folder: Path, backend: str = "auto") -> TieredStore:
    return TieredStore.open(folder, dram=MIB, nvme="8MiB", keep=2, backend=backend)  # type: ignore[arg-type]


def small_of(store: TieredStore) -> SmallTensors:
    return store.small("s", page="4KiB")


def begin(store: TieredStore) -> SmallTensors:
    """Tensors of all sizes, of which most have a value since this version, in pages that several share."""
    small = small_of(store)
    for version in (1, 2, 3):
        change(small, version)
    kinds = {key.split("/")[1].rstrip("0123456789") for key in store}
    assert kinds == {"small", "open", "page", "names"}
    return small


def pages_of(small: SmallTensors) -> dict[str, list[str]]:
    """The keys that lie in each page."""
    found: dict[str, list[str]] = {}
    known = small._do(lambda known: known)
    for key, where in known.names.where.items():
        found.setdefault(small._pages.key_of(known.head, page_of(where)), []).append(key)
    return found


def change(small: SmallTensors, version: int) -> None:
    """Bring all tensors from the version before to this one: one by one, and together."""
    together = {}
    for number in range(COUNT):
        key, wanted = f"t{number}", of(number, version)
        if wanted is None and key in small:
            small.delete(key)
        elif wanted == version and number % 2:
            small.put(key, content(key, version, size(number)))
        elif wanted == version:
            together[key] = content(key, version, size(number))
    small.update(together)


def scribble(small: SmallTensors, version: int) -> None:
    """What the next generation changes is changed twice."""
    small.update(
        {f"t{number}": content("scribble", version, size(number)) for number in range(COUNT) if (version + 1 + number) % 3 == 0}
    )


def whole(store: TieredStore, version: int, what: object) -> None:
    assert store.meta == ({"version": version} if version else {}), what
    if not version:
        return
    small = small_of(store)
    there = [number for number in range(COUNT) if of(number, version) is not None]
    assert sorted(small) == sorted(f"t{number}" for number in there), what
    found = small.get_many(f"t{number}" for number in there)
    for number, tensor in zip(there, found, strict=True):
        wanted = of(number, version)
        assert wanted is not None
        assert torch.equal(tensor, content(f"t{number}", wanted, size(number))), f"{what}: t{number} is not version {wanted}"


def rounds(store: TieredStore, say: Callable[[str], object], count: int) -> None:
    small = small_of(store)
    for version in range(store.generation + 1, store.generation + 1 + count):
        change(small, version)
        say(f"committing {version}")
        assert store.commit({"version": version}) == version
        say(f"committed {version}")
        scribble(small, version)
        store.offload()
    store.close()


# SIGKILL


def killed_at(folder: Path, backend: str, number: int) -> syscalls.Ended:
    def body(child: Child) -> None:
        with opened(folder, backend) as store:
            rounds(store, child.say, 3)

    return syscalls.run(body, syscalls.CHANGING, lambda call: syscalls.kill if call.number == number else syscalls.go_on)


@syscalls.needs_notifications
@counts(8, 300)
def test_killed_at_any_call(tmp_path: Path, backend: str, count: int, tally: Tally) -> None:
    """One store throughout: each trial begins with what the one before left."""
    folder, source = tmp_path / "state", random.Random(count)
    TieredStore.open(tmp_path / "other", dram=MIB, backend=backend).close()  # type: ignore[arg-type]
    dry = killed_at(tmp_path / "dry", backend, 0)
    assert dry.status == 0, dry.error
    before = done = 0
    while done < count:
        number = source.randrange(1, dry.calls)
        ended = killed_at(folder, backend, number)
        what = f"killed at call {number} of {dry.calls}"
        assert not ended.error, f"{what}: {ended.error}"
        acknowledged = max([before, *(int(words.split()[1]) for words in ended.said if words.startswith("committed"))])
        tried = max([acknowledged, *(int(words.split()[1]) for words in ended.said if words.startswith("committing"))])
        with opened(folder) as store:
            before = store.generation
            assert acknowledged <= before <= tried, f"{what}: generation {before} after {ended.said}"
            whole(store, before, what)
            store.close()
        assert ended.status in (0, -9)  # 0: it needed fewer calls this time
        if ended.status:
            tally.count("SIGKILL", 1)
            done += 1


# power loss


def recorded(folder: Path, backend: str) -> Log:
    with machine(folder, 1, 24 * MIB) as (ours, log):

        def body(child: Child) -> None:
            with opened(ours.folders[0] / "state", backend) as store:
                rounds(store, ours.mark, 8)

        with forked(body) as running:
            assert running.wait_end() == 0, running.said
    assert log.marks(len(log.entries), "committed") == list(range(1, 9))
    return log


@counts(12, 320)
def test_power_is_lost_at_any_moment(tmp_path: Path, count: int, tally: Tally) -> None:
    for part, backend in enumerate(NATIVE):
        log, image = recorded(tmp_path / backend, backend), tmp_path / "image0"
        left = dict.fromkeys(KINDS, count // len(NATIVE) // len(KINDS))
        states = log.states(count, part)
        while any(left.values()):
            state = next(states)
            if not left[state.kind] or not log.build(state, [image]):
                continue
            left[state.kind] -= 1
            acknowledged = max(log.marks(state.cut, "committed"), default=0)
            tried = max(log.marks(state.cut, "committing"), default=0)
            with ExitStack() as stack:
                folder = stack.enter_context(mounted(image, tmp_path / "at", ["nobarrier"])) / "state"
                with opened(folder) as store:
                    newest = store.generation
                    assert acknowledged <= newest <= tried, state
                    whole(store, newest, state)
                    small_of(store).put("afterwards", torch.ones(5))
                    store.commit({"version": "afterwards"})
                    store.close()
                with opened(folder) as store:
                    assert small_of(store)["afterwards"].tolist() == [1] * 5
                    assert len(small_of(store)) == 1 + sum(of(number, newest) is not None for number in range(COUNT) if newest)
                    store.close()
            tally.count(state.kind, 1)


# damage


@counts(60, 3000)
def test_damage_is_found_in_the_tensors_of_its_page_and_in_no_others(tmp_path: Path, count: int, tally: Tally) -> None:
    folder, source = tmp_path / "state", random.Random(count)
    with opened(folder) as store:
        pages = pages_of(begin(store))
        store.commit()
        places = {key: (extent(store, key).offset, store.spec(key).nbytes) for key in pages if key != "s/open"}
        store.close()
    assert max(map(len, pages.values())) > 3
    data = (folder / "data.0").read_bytes()
    for _ in range(count):
        hit = source.sample(sorted(places), source.randrange(1, 4))
        fd = os.open(folder / "data.0", os.O_RDWR)
        for page in hit:
            at = places[page][0] + source.randrange(places[page][1])
            os.pwrite(fd, bytes([data[at] ^ 1 << source.randrange(8)]), at)
        os.close(fd)
        lost = {key for page in hit for key in pages[page]}
        with TieredStore.open(folder, dram=MIB, access="read") as store:
            small = store.small("s")
            for key in small:
                if key in lost:
                    with pytest.raises(CorruptionError, match=f"small tensors {key!r} of 's' cannot be read: wrong checksum"):
                        small.get(key)
                else:
                    wanted = of(int(key[1:]), 3)
                    assert wanted is not None
                    assert torch.equal(small[key], content(key, wanted, size(int(key[1:])))), key
            with pytest.raises(CorruptionError) as raised:
                small.get_many(small)
            said = {key for key in small if f"{key!r}" in str(raised.value)}
            assert said
            assert said <= lost
        fd = os.open(folder / "data.0", os.O_RDWR)
        for page in hit:
            at, nbytes = places[page]
            os.pwrite(fd, data[at : at + nbytes], at)
        os.close(fd)
        tally.count("flips", len(hit))


def test_a_damaged_page_is_left_where_it_is_and_others_are_merged(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with opened(folder) as store:
        small = small_of(store)
        small.update({f"f{number}": content("f", number, 300) for number in range(400)})
        for number in range(400):
            if number % 5:
                small._pages.steadily(lambda known, number=number: small._pages.delete(known, f"f{number}"))  # type: ignore[misc]
        store.commit()
        pages = pages_of(small)
        page = "s/page7"
        at = extent(store, page).offset
        store.close()
    fd = os.open(folder / "data.0", os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
    os.close(fd)
    with opened(folder) as store:
        small = small_of(store)
        small["new"] = torch.ones(3)
        assert page in store
        assert len(pages_of(small)) < len(pages) / 3
        for number in range(0, 400, 5):
            key = f"f{number}"
            if key in pages[page]:
                with pytest.raises(CorruptionError, match=f"{key!r}"):
                    small.get(key)
            else:
                assert torch.equal(small[key], content("f", number, 300))
        store.close()


# exceptions at any line


def free(small: SmallTensors) -> int:
    """How many bytes are free in the open page."""
    head = small._do(lambda known: known).head
    return small.page_bytes - 64 - head.log - head.values


def long_log(small: SmallTensors) -> None:
    """Make the log so long that the next change writes it anew."""
    while small._do(lambda known: known).head.last < 10:
        small._pages.put([_prepared("a key " * 100, torch.zeros(1))])


def full_page(small: SmallTensors) -> None:
    """Leave no room for a tensor of some hundred bytes in the open page."""
    while free(small) > 300:
        small.put("filler", content("filler", 1, 200))


WORKS: dict[str, Callable[[SmallTensors], object]] = {
    "get": lambda small: small.get("t3"),
    "get_many": lambda small: small.get_many(["t3", "t4", "t3", "t10"]),
    "put a new one": lambda small: small.put("new", content("new", 1, 300)),
    "replace": lambda small: small.put("t4", content("new", 1, 300)),
    "replace by a large one": lambda small: small.put("t4", content("new", 1, 5000)),
    "put where no room is": lambda small: small.put("new", content("new", 1, 400)),
    "delete": lambda small: small.delete("t4"),
    "delete the only one of a page": lambda small: small.delete("t5"),
    "delete all": lambda small: small.clear(),
    "put, and the log is rewritten": lambda small: small.put("new", content("new", 1, 20)),
}
PREPARED = {"put where no room is": full_page, "put, and the log is rewritten": long_log}


def state(small: SmallTensors) -> dict[str, bytes]:
    return {key: one.reshape(-1).view(torch.uint8).numpy().tobytes() for key, one in small.items()}


@counts(12, 10_000)
@pytest.mark.parametrize("where_from", ["in memory", "on the disk", "pages to merge"])
@pytest.mark.parametrize("name", WORKS)
def test_struck_at_each_line(tmp_path: Path, name: str, where_from: str, count: int, tally: Tally) -> None:
    work = WORKS[name]
    with opened(tmp_path / "state") as store:
        small = begin(store)
        pages = small._pages
        if where_from == "pages to merge":
            for version in range(3):
                small.update({f"f{number}": content("f", version, 700) for number in range(80)})
            for number in range(80):
                if number % 5:
                    pages.steadily(lambda known, number=number: pages.delete(known, f"f{number}"))  # type: ignore[misc]
        PREPARED.get(name, len)(small)
        store.commit()
        before = state(small)
        lines = lines_of(lambda: work(small))
        after = state(small)
        assert (before != after) is (not name.startswith("get"))
        for number in range(0, lines, max(1, lines // count)):
            store.rollback()
            if where_from == "on the disk":
                store.offload()
            if number % 2:
                len(small)  # names are read before the call, or in it
            where = struck_at(number, lambda: work(small))
            if where is None:  # it came to fewer lines, because it did not have to wait
                break
            tally.count(name, 1)
            assert is_free(small._lock), where
            assert not any(tier.held for tier in store.statistics().tiers), where
            found = state(small)
            assert found in (before, after), where
            if "delete" not in name or found == before:
                work(small)
                assert state(small) == after, where
        store.close()


def test_a_handler_that_changes_them_between_any_two_lines_of_a_change(tmp_path: Path) -> None:
    """Nothing of either is lost; a handler that comes while a page is leased is told so."""
    with opened(tmp_path / "state") as store:
        small = begin(store)
        store.commit()
        work = lambda: small.put("new", content("new", 1, 900))  # noqa: E731
        lines, refused, through = lines_of(work), 0, 0
        for number in range(0, lines, max(1, lines // 120)):
            store.rollback()
            done: list[bool] = []

            def handler(done: list[bool] = done) -> None:
                try:
                    small.put("within", content("within", 1, 950))
                    small.put("t4", content("within", 2, 100))
                    done.append(True)
                except MisuseError:  # a conflict of leases, or the engine is in the midst of a call
                    done.append(False)

            interrupted_at(number, work, handler)
            wanted = {"new": content("new", 1, 900)}
            if done == [True]:
                wanted |= {"within": content("within", 1, 950), "t4": content("within", 2, 100)}
            refused, through = refused + done.count(False), through + done.count(True)
            for _ in range(2):
                assert all(torch.equal(small[key], one) for key, one in wanted.items()), number
                small._pages._known = None  # once more, as a process finds them that opens the store
        print(f"{through} handlers changed them, {refused} were refused")
        assert refused
        assert through > 20
        store.close()


def test_threads_beside_one_that_goes_back(tmp_path: Path) -> None:
    """Every tensor that is read is whole, and after each rollback what the threads do not change is as of the commit."""
    wrong: list[object] = []
    with opened(tmp_path / "state") as store:
        small = begin(store)
        store.commit()
        expected, end = state(small), threading.Event()

        def put(mine: int) -> None:
            number = 0
            while not end.is_set():
                number += 1
                try:
                    small.put(f"{mine}/{number % 30}", torch.full((200,), float(number)))
                    found = small.get(f"{mine}/{number % 30}", torch.zeros(200))
                    assert bool((found == found[0]).all())
                    assert float(found[0]) in (0, number)
                    if number % 40 == 0:
                        small.delete(f"{mine}/{number % 30}")
                except (LeaseConflict, KeyNotFound):
                    continue  # a rollback came meanwhile
                except BaseException as error:
                    wrong.append(error)
                    return

        threads = [threading.Thread(target=put, args=(mine,)) for mine in range(2)]
        for thread in threads:
            thread.start()
        went = 0
        while went < 150 and not wrong:
            try:
                store.rollback()
                went += 1
                for key in ("t4", "t5", "t10"):
                    assert small.get(key).numpy().tobytes() == expected[key]
            except LeaseConflict:
                continue
        end.set()
        for thread in threads:
            thread.join()
        assert not wrong, wrong
        store.rollback()
        assert state(small) == expected
        store.close()


@pytest.mark.parametrize("name", ["put where no room is", "replace by a large one", "put, and the log is rewritten"])
def test_the_store_cannot_go_back_between_two_leases_of_a_change(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page, or a part of the log, is put first, and the head is changed afterwards."""
    with opened(tmp_path / "state") as store:
        small = begin(store)
        PREPARED.get(name, len)(small)
        store.commit()
        len(small)
        original, told = store.put, list[bool]()

        def put(key: str, tensor: torch.Tensor, **more: Any) -> None:
            original(key, tensor, **more)
            try:
                store.rollback()
                told.append(True)
            except LeaseConflict:
                told.append(False)

        monkeypatch.setattr(store, "put", put)
        WORKS[name](small)
        monkeypatch.undo()
        assert told
        assert not any(told)
        found = state(small)
        small._pages._known = None
        assert state(small) == found
        store.close()


def test_hostile_names_do_no_harm(tmp_path: Path) -> None:
    """Any bytes in the log, with checksums that fit: what is read or changed then raises an error of tiered, or does not."""
    source, refused = random.Random(5), 0
    with opened(tmp_path / "state") as store:
        small = begin(store)
        store.commit()
        good = {key: store[key] for key in ("s/open", "s/names0")}
        for trial in range(400):
            key = source.choice(sorted(good))
            bad = good[key].clone()
            for _ in range(source.randrange(1, 6)):
                bad[source.randrange(len(bad) if trial % 3 else 300)] = source.randrange(256)
            store.put(key, bad, owner=store.owner_of(key))
            small._pages._known = None
            try:
                for one in list(small):
                    small.get(one)
                small.put("x", torch.zeros(300))
                small.delete(next(iter(small)))
            except TieredError:
                refused += 1
            store.rollback()
        assert 50 < refused < 400
        assert len(state(small)) == sum(of(number, 3) is not None for number in range(COUNT))
        store.close()
