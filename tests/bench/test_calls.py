"""``bench/calls.py`` counts what its docstring says, over a package that is made up, and each of its rows does what it says."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import tiered
from bench import calls
from bench.calls import CASES, Counter, counted, of_misses, tensors, timed

FIRST = """
import threading
from made_up import second

def own():
    second.work()

def calls_in_a_thread():
    thread = threading.Thread(target=own)
    thread.start()
    thread.join()

def calls_through_others():
    return sorted([3, 1, 2], key=second.work_on)

def takes_all():
    return list(second.two())

def makes_a_box():
    return second.Box(3)

def imports():
    from made_up import third
    third.same()
"""

SECOND = '''
from dataclasses import dataclass

def same():
    pass

def work():
    pass

def work_on(value):
    return -value

@dataclass
class Box:
    side: int

    def __post_init__(self):
        self.side += 1

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


def counts(package: Path, operation: object) -> dict[str, int]:
    assert callable(operation)
    with Counter(package) as counter:
        found = counter.count(operation)
    return {name.rpartition(" ")[2]: count for name, count in found.items()}


def test_functions_of_all_files_count(package: Path, first: ModuleType) -> None:
    assert counts(package, first.own) == {"own": 1, "work": 1}


def test_functions_that_others_call_count(package: Path, first: ModuleType) -> None:
    assert counts(package, first.calls_through_others) == {"calls_through_others": 1, "work_on": 3}


def test_threads_that_begin_within_count(package: Path, first: ModuleType) -> None:
    assert counts(package, first.calls_in_a_thread) == {"calls_in_a_thread": 1, "own": 1, "work": 1}


def test_a_thread_that_is_there_counts_while_an_operation_runs(package: Path, first: ModuleType) -> None:
    begin, end = threading.Event(), threading.Event()

    def work() -> None:
        begin.wait()
        first.own()
        end.set()

    def wait() -> None:
        begin.set()
        end.wait()

    with Counter(package) as counter:
        thread = threading.Thread(target=work)
        thread.start()
        assert sum(counter.count(wait).values()) == 2, "own, and what it calls"
        thread.join()
        first.own()
        assert sum(counter.count(first.own).values()) == 2, "of this round alone"


def test_a_generator_counts_each_time_that_it_goes_on(package: Path, first: ModuleType) -> None:
    assert counts(package, first.takes_all) == {"takes_all": 1, "two": 3}


def test_functions_without_a_file_do_not_count(package: Path, first: ModuleType) -> None:
    found = counts(package, first.makes_a_box)
    assert sorted(name.rpartition(".")[2] for name in found) == ["__post_init__", "makes_a_box"]


def test_imports_do_not_count(package: Path, first: ModuleType) -> None:
    """Nor are equal functions of two files taken for one."""
    with Counter(package) as counter:
        counter.count(first.imports)
        found = counter.count(lambda: (sys.modules["made_up.second"].same(), sys.modules["made_up.third"].same()))
        assert found == {"second.py: same": 1, "third.py: same": 1}
    assert "<module>" not in counts(package, first.imports)


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


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_each_row_can_be_counted_and_timed(case: calls.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "WARM_UP", 0)
    (found,) = counted(case, str(tmp_path / "counted"), 1)
    assert sum(found.values()) >= case.each
    with case.opened(str(tmp_path / "timed")) as made:
        assert timed(made) > 0


def test_a_lease_that_hits_is_no_miss(tmp_path: Path) -> None:
    with Counter(Path(tiered.__file__).parent) as counter, tensors(str(tmp_path)) as store:
        with of_misses(store, 1):
            miss = counter.count(lambda: calls.lease(store, ["t0"]))
        with of_misses(store, 0):
            hit = counter.count(lambda: calls.lease(store, ["t0"]))
        assert sum(hit.values()) < sum(miss.values())
        with pytest.raises(RuntimeError, match="0 leases had to wait for their tensors instead of 1"), of_misses(store, 1):
            calls.lease(store, ["t0"])


def test_the_figures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "calls.json"
    asked = ["--only", "lease, resident", "--rounds", "1", "--functions", "1", "--dir", str(tmp_path), "--json", str(file)]
    assert calls.main(asked) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert len(row["microseconds"]) == 1
    each = statistics.median(row["calls"])
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"| lease, resident | {each:.0f} [") for line in printed)
    assert printed[-1].startswith(f"| `{next(iter(row['functions']))}` | ")


def test_another_checkout_is_counted_and_timed_in_turn(tmp_path: Path) -> None:
    file, this = tmp_path / "calls.json", str(Path(tiered.__file__).parents[1])
    asked = ["--only", "lease, resident", "--rounds", "2", "--dir", str(tmp_path), "--json", str(file)]
    assert calls.main([*asked, "--against", this]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["calls"][0] == pytest.approx(row["calls"][1], rel=0.05), "it is the same checkout"
    assert len(row["there"]) == len(row["here"]) == 2


def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not a checkout of this project"):
        calls.main(["--against", str(tmp_path)])
