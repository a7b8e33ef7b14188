"""``tiered plan``: what it prints, writes and draws, and what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.train.test_train import failure
from tiered import Machine, TieredStore
from tiered.cli.main import main

SMALL = ["plan", "--layers", "2", "--width", "64", "--heads", "4", "--context", "16", "--batch", "1", "--dram", "1MiB"]
ONE = ["--update", "on_fetch", "--activations", "memory"]


@pytest.fixture
def machine(tmp_path: Path) -> str:
    path = tmp_path / "machine.json"
    Machine(read=1e8, write=1e8, dram=1 << 30, name="a box").save(path)
    return str(path)


def test_a_plan_on_one_screen(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--machine", machine, "--rated-life", "1TB"]) == 0
    printed = capsys.readouterr().out
    assert "GPT of 117,504 parameters" in printed
    assert "are enough, and 1.0 MiB the least that works" in printed
    for said in ("a box: drive 0.10 GB/s", "1.0 MiB of DRAM", "activations", "waiting", "TB written", "its rated life lasts"):
        assert said in printed, printed
    assert printed.count("\n") <= 24
    assert max(map(len, printed.splitlines())) <= 128
    assert len([line for line in printed.splitlines() if line.startswith(("on_fetch", "in_backward"))]) == 4


@pytest.mark.parametrize("hbm", ["2MiB", "64MiB"])
def test_the_memory_of_a_device_adds_up(hbm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "machine.json"
    file.write_text(f'{{"read": 1e9, "write": 1e9, "hbm": "{hbm}", "device_flops": 4e13, "link": "25GB", "base": 0}}')
    asked = [*SMALL, "--update", "on_fetch", "--context", "256", "--batch", "2", "--machine", str(file)]
    assert main([*asked, "--json", str(tmp_path / "plan.json")]) == 0
    printed = capsys.readouterr().out
    assert f"a device of {hbm[:-3]}.0 MiB: products 40,000 GFLOP/s, its link 25.00 GB/s" in printed
    chosen = json.loads((tmp_path / "plan.json").read_text())["chosen"]
    for label in ("process", "device"):
        line = next(one for one in printed.splitlines() if one.startswith(label))
        whole, *parts = (float(number) for number in re.findall(r"([\d.]+) MiB", line))
        assert whole == pytest.approx(sum(parts), abs=0.3), line
        assert whole == pytest.approx(chosen["memory"][label] / 2**20, abs=0.06)
        assert ("activations" in line) is (label == "device")
    said, rows = printed.partition("\n\n")[::2]
    assert ("fits      with 1.0 MiB of DRAM and" in said) is (hbm == "64MiB")
    assert ("fits" in rows.splitlines()[0].split()) is (hbm == "2MiB")


def test_a_report_a_picture_and_ranks(machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    asked = [*SMALL, *ONE, "--machine", machine, "--ranks", "1,2", "--network", "1", "--json", str(report)]
    for _ in range(2):  # the second replaces what the first wrote
        assert main([*asked, "--plot", str(picture)]) == 0
    found = json.loads(report.read_text())
    assert found["fits"] is True
    assert [row["ranks"] for row in found["ranks"]] == [1, 2]
    assert found["machine"]["network"] == 1e9
    assert len(found["curve"]) >= 3
    drawn = picture.read_text()
    assert "<svg" in drawn
    assert "without waiting" not in drawn or len(drawn) > 1000
    assert "rank" in capsys.readouterr().out


def test_ranks_that_share_a_node_share_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, report = tmp_path / "node.json", tmp_path / "plan.json"

    def planned(dram: str, ranks: str, memory: int) -> tuple[str, list[dict[str, Any]]]:
        Machine(read=1e9, write=1e9, dram=memory, base=1 << 20, ranks_per_node=2).save(path)
        asked = [*SMALL, *ONE, "--width", "256", "--layers", "3", "--machine", str(path), "--dram", dram, "--ranks", ranks]
        assert main([*asked, "--json", str(report)]) == 0
        return capsys.readouterr().out, json.loads(report.read_text())["ranks"]

    one, (alone,) = planned("16MiB", "1", 1 << 30)
    assert "a node" in one
    assert "pay" not in one, "nothing was compared"
    assert "too much" not in one
    memory = (64 << 20) + 2 * alone["process"] - (8 << 20)  # 4 MiB too few for each of two
    printed, rows = planned("16MiB", "1,2,4", memory)
    table = [line.split() for line in printed.splitlines() if re.match("    [124] ", line)]
    assert [row[-1] for row in table] == ["yes", "no", "yes"], "shares of four are smaller than the budget"
    assert [row["node"] for row in rows] == [share * row["process"] for share, row in zip((1, 2, 2), rows, strict=True)]
    found = re.search(r"\n2 ranks: the 2 of a node would take .* too much; --dram ([\d.]+)MiB is the most", printed)
    assert found
    most = float(found[1])
    assert 10 < most < 13
    for dram, fits in ((most, True), (most + 0.5, False)):
        printed, _ = planned(f"{dram:.2f}MiB", "1,2", memory)
        assert ("too much" not in printed) is fits
        assert ("up to 2 ranks pays: the" in printed or "more than 1 rank do not pay: the" in printed) is fits


def test_activations_in_the_store_and_parts_of_a_batch(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*SMALL, "--batch", "4", "--update", "on_fetch", "--machine", machine]
    assert main([*asked, "--activations", "store"]) == 0
    printed = capsys.readouterr().out
    assert "of activations a step" in printed
    assert "hide them" in printed or "hides them" in printed
    assert main([*asked, "--activations", "memory", "--micro-batch", "1,2"]) == 0
    printed = capsys.readouterr().out
    assert "parts" in printed
    assert len([line for line in printed.splitlines() if line.startswith("on_fetch")]) == 2


def test_the_element_type_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 256, "intermediate_size": 128}
    transformers.LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2).save_pretrained(tmp_path)
    asked = ["plan", str(tmp_path), "--context", "16", "--dram", "1MiB", *ONE, "--no-measure", "--json"]
    found = []
    for given in ([], ["--dtype", "bfloat16"]):
        assert main([*asked, *given]) == 0
        found.append(json.loads(capsys.readouterr().out)["chosen"]["memory"]["parameters"])
    assert found[0] > 1.9 * found[1]


def test_without_a_measurement_there_are_bytes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *ONE, "--no-measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"]["seconds"] == 0
    assert found["chosen"]["read"] > 0
    assert found["machine"] is None


def test_what_does_not_fit_is_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small.json"
    Machine(read=1e9, write=1e9, dram=64 << 20, base=60 << 20).save(small)
    assert main([*SMALL, *ONE, "--machine", str(small)]) == 0
    printed = capsys.readouterr().out
    assert "fits      no: " in printed
    assert "would fit" in printed


def test_a_change_is_said_as_options_that_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small.json"
    Machine(read=1e9, write=1e9, dram=297 << 19, base=1 << 20).save(small)
    asked = [*SMALL, "--layers", "3", "--vocabulary", "256", "--batch", "64", "--context", "32", "--dram", "4MiB"]
    asked += ["--machine", str(small), "--update", "on_fetch"]
    assert main([*asked, "--activations", "memory"]) == 0
    change = re.search(r"would fit (--[-\w]+ \w+ --dram [\d.]+MiB)", capsys.readouterr().out)
    assert change
    assert main([*asked, *change[1].split()]) == 0
    assert "fits      with" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--heads", "5"], "multiple"),
        (["folder"], "--layers, --width, --heads"),
        (["--no-measure", "--ranks", "2"], "--machine"),
        (["--no-measure", "--update-tier", "hbm"], "--update-tier hbm is not planned: a plan is of updates on the host"),
    ],
)
def test_what_is_no_usage(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *given]) == 2
    assert told in capsys.readouterr().err


def test_the_model_and_the_drive_are_looked_at_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement would say so first."""
    monkeypatch.setattr("tiered.cli.output.INTERVAL", 0.0)
    assert "has no config.json" in failure(capsys, "plan", tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    (tmp_path / "model").mkdir()
    for name, told in (("weights", "s config.json"), ("config.json", f"s config.json, {tmp_path}/model")):
        (tmp_path / "model" / name).write_text("{}")
        said = failure(capsys, "plan", tmp_path / "model" / name)
        assert said.strip().endswith(f"model/{name} is a file: name the folder with the model'{told}")
    assert "is a GGUF file, of which there are no plans yet: name the model" in failure(capsys, "plan", tmp_path / "x.gguf")
    (tmp_path / "models" / "Llama-3-8B").mkdir(parents=True)
    for name, told in (("Llama-3-8b", "; did you mean 'Llama-3-8B'?"), ("other", ": name one of a transformers model")):
        said = failure(capsys, "plan", tmp_path / "models" / name)
        assert f"there is no folder {tmp_path}/models/{name}{told}" in said
    assert f"there is no folder {tmp_path}/none/other: name one" in failure(capsys, "plan", tmp_path / "none" / "other")
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        store["w"] = torch.ones(2)
        store.commit()
    assert "is a store, and a plan is made of shapes" in failure(capsys, "plan", tmp_path / "store")
    told = failure(capsys, *SMALL, "--drive", tmp_path / "no")
    assert "does not exist; name one on the drive to measure with --drive" in told


def test_long_work_says_how_far_it_is(
    machine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered.cli.plan.run.INTERVAL", 1e9)
    assert main([*SMALL, *ONE, "--machine", machine]) == 0
    assert not capsys.readouterr().err  # it was over before
    monkeypatch.setattr("tiered.cli.plan.run.INTERVAL", 0.0)
    monkeypatch.setattr("tiered.cli.output.INTERVAL", 0.0)  # else a quick machine leaves lines out
    assert main([*SMALL, *ONE, "--machine", machine]) == 0
    said = capsys.readouterr().err
    assert said.startswith("playing steps, number 1: update='on_fetch', activations='memory', 1.0 MiB\n")
    assert "number 2: update='on_fetch', activations='memory', 2.0 MiB\n" in said
    assert "of about" not in said, "whether twice the budget is faster is asked when the first one is known"


def test_a_machine_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the help says, which names each number."""
    assert main(["plan", "--help"]) == 0
    told = capsys.readouterr().out.partition("a machine file by hand:\n")[2]
    example = told.partition("\n\n")[0]
    named = set(re.findall(r"\w+", told.partition("\n\n")[2].partition("examples:")[0]))
    assert {field.name for field in fields(Machine)} <= named
    path = tmp_path / "by_hand.json"
    path.write_text(example)
    assert Machine.of(path).dram == 16 << 30
    assert main([*SMALL, *ONE, "--machine", str(path)]) == 0
    assert "drive 3.50 GB/s read, 3.00 written" in capsys.readouterr().out


def test_errors_name_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tiered info --machine" in failure(capsys, *SMALL, "--machine", tmp_path / "none.json")
    (tmp_path / "mine.svg").write_text("mine")
    assert "--plot" in failure(capsys, *SMALL, "--no-measure", "--plot", tmp_path / "mine.svg")
