"""``bench/calls.py`` counts what its docstring says, over a package that is made up, and tells a hit from a miss."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import tiered
from bench.calls import Calls, Counter, count_store, one_line_functions, table, table_by_file, table_of_pairs

FIRST = """
import threading
from made_up import second

def own():
    return second_own()

def second_own():
    pass

def calls_its_own():
    for _ in range(5):
        own()

def calls_twice():
    own()
    second.work()
    second.work()

def calls_one_liners():
    box = second.Box(3)
    return box.volume, box.side, second.double(2), second.square(2), second.several_lines(1), second.work()

def calls_through_others():
    return sorted([3, 1, 2], key=second.work_on)

def calls_in_a_thread():
    thread = threading.Thread(target=second.work)
    thread.start()
    thread.join()
    second.calls_back(own)

def takes_all():
    return list(second.two())

def imports():
    from made_up import third
    third.same()
"""

SECOND = '''
def same():
    pass

def work():
    pass

def work_on(value):
    value = -value
    return value

square = lambda value: value ** 2

def double(value):
    """Return twice ``value``."""
    return 2 * value

def several_lines(value):
    return (
        value
        + 1
    )

class Box:
    def __init__(self, side):
        self.side = side

    @property
    def volume(self):
        return self.side ** 3

def calls_back(function):
    function()

def two():
    yield 1
    yield 2
'''

THIRD = """
def same():
    pass

from made_up import second
second.work()
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "made_up"
    folder.mkdir()
    for name, source in {"__init__": "", "first": FIRST, "second": SECOND, "third": THIRD}.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "made_up"]:
        del sys.modules[name]


@pytest.fixture
def first(package: Path) -> ModuleType:
    return importlib.import_module("made_up.first")


def counts(package: Path, operation: object) -> Calls:
    assert callable(operation)
    with Counter(package) as counter:
        return counter.count(operation)


def called(calls: Calls) -> dict[str, int]:
    found: dict[str, int] = {}
    for (_, function), count in calls.pairs.items():
        found[function.name.rpartition(".")[2]] = found.get(function.name.rpartition(".")[2], 0) + count
    return found


def test_calls_within_a_file_do_not_count(package: Path, first: ModuleType) -> None:
    calls = counts(package, first.calls_its_own)
    assert (calls.files, calls.total, calls.without_one_line) == ({"first.py"}, 0, 0)


def test_calls_of_another_file_count(package: Path, first: ModuleType) -> None:
    calls = counts(package, first.calls_twice)
    assert calls.files == {"first.py", "second.py"}
    assert called(calls) == {"work": 2}
    assert (calls.total, calls.without_one_line) == (2, 2)


def test_one_line_functions_are_told_apart(package: Path, first: ModuleType) -> None:
    calls = counts(package, first.calls_one_liners)
    names = {"__init__": 1, "volume": 1, "double": 1, "<lambda>": 1, "several_lines": 1, "work": 1}
    assert called(calls) == names
    assert (calls.total, calls.without_one_line) == (6, 2), "all but __init__ and work"
    assert {name for _, name in one_line_functions(str(package / "second.py"))} == {"double", "several_lines", "volume"}


def test_the_caller_is_the_nearest_in_the_package(package: Path, first: ModuleType) -> None:
    calls = counts(package, first.calls_through_others)
    assert [(pair[0].name, pair[1].name, count) for pair, count in calls.pairs.items()] == [
        ("calls_through_others", "work_on", 3)
    ]
    outside = counts(package, lambda: sys.modules["made_up.second"].work())
    assert (outside.files, outside.total) == ({"second.py"}, 0)


def test_threads_that_begin_within_count(package: Path, first: ModuleType) -> None:
    calls = counts(package, first.calls_in_a_thread)
    assert called(calls) == {"calls_back": 1, "own": 1}, "the thread has no caller in the package"
    assert calls.files == {"first.py", "second.py"}


def test_other_threads_count_while_the_caller_waits(package: Path, first: ModuleType) -> None:
    begin, end = threading.Event(), threading.Event()

    def work() -> None:
        begin.wait()
        first.calls_twice()
        end.set()

    def wait() -> None:
        first.calls_twice()
        begin.set()
        end.wait()

    with Counter(package) as counter:
        thread = threading.Thread(target=work)
        thread.start()
        calls = counter.count(lambda: None, wait)
        thread.join()
        assert called(calls) == {"work": 2}, "of the other thread"
        assert called(counter.count(first.calls_twice)) == {"work": 2}, "of this round alone"


def test_a_generator_counts_each_time_that_it_goes_on(package: Path, first: ModuleType) -> None:
    assert called(counts(package, first.takes_all)) == {"two": 3}


def test_imports_do_not_count(package: Path, first: ModuleType) -> None:
    """Nor are equal functions of two files taken for one."""
    assert called(counts(package, first.imports)) == {"same": 1}
    calls = counts(package, lambda: (sys.modules["made_up.second"].same(), sys.modules["made_up.third"].same()))
    assert calls.files == {"second.py", "third.py"}


def test_a_profile_function_that_was_there_is_there_afterwards(package: Path, first: ModuleType) -> None:
    def own(*event: object) -> None:
        pass

    before = sys.getprofile()
    try:
        sys.setprofile(own)
        with Counter(package):
            pass
        assert sys.getprofile() is own
    finally:
        sys.setprofile(before)


def test_tables(package: Path, first: ModuleType) -> None:
    found = {"twice": [counts(package, first.calls_twice)] * 2, "own": [counts(package, first.calls_its_own)]}
    assert table(found).splitlines()[2:] == [
        "| twice | 2 [2 - 2] | 2 [2 - 2] | 2 [2 - 2] |",
        "| own | 1 [1 - 1] | 0 [0 - 0] | 0 [0 - 0] |",
    ]
    assert table_by_file(found).splitlines()[2:] == ["| `first.py` | 0 | 0 |", "| `second.py` | 2 | - |"]
    assert table_of_pairs(found["twice"], 3).splitlines()[2:] == ["| `first.py` | `second.py` | 2 | 0 | `work` 2 |"]


def test_a_hit_crosses_less_than_a_miss(tmp_path: Path) -> None:
    with Counter(Path(tiered.__file__).parent) as counter:
        found = count_store(counter, str(tmp_path), rounds=2)
    hit, miss, commit = found.values()
    assert len(hit) == len(miss) == len(commit) == 2
    for resident, fetched in zip(hit, miss, strict=True):
        assert 0 < resident.without_one_line <= resident.total < fetched.total
        assert len(resident.files) < len(fetched.files)
