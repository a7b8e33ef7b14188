"""What is left by an ``open`` that fails, and by a store that is closed before its first commit: what was there, no lock."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.fakes import in_child
from tests.filesystems import instead
from tests.stress.contents import content, holds
from tests.stress.fusefs import FaultyDisk, Rule, faulty_disk, why_not
from tiered import CapacityError, CommitError, Generation, MisuseError, StoreLocked, TieredError, TieredStore, verify
from tiered.cli.info.machine import filesystem
from tiered.format import generations
from tiered.types import BackendName

MIB = 1 << 20


def everything(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.put("t", content("t", 1, 100_000))
    return tmp_path / "state"


# A warning that is an error


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a filesystem without O_DIRECT."""
    with monkeypatch.context() as patch:
        patch.setattr("tiered.format.data_file.make_direct", lambda fd: False)  # first: this imports what the other one patches
        patch.setattr("tiered.format.locked_file.make_direct", lambda fd: False)
        yield


@pytest.mark.parametrize("access", ["read", "write"])
@pytest.mark.parametrize("which", ["one drive", "several", "new"])
def test_a_warning_that_is_an_error_lets_the_lock_go(tmp_path: Path, buffered: None, access: str, which: str) -> None:
    paths = [tmp_path / "a", tmp_path / "b"] if which == "several" else None
    if which != "new":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with TieredStore.open(tmp_path / "state", dram=MIB, paths=paths) as store:
                store.put("t", content("t", 1, 100_000))
    elif access == "read":
        return
    before = everything(tmp_path)
    with pytest.raises(UserWarning, match="no O_DIRECT") as raised:
        TieredStore.open(tmp_path / "state", dram=MIB, paths=paths, access=access)
    assert everything(tmp_path) == before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with TieredStore.open(tmp_path / "state", dram=MIB, paths=paths) as store:
            if which != "new":
                holds(store, "t", 1, 100_000)
    del raised  # its traceback has all that the first one made


# Direct I/O that open takes, and the first read or write refuses


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyDisk]:
    if why_not():
        pytest.skip(why_not())
    with faulty_disk(tmp_path_factory.mktemp("fuse") / "disk") as found:
        yield found


@pytest.mark.parametrize("operation", ["direct write", "direct read"])
def test_direct_io_that_is_refused_late_is_buffered_from_the_start(refusing: FaultyDisk, operation: str) -> None:
    folder = refusing.folder / operation.split()[1]
    with TieredStore.open(folder / "before", dram=MIB) as store:
        store["t"] = content("t", 1, 300_000)
        assert store.statistics().direct
    refusing.add(Rule(operation, "error", errno.EINVAL, times=-1))
    try:
        for name in ("before", "new"):
            with pytest.warns(UserWarning, match="no O_DIRECT"):
                store = TieredStore.open(folder / name, dram=MIB)
            with store:
                for number in range(8):
                    store[f"{number}"] = content(f"{number}", 1, 300_000)
                store.commit()
                store.offload()
                holds(store, "3", 1, 300_000)
                seen = store.statistics()
                assert not seen.direct
                assert "not past the page cache" in str(seen)
        facts = filesystem(str(folder))
        assert facts["o_direct"] is False
        assert facts["why_not"] is None
        assert not list(folder.glob("tiered-scratch*"))
        warned = pytest.warns(UserWarning, match="no O_DIRECT") if operation == "direct read" else contextlib.nullcontext()
        with warned:
            store = TieredStore.open(folder / "before", dram=MIB, access="read")
        with store:
            holds(store, "t", 1, 300_000)
            assert store.statistics().direct is (operation == "direct write")
        assert not verify(folder / "before").damages
    finally:
        refusing.clear()


def test_what_a_probe_left_that_was_killed_is_taken(committed: Path) -> None:
    """Open asks by a write behind the end of the file, which is cut off again."""
    file = committed / "data.0"
    before = file.stat().st_size
    with TieredStore.open(committed, dram=MIB) as store:
        store.close()
    assert file.stat().st_size == before
    with file.open("ab") as more:
        more.write(bytes(4096))
    with TieredStore.open(committed, dram=MIB) as store:
        holds(store, "t", 1, 100_000)
        store["more"] = content("m", 1, 200_000)
    assert not verify(committed).damages


# Advice that fits


def as_nobody(work: Callable[[], object]) -> str:
    """What ``work`` says when it runs without root's rights."""

    def body() -> str:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            return f"no error: {work()}"
        except TieredError as error:
            return f"{type(error).__name__}: {error}"

    return in_child(body)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run as another user")
