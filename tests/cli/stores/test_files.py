"""``tiered ls``, ``export`` and ``import``: exit codes, what is printed, what is written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import programs
from tests.cli.train.test_train import ONE_THREAD, command, message
from tests.store.test_verify import flip, place
from tests.zero.models import Tied
from tiered import TieredStore, zero
from tiered.cli.main import main
from tiered.format import generations


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    with TieredStore.open(folder, dram="8MiB") as store:
        store.put("a", torch.arange(1000))
        store.put("b/c", torch.ones(3, 4, dtype=torch.bfloat16))
        store.commit({"step": 5, "note": "first"})
        store.put("a", torch.arange(2000))
        store.commit({"step": 6})
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    with TieredStore.open(tmp_path / "model", dram="2MiB") as store:
        paged = zero.page(Tied(), store)
        optimizer = zero.AdamW(paged.parameters())
        paged.loss(1).backward()  # type: ignore[operator]
        optimizer.step()
        zero.commit(paged, optimizer, meta={"step": 1})
        values = {name: value for name, value in paged.state_dict().items() if name != "head.weight"}
        save_file(values, tmp_path / "expected.safetensors")
        store.close()
    return tmp_path / "model"


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {name: ((folder / name).read_bytes(), (folder / name).stat().st_mtime_ns) for name in os.listdir(folder)}


def test_ls(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = state(plain)
    assert main(["ls", str(plain)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "generation  tensors      size  meta",
        '         1        2   7.8 KiB  {"note": "first", "step": 5}',
        '         2        2  15.6 KiB  {"step": 6}',
        "",
        "generation 2:",
        "tensor  type      shape       size  written in",
        "a       int64     [2000]  15.6 KiB           2",
        "b/c     bfloat16  [3, 4]  24 bytes           1",
        "",
        f"{plain}: 2 tensors in generation 2, 15.6 KiB; 23.5 KiB in all 2 generations",
    ]
    assert main(["ls", str(plain), "--generation", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["generation"] == 1
    assert [one["meta"] for one in found["generations"]] == [{"step": 5, "note": "first"}, {"step": 6}]
    assert found["tensors"][0] == {"name": "a", "dtype": "int64", "shape": [1000], "bytes": 8000, "written": 1}
    assert found["bytes"] == 8024
    assert state(plain) == before


def test_ls_of_a_model_also_while_it_is_open(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = sum(parameter.numel() for parameter in Tied().parameters())
    assert main(["ls", str(model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"][0]["parameters"] == count
    assert found["models"][0]["step"] == 1
    units = found["models"][0]["units"]
    assert main(["ls", str(model)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["model", "parameters", "units", "states", "size", "step"]
    assert shown[1].split()[:3] == ["model", f"{count:,}", str(units)]
    assert shown[1].split()[-1] == "1"
    assert "of models, listed with --all)" in shown[-1]
    assert not any("model/param/" in line for line in shown)
    with TieredStore.open(model, dram="2MiB") as store:
        assert main(["ls", str(model)]) == 0
        shown = capsys.readouterr().out
        assert shown.splitlines()[1].split()[:3] == ["model", f"{count:,}", str(units)]
        with monkeypatch.context() as patched:  # as in a folder that cannot be written to

            def refuse(*given: object) -> None:
                raise PermissionError(errno.EACCES, "Permission denied")

            patched.setattr(generations, "Pin", refuse)
            assert main(["ls", str(model)]) == 0
            shown = capsys.readouterr().out
            assert shown.splitlines()[1].split()[:3] == ["model", "?", str(units)]
            assert f"{model} is in use by process {os.getpid()}" in shown
            assert main(["export", str(model), "--out", str(model.parent / "out")]) == 1
            assert f"in use by process {os.getpid()}" in capsys.readouterr().err
        assert main(["export", str(model), "--out", str(model.parent / "out")]) == 0
        assert not [name for name in os.listdir(model) if name.startswith("reader.")]
        store.close()


def test_ls_of_pieces(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tensors of a model with --all, those that match a pattern, and one tensor in the singular."""
    model = tmp_path / "stepped"
    with TieredStore.open(model, dram="2MiB") as store:
        paged = zero.page(Tied(), store)
        optimizer = zero.AdamW(paged.parameters())
        paged.loss(1).backward()  # type: ignore[operator]
        optimizer.step()
        optimizer.flush()  # makes the moments
        zero.commit(paged, optimizer)
        store.close()
    assert main(["ls", str(model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"][0]["step"] == 1, "of its optimizer, where the commit has no other"
    names = [one["name"] for one in found["tensors"]]
    states = sum(one["bytes"] for one in found["tensors"] if "#" in one["name"])
    assert 0 < found["models"][0]["state_bytes"] == states < found["models"][0]["bytes"]
    assert main(["ls", str(model), "--all"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name} " in shown for name in names)
    assert "listed with" not in shown
    assert main(["ls", str(model), "*/param/*", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["tensors"]] == [name for name in names if "/param/" in name]
    assert main(["ls", str(plain), "b/[c]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3] == "b/c     bfloat16  [3, 4]  24 bytes           1"
    assert lines[0] == "generation 2:"
    assert lines[-1].startswith(f"{plain}: 1 tensor matching 'b/[c]' in generation 2, 24 bytes; ")
    assert main(["ls", str(plain), "none"]) == 0
    shown = capsys.readouterr().out
    assert f"{plain}: 0 tensors matching 'none' in generation 2" in shown
    assert "did you mean" not in shown
    for wrong in ("b/x", "B/c", "b/c?"):
        assert main(["ls", str(plain), wrong]) == 0
        assert capsys.readouterr().out.endswith("; did you mean 'b/c'?\n")


def test_ls_of_what_is_damaged(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(plain / "manifest.2", 200)
    assert main(["ls", str(plain)]) == 1
    shown = capsys.readouterr().out
    assert "generation 1:" in shown
    assert "damaged" in shown
    assert main(["ls", str(plain), "--generation", "2"]) == 1
    assert "damaged" in message(capsys.readouterr().err)
    flip(plain / "manifest.1", 200)
    assert main(["ls", str(plain)]) == 1


def test_ls_refuses(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for given, says in (
        ([str(tmp_path / "absent")], "is not a folder"),
        ([str(tmp_path / "empty")], "not a tiered store with a commit"),
        ([str(plain), "--generation", "9"], "has no generation 9; there are: 1, 2"),
    ):
        assert main(["ls", *given]) == 1
        assert says in message(capsys.readouterr().err)
    assert main(["ls"]) == 2
    assert main(["ls", str(plain), "--generation", "0"]) == 2


@pytest.mark.parametrize("kind", [(), ("--as", "model"), ("--as", "deepspeed"), ("--as", "tensors")])
def test_what_is_imported_is_there(kind: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", f"{tmp_path}/lama/", str(tmp_path / "store"), *kind]) == 1
    assert f"{tmp_path}/lama/: there is no such file or folder" in message(capsys.readouterr().err)
    assert not (tmp_path / "store").exists()


def test_a_store_that_was_begun_and_has_no_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As an import leaves it that is killed early."""
    with TieredStore.open(tmp_path / "begun", dram="1MiB"):
        begun = "has begun it, and is at work or was stopped early: to run the same command again finishes it"
        assert main(["ls", str(tmp_path / "begun")]) == 1
        assert begun in message(capsys.readouterr().err)


def test_export(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, out = state(model), tmp_path / "out"
    assert main(["export", str(model), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{out}: model.safetensors of generation 1, ")
    assert "wrote" in shown.err
    found, expected = load_file(out / "model.safetensors"), load_file(tmp_path / "expected.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert state(model) == before
    assert main(["export", str(model), "--out", str(out)]) == 1
    assert "overwrite" in message(capsys.readouterr().err)
    arguments = ["--existing", "overwrite", "--shard", "40KB", "--dtype", "bfloat16", "--model", "model", "--generation", "1"]
    assert main(["export", str(model), "--out", str(out), *arguments]) == 0
    assert not (out / "model.safetensors").exists()
    part = load_file(out / json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]["position"])
    assert torch.equal(part["position"], expected["position"].bfloat16())


def test_export_refuses(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    for given, code, says in (
        ([str(model)], 2, "--out"),
        ([str(model), *out, "--dtype", "int8"], 2, "int8"),
        ([str(model), *out, "--shard", "0"], 2, "0"),
        ([str(model), *out, "--shard", "5"], 1, "--shard 5 is not; an amount without a unit is in bytes: did you mean '5GiB'?"),
        ([str(model), *out, "--shard", "5B"], 1, "--shard 5 is not\n"),
        ([str(model), "--out", str(model)], 1, "the folder of a store"),
        ([str(model), *out, "--model", "other"], 1, "no checkpoint of a model named 'other'"),
        ([str(model), *out, "--generation", "4"], 1, "no generation 4"),
        ([str(tmp_path), *out], 1, "no manifest"),
        ([str(model), "--out", str(tmp_path / "x.safetensors")], 1, "x.safetensors is the name of a file"),
    ):
        assert main(["export", *given]) == code
        assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_damage_is_named(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(plain / "data.0", place(plain, "b/c"))
    assert main(["export", str(plain), "--out", str(tmp_path / "out")]) == 1
    *_, last = capsys.readouterr().err.splitlines()  # what was written before may have been told of
    assert last.startswith("tiered: wrong checksum in tensor 'b/c'")
    assert os.listdir(tmp_path / "out") == []


def test_there_and_back(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(plain), "--out", str(tmp_path / "out"), "--shard", "10KB"]) == 0
    state_folder = str(tmp_path / "again")
    assert main(["import", str(tmp_path / "out"), state_folder, "--dram", "4MiB"]) == 0
    assert "2 tensors, 15.6 KiB, in generation 1" in capsys.readouterr().out
    with TieredStore.open(state_folder, dram="4MiB") as store:
        assert torch.equal(store.get("a"), torch.arange(2000))
        assert torch.equal(store.get("b/c"), torch.ones(3, 4, dtype=torch.bfloat16))
    assert main(["import", str(tmp_path / "out"), state_folder, "--dram", "4MiB"]) == 1
    assert "overwrite" in message(capsys.readouterr().err)
    assert main(["import", str(tmp_path / "out"), state_folder, "--dram", "4MiB", "--existing", "overwrite"]) == 0
    assert main(["import", str(tmp_path / "absent"), state_folder, "--dram", "4MiB"]) == 1
    assert main(["import", str(tmp_path / "out")]) == 2


def test_the_files_of_a_source_say_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, into = tmp_path / "source", [str(tmp_path / "store"), "--dram", "4MiB"]
    source.mkdir()

    def told(*more: str, code: int = 1) -> str:
        assert main(["import", str(source), *into, *more]) == code
        return capsys.readouterr().err.splitlines()[-1]

    save_file({"a": torch.arange(3)}, source / "model.safetensors")
    assert "--tag is for checkpoints of DeepSpeed's: --as tensors" in told("--tag", "x", "--as", "tensors", code=2)
    assert f"--verify are for models: {source} is tensors" in told("--verify", code=2)
    assert f"--model is for models and checkpoints: {source} is tensors" in told("--model", "it", code=2)
    assert main(["import", str(source), *into]) == 0
    assert "1 tensor, 24 bytes" in capsys.readouterr().out
    (source / "config.json").write_text("{}")
    assert "config.json" in told()
    assert main(["import", str(source), *into, "--as", "tensors", "--existing", "overwrite"]) == 0
    capsys.readouterr()
    (source / "latest").write_text("step")
    assert "config.json" in told()  # what transformers saved, with its weights
    assert "is no checkpoint of DeepSpeed's" in told("--tag", "step")
    (source / "model.safetensors").unlink()
    assert "is no checkpoint of DeepSpeed's" in told()


@pytest.mark.parametrize("what", ["export", "import"])
def test_stopped(what: str, plain: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle: exit code 130, one line, nothing left."""
    save_file({"x": torch.ones(100), "y": torch.ones(100)}, tmp_path / "it.safetensors")
    given = {
        "export": ["export", str(plain), "--out", str(tmp_path / "out")],
        "import": ["import", str(tmp_path / "it.safetensors"), str(tmp_path / "new"), "--dram", "4MiB"],
    }[what]
    program = f"""if True:
        import os, signal, sys
        import tiered.cli.output as progress
        from tiered.cli.main import main
        progress.Progress.working = lambda *_: os.kill(os.getpid(), signal.SIGINT)
        sys.exit(main({given!r}))
    """
    done = programs.run([sys.executable, "-c", program], capture_output=True, text=True, env=ONE_THREAD, timeout=120)
    assert done.returncode == 130, done.stderr
    assert "stopped; nothing was" in done.stderr.splitlines()[-1]
    assert not done.stdout
    if what == "export":
        assert os.listdir(tmp_path / "out") == []


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ls", "export", "import"):
        assert main([name, "--help"]) == 0
        assert f"tiered {name} " in capsys.readouterr().out.partition("examples:")[2]


def test_by_the_console_script(plain: Path) -> None:
    done = subprocess.run(command("ls", plain), capture_output=True, text=True, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert "2 tensors in generation 2" in done.stdout
