"""``tiered info``: what it finds, that it asks softly, and that nothing stays where it measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.cli.train.test_train import MIB, failure
from tests.filesystems import mounted, root
from tiered import Machine, MisuseError, TieredStore
from tiered.cli.info import machine as facts
from tiered.cli.main import main
from tiered.interfaces import IOBackend
from tiered.io.backends import BACKENDS, Shipped, open_backend, unavailable
from tiered.links.native import native_link_unavailable
from tiered.measuring import probes
from tiered.types import BackendName

QUICK_PROBES = {"TURNS": 2, "STEPS": 2, "UPDATES": 2, "HASHED": MIB, "MOVED": MIB, "PRODUCT": (64, 64, 64), "LONG": 0.0}
"""Constants of tiered.measuring.probes with which a machine is measured in a second; what is measured is then worth little."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick, also on a slow drive."""
    monkeypatch.setattr(facts, "POOLS", (MIB,))
    monkeypatch.setattr(facts, "COPIED", MIB)


def found(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["info", *map(str, arguments), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_everything_that_was_asked_for_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = found(capsys, "--drive", tmp_path)
    backends = {backend["name"]: backend["unavailable"] for backend in report["backends"]}
    assert list(backends) == ["libaio", "aiofiles", "posix"]
    assert backends["posix"] is backends["aiofiles"] is None
    assert report["native_disk_link"]["unavailable"] == native_link_unavailable()
    assert report["torch"] == torch.__version__
    assert bool(report["cuda"]["devices"]) != bool(report["cuda"]["why_none"])
    disk = report["filesystem"]
    assert disk["folder"] == str(tmp_path)
    assert 0 < disk["free_bytes"] <= disk["total_bytes"]
    assert disk["alignment"] % 4096 == 0
    assert report["limits"]["open_files"] is None or report["limits"]["open_files"] > 0
    assert report["default_dram_bytes"] >= MIB
    for rate in "disk_read", "disk_write", "memory_copy":
        assert report["rates"][rate] > 0
    assert len(report["rates"]["devices"]) == len(report["cuda"]["devices"])
    assert not list(tmp_path.iterdir())


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--drive", str(tmp_path), "--json", str(tmp_path / "it.json")]) == 0
    shown = capsys.readouterr().out
    labels = [line[:12].rstrip() for line in shown.splitlines() if line[:1] != " "]
    wanted = ["versions", "machine", "backends", "disk link", "CUDA", "filesystem", "huge pages", "limits", "budget", "rates"]
    assert labels == wanted
    assert json.loads((tmp_path / "it.json").read_text())["rates"]["memory_copy"] > 0


def test_the_drive_is_measured_once_for_the_table_and_for_a_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in QUICK_PROBES.items():
        monkeypatch.setattr(probes, name, value)
    monkeypatch.setattr("tiered.cli.output.INTERVAL", 0.0)
    machine = tmp_path / "machine.json"
    assert main(["info", "--drive", str(tmp_path), "--machine", str(machine), "--json"]) == 0
    told = capsys.readouterr()
    rates, file = json.loads(told.out)["rates"], Machine.of(machine)
    assert (rates["disk_read"], rates["disk_write"]) == (file.read, file.write)
    said = [line for line in told.err.splitlines() if line.startswith("measuring")]
    assert len(said) == len(set(said)) > 6, "each line once"
    assert "measuring leases, 2 of 2" in said


def test_nothing_is_made_without_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "scratch_store", lambda *_, **__: pytest.fail("a store was opened"))
    assert found(capsys, "--drive", tmp_path, "--no-measure")["rates"] is None


def test_a_backend_that_does_not_work_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "libaio", BACKENDS["libaio"]._replace(unavailable=lambda: "not built; install a C compiler"))
    assert main(["info", "--drive", str(tmp_path), "--no-measure"]) == 0
    assert "libaio: not built; install a C compiler\n" in capsys.readouterr().out


def test_a_backend_that_cannot_even_be_asked_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: int) -> IOBackend:
        raise ImportError("no module of\n that name")

    monkeypatch.setitem(BACKENDS, "aiofiles", Shipped(broken))
    assert unavailable()["aiofiles"] == "no module of that name"
    with pytest.raises(MisuseError, match="the aiofiles backend does not work here"):
        open_backend("aiofiles", 8)


def test_the_names_are_those_of_the_shipped_backends() -> None:
    assert get_args(BackendName) == ("auto", *BACKENDS)


def test_folders_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tmp_path / "plain"
    plain.write_text("mine")
    assert f"{plain} is not a folder" in failure(capsys, "info", "--drive", plain)
    assert f"{tmp_path / 'none'} does not exist" in failure(capsys, "info", "--drive", tmp_path / "none")


def test_a_folder_that_nothing_can_be_made_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is an answer: the rest is told all the same."""
    report = found(capsys, "--drive", "/proc")
    assert report["filesystem"]["type"] == "proc"
    assert "cannot make a file in /proc" in report["filesystem"]["why_not"]
    assert report["rates"]["disk_read"] is None
    assert report["rates"]["why_no_disk"] == report["filesystem"]["why_not"]


def test_a_store_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TieredStore.open(tmp_path / "store", dram=MIB) as store:
        store.put("mine", torch.arange(10))
    before = sorted(os.listdir(tmp_path / "store"))
    report = found(capsys, "--drive", tmp_path / "store")
    assert report["filesystem"]["holds_store"]
    assert "holds a store" in report["rates"]["why_no_disk"]
    assert sorted(os.listdir(tmp_path / "store")) == before
    with TieredStore.open(tmp_path / "store", dram=MIB) as store:
        assert store.get("mine").equal(torch.arange(10))


@root
def test_without_o_direct_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mounted(tmp_path / "memory of others", "-t", "ramfs", "none") as memory:
        report = found(capsys, "--drive", memory, "--no-measure")
        assert report["filesystem"]["type"] == "ramfs"  # also behind a name that /proc/self/mountinfo writes in octal
        assert report["filesystem"]["o_direct"] is False
        assert report["filesystem"]["in_memory"]
        assert main(["info", "--drive", str(memory), "--no-measure"]) == 0
        assert "this is memory, not a drive" in capsys.readouterr().out


def test_devices_are_measured_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told of a device, without having one."""
    rates = {"disk_read": 2e9, "disk_write": 3e9, "why_no_disk": None, "memory_copy": 1e10, "memory_threads": 2}
    devices = [{"index": 0, "to_device": 5.5e10, "from_device": None}]
    shown = facts.describe_rates(rates | {"devices": devices})
    assert "disk through a store: read 2.00 GB/s, write 3.00 GB/s" in shown
    assert "cuda:0: to it 55.00 GB/s, from it not measured" in shown