@pytest.mark.parametrize("shut", ["manifest.2", "manifest.1", "data.0", "."])
@pytest.mark.parametrize("way", ["write", "read", "verify"])
def test_what_may_not_be_read_is_not_damaged(shut: str, way: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # where others may pass
        os.chmod(home, 0o755)
        folder = Path(home) / "state"
        with TieredStore.open(folder, dram=MIB) as store:
            store.put("t", content("t", 1, 100))
            store.commit()
            store.put("t", content("t", 2, 100))
        for one in (folder, *folder.iterdir()):
            os.chown(one, 65534, 65534)
        os.chmod(folder / shut, 0)

        def work() -> object:
            if way == "verify":
                return verify(folder)
            with TieredStore.open(folder, dram=MIB, access=way) as store:
                store.close()
            return None

        said = as_nobody(work)
        os.chmod(folder / shut, 0o700)
        if way == "read" and shut == "manifest.1":
            assert said == "no error: None", "which it does not need"
        else:
            assert said.startswith("MisuseError: cannot "), said
            assert "Permission denied; user 65534 has no permission: run as the owner" in said
            assert str(folder if shut == "." else folder / shut) in said
        assert as_nobody(work).startswith("no error")
        assert len(generations.generations(folder)) == 2


@pytest.mark.parametrize("name", ["manifest.1", "data.0"])
@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder"])
def test_what_is_no_file_is_named_and_not_waited_for(committed: Path, name: str, kind: str) -> None:
    instead(committed / name, kind)
    for access in ("write", "read"):
        with pytest.raises(TieredError, match=f"{name}.*(not a regular file|No such device|no file)"):
            TieredStore.open(committed, dram=MIB, access=access)
    assert verify(committed).damages


def test_a_store_that_this_process_has_open_is_said_to_be(committed: Path) -> None:
    with TieredStore.open(committed, dram=MIB), pytest.raises(StoreLocked, match="which is this one: use the TieredStore"):
        TieredStore.open(committed, dram=MIB)


def test_a_path_that_cannot_be_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, mend in (
        (tmp_path / "file" / "x", "Not a directory; a part of the path is a file"),
        (tmp_path / "loop" / "x", "symbolic links lead in a circle"),
        (tmp_path / ("x" * 300), "give a shorter path"),
    ):
        with pytest.raises(MisuseError, match=mend):
            TieredStore.open(path, dram=MIB)
        for other in (lambda path=path: TieredStore.open(path, dram=MIB, access="read"), lambda path=path: verify(path)):
            with pytest.raises(MisuseError):
                other()  # type: ignore[misc]


def test_a_device_without_a_budget_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(MisuseError, match="give hbm= as well"):
            TieredStore.open(tmp_path / "state", dram=MIB, device=device)
    assert everything(tmp_path) == set()
    with TieredStore.open(tmp_path / "state", dram=MIB, device="cuda", hbm=0) as store:
        assert store.device.type == "cpu"


# Before the first commit


@pytest.mark.parametrize("paths", [None, ["a", "b/c"]])
@pytest.mark.parametrize("end", ["close", "exception", "collected"])
def test_a_store_that_nothing_was_committed_in_goes_with_its_folders(tmp_path: Path, paths: list[str] | None, end: str) -> None:
    (tmp_path / "there").mkdir()
    before = everything(tmp_path)
    drives = [tmp_path / name for name in paths] if paths else None
    store = TieredStore.open(tmp_path / "there" / "new" / "state", dram=MIB, paths=drives)
    assert everything(tmp_path) > before
    if end == "exception":
        with pytest.raises(CapacityError), store:
            store.put("t", torch.empty(2 * MIB, dtype=torch.uint8))
    elif end == "close":
        store.put("t", content("t", 1, 10))
        store.close()
    del store
    assert everything(tmp_path) == before


def test_what_others_made_or_put_there_stays(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    TieredStore.open(tmp_path / "empty", dram=MIB).close()
    assert everything(tmp_path) == {tmp_path / "empty"}
    store = TieredStore.open(tmp_path / "new" / "state", dram=MIB)
    (tmp_path / "new" / "notes").write_text("mine")
    store.close()
    assert everything(tmp_path) == {tmp_path / "empty", tmp_path / "new", tmp_path / "new" / "notes"}


def test_a_commit_keeps_it_also_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what a power loss shows of one whose folder could not be synced."""
    store = TieredStore.open(tmp_path / "state", dram=MIB)
    store.put("t", content("t", 1, 10))

    def failing(*_: object) -> None:
        raise CommitError("the folder could not be synced")

    with monkeypatch.context() as patch:
        patch.setattr(generations, "publish", failing)
        with pytest.raises(CommitError):
            store.commit()
    store.close()
    assert (tmp_path / "state" / "data.0").exists()
    with TieredStore.open(tmp_path / "state", dram=MIB) as store:
        store.commit()
    with TieredStore.open(tmp_path / "state", dram=MIB, generation=Generation(0, newer="drop")):
        pass
    assert (tmp_path / "state" / "data.0").exists(), "it was made long ago"


def test_an_open_that_is_refused_leaves_no_parents(tmp_path: Path) -> None:
    with pytest.raises(CapacityError):
        TieredStore.open(tmp_path / "a" / "b" / "state", dram=MIB, nvme=1 << 60)
    assert everything(tmp_path) == set()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes").write_text("mine")
    before = everything(tmp_path)
    with pytest.raises(MisuseError):
        TieredStore.open(tmp_path / "a" / "state", dram=MIB, paths=[tmp_path / "new" / "drive", tmp_path / "foreign"])
    assert everything(tmp_path) == before


def test_where_no_folder_can_be_made() -> None:
    with pytest.raises(MisuseError, match="cannot create /proc/state: the filesystem makes no folders there"):
        TieredStore.open("/proc/state", dram=MIB)


# Nothing left to open with


@pytest.mark.parametrize("backend", ["posix", "aiofiles", "auto"])
def test_verify_without_descriptors_says_so_and_calls_nothing_damaged(committed: Path, backend: BackendName) -> None:
    def body() -> str:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        gc.collect()
        gc.freeze()  # all of torch need not be gone through again below
        highest = max(map(int, os.listdir("/proc/self/fd")))
        while (lowest := os.open(os.devnull, os.O_RDONLY)) < highest:  # so that there are no gaps below the limit
            pass
        os.close(lowest)
        said = []
        for left in range(16):
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, hard))
            try:
                found = verify(committed, backend=backend)
                said.append("sound" if found.sound else f"DAMAGED {found.damages}")
            except TieredError as error:
                said.append(f"{type(error).__name__} {error}" if "open files" in str(error) else f"WRONG {error}")
            except BaseException as error:
                said.append(f"UNTYPED {type(error).__name__} {error}")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                gc.collect()  # an event loop that could not be made keeps what it had until then
        return "\n".join(said)

    said = in_child(body).splitlines()
    print(f"{backend}: {sum(words != 'sound' for words in said)} of {len(said)} limits were too low")
    assert said[0] != "sound"
    assert said[-1] == "sound"
    assert not [words for words in said if words.startswith(("DAMAGED", "WRONG", "UNTYPED"))]


def test_verify_of_several_drives_without_descriptors(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with TieredStore.open(tmp_path / "state", dram=MIB, paths=paths) as store:
        store.put("t", content("t", 1, 100_000))

    opened = os.open

    def body() -> str:
        said = []
        for number in range(30):
            seen = [0]

            def one_fails(*rest: object, number: int = number, seen: list[int] = seen, **others: object) -> int:
                seen[0] += 1
                if seen[0] == number:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                return opened(*rest, **others)  # type: ignore[arg-type]

            os.open = one_fails  # type: ignore[assignment]
            try:
                found = verify(tmp_path / "state", paths=paths, backend="posix")
                said.append("sound" if found.sound else f"DAMAGED {found.damages}")
            except TieredError as error:
                said.append("refused" if "open files" in str(error) else f"WRONG {error}")
            finally:
                os.open = opened
        return "\n".join(said)

    said = in_child(body).splitlines()
    refused = said.count("refused")
    print(f"{refused} of {len(said)} refused")
    assert set(said) == {"sound", "refused"}
    assert refused >= 5


def test_verify_without_threads_says_so(committed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", none_left)
        with pytest.raises(TieredError, match="aiofiles backend cannot be opened: can't start new thread"):
            verify(committed, backend="aiofiles")
    assert verify(committed, backend="aiofiles").sound


@pytest.mark.parametrize("access", ["read", "write"])
@pytest.mark.parametrize("place", ["{}/state", "~/state"])
def test_a_store_that_must_be_there(place: str, access: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = Path(place.format(tmp_path))
    with pytest.raises(MisuseError, match="there is no store with a commit"):
        TieredStore.open(folder, dram=MIB, existing="must", access=access)
    assert not list(tmp_path.iterdir()), "nothing is made"
    TieredStore.open(folder, dram=MIB).close()
    with pytest.raises(MisuseError, match="there is no store with a commit"):
        TieredStore.open(folder, dram=MIB, existing="must", access=access)
    with TieredStore.open(folder, dram=MIB, existing="must-not") as store:
        store["a"] = torch.ones(3)
    with TieredStore.open(folder, dram=MIB, existing="must", access=access) as store:
        assert torch.equal(store["a"], torch.ones(3))
        store.close()


def test_a_store_that_must_not_be_there(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with TieredStore.open(folder, dram=MIB, existing="must-not") as store:
        store["a"] = torch.ones(3)
    with pytest.raises(MisuseError, match=r"has a store already \(generation 1\)"):
        TieredStore.open(folder, dram=MIB, existing="must-not")
    with TieredStore.open(folder, dram=MIB, existing="may") as store:
        assert list(store) == ["a"]
        store.close()
    for wrong in ("maybe", None, True):
        with pytest.raises(MisuseError, match="existing is 'may', 'must' or 'must-not'"):
            TieredStore.open(folder, dram=MIB, existing=wrong)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="does not exist before"):
        TieredStore.open(None, dram=MIB, existing="must")
