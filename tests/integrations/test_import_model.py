"""``import_model``: weights are read once and written once, an import that was stopped goes on, and what is wrong is named."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import tiered  # noqa: E402
from tests import programs  # noqa: E402
from tests.programs import ONE_THREAD  # noqa: E402
from tests.quick import quick  # noqa: E402
from tiered import CapacityError, MisuseError, Owner, SafetensorsError, TieredError, TieredStore, verify, zero  # noqa: E402
from tiered.cli.main import main  # noqa: E402
from tiered.cli.output import Progress  # noqa: E402
from tiered.format.safetensors import WeightFiles  # noqa: E402
from tiered.integrations import importing  # noqa: E402
from tiered.integrations.transformers import from_pretrained, import_model, open_model  # noqa: E402
from tiered.zero.construction import deferred  # noqa: E402
from tiered.zero.paging.pager import pager_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
UNIT = 64 << 10
IDS = torch.arange(7)[None]


def llama(**options: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**(SIZES | options)))


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def qwen() -> Any:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts))


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=2))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "mixtral": mixtral,
    "qwen": qwen,
    "gpt2": gpt2,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made = tmp_path_factory.mktemp("sources")

    def source(name: str, dtype: torch.dtype = torch.float32, shard: str = "100KB") -> Path:
        folder = made / f"{name}-{dtype}-{shard}"
        if not folder.exists():
            torch.manual_seed(0)
            MODELS[name]().to(dtype).save_pretrained(folder, max_shard_size=shard)
        return folder

    return source


@pytest.fixture
def folder(sources: Callable[..., Path], tmp_path: Path) -> Path:
    """A folder of a sharded Llama that may be changed."""
    source, folder = sources("llama"), tmp_path / "llama"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def opened(path: Path, **options: Any) -> TieredStore:
    return TieredStore.open(path / "store", **({"dram": "2MiB"} | options))


def assert_same(model: Any, reference: Any) -> None:
    expected = reference.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, value in model.state_dict().items():
        assert value.dtype is expected[name].dtype
        assert torch.equal(value, expected[name]), name


class Read:
    """Counts the bytes that are read from safetensors files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes, read = 0, WeightFiles.read

        def counted(files: WeightFiles, name: str, start: int, into: memoryview) -> None:
            self.nbytes += len(into)
            read(files, name, start, into)

        monkeypatch.setattr(WeightFiles, "read", counted)


@pytest.mark.parametrize(
    ("name", "dtype", "shard", "options"),
    [
        ("llama", torch.float32, "100KB", {}),
        ("llama", torch.bfloat16, "1GB", {"compute": torch.float32}),
        ("tied", torch.float16, "100KB", {}),
        ("mixtral", torch.float32, "100KB", {}),
        ("mixtral", torch.bfloat16, "100KB", {"compute": torch.float32}),
        ("qwen", torch.bfloat16, "1GB", {}),
        ("gpt2", torch.float32, "100KB", {}),
    ],
)
def test_everything_is_read_once_and_written_once(
    name: str,
    dtype: torch.dtype,
    shard: str,
    options: dict[str, Any],
    sources: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No parameter is computed as a whole: those of experts go to their units expert by expert."""
    read = Read(monkeypatch)
    monkeypatch.setattr(deferred._Computed, "write", None)
    source = sources(name, dtype, shard)
    with opened(tmp_path) as store:
        model = import_model(source, store, largest_unit=UNIT, **options)
        units = [unit.plan for unit in pager_of(model).units]
        weights = sum(unit.stored_nbytes for unit in units)
        written = sum(link.down.bytes for link in store.statistics().links)
        rest = sum(store.spec(key).nbytes for key in store if "/param/" not in key)
        assert weights <= written <= weights + rest + 4096 * (len(units) + 10)  # blocks, and the record
        values = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
        assert values == read.nbytes
        store.close()
    with opened(tmp_path, access="read") as store:
        model = open_model(store)
        assert_same(model, AutoModelForCausalLM.from_pretrained(source, dtype=options.get("compute", dtype)))
        if name in ("mixtral", "qwen"):
            assert sum("experts[" in unit.name for unit in units) == 3 * (4 if name == "mixtral" else 8)


@pytest.mark.parametrize("prepared", ["", "changed", "assigned"])
def test_code_that_writes_to_weights_gets_them_in_memory(prepared: str, sources: Callable[..., Path], tmp_path: Path) -> None:
    """What cannot be recorded is done as within ``zero.init``; random values are drawn as they would be."""

    def change(model: Any) -> Any:
        with torch.no_grad():
            model.lm_head.weight.mul_(2) if prepared == "changed" else None
            if prepared == "assigned":
                model.lm_head.weight.data = model.lm_head.weight.data * 2
        return model

    torch.manual_seed(5)
    expected = change(LlamaForCausalLM.from_pretrained(sources("llama")))
    torch.manual_seed(5)
    with opened(tmp_path) as store:
        assert_same(from_pretrained(LlamaForCausalLM, sources("llama"), store, prepare=change), expected)
        store.close()


def test_new_heads_are_initialised_as_in_memory(sources: Callable[..., Path], tmp_path: Path) -> None:
    base = tmp_path / "base"
    LlamaModel(LlamaConfig(**SIZES)).save_pretrained(base)
    for cls, source in (LlamaForCausalLM, base), (LlamaForSequenceClassification, sources("llama")):
        torch.manual_seed(5)
        expected = cls.from_pretrained(source)
        torch.manual_seed(5)
        with opened(tmp_path) as store:
            with pytest.raises(MisuseError, match=r"lack '[a-z_.]+'.*missing='initialise'"):
                import_model(source, store, cls=cls, name=cls.__name__)
            torch.manual_seed(5)
            assert_same(import_model(source, store, cls=cls, name=cls.__name__, missing="initialise"), expected)
            assert zero.init(store).statistics().resident == 0


# An import that is stopped


class Stop(Exception):
    pass


def stopping(units: int) -> Callable[[str, float], None]:
    """A progress that ends the import when so many units are in the store."""
    seen = 0

    def progress(what: str, share: float) -> None:
        nonlocal seen
        seen += what.startswith("imported")
        if seen == units:
            raise Stop

    return progress


@pytest.mark.parametrize("options", quick([{}, {"quantize": "int8"}], [{"quantize": "int8"}]), ids=["exact", "quantised"])
def test_it_goes_on_where_it_was_stopped(
    options: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read = Read(monkeypatch)
    with opened(tmp_path / "whole") as store:
        whole = import_model(folder, store, largest_unit=UNIT, **options)
        expected = {key: store.get(key) for key in store if not key.endswith("/checkpoint")}
        units, all_of_it = len(pager_of(whole).units), read.nbytes
    read.nbytes = 0
    for number in range(1, units, 3):
        with opened(tmp_path) as store:
            with pytest.raises(Stop):
                import_model(folder, store, largest_unit=UNIT, progress=stopping(min(3, units - number)), **options)
            store.close()  # what it committed is all there is
        assert main(["ls", str(tmp_path / "store"), "--json", str(tmp_path / "ls.json")]) == 0
        told = capsys.readouterr().out
        assert "the import of model 'model' is not finished: the same tiered import goes on with it" in told
        assert "model/param/" not in told, "what is there of it is listed with --all"
        assert json.loads((tmp_path / "ls.json").read_text())["unfinished_imports"] == ["model"]
        assert main(["export", str(tmp_path / "store"), "--out", str(tmp_path / "out")]) == 1
        assert "is not finished: run the same tiered import" in capsys.readouterr().err
        with opened(tmp_path, access="read") as store:
            for name in None, "model":
                with pytest.raises(MisuseError, match=r"the import of model 'model' into .* is not finished: run"):
                    open_model(store, name=name)
    with opened(tmp_path) as store:
        import_model(folder, store, largest_unit=UNIT, **options)
        store.close()
    assert read.nbytes == all_of_it  # nothing twice
    with opened(tmp_path, access="read") as store:
        found = {key: store.get(key) for key in store if not key.endswith("/checkpoint")}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
        if not options:
            assert_same(open_model(store), LlamaForCausalLM.from_pretrained(folder))


def test_it_goes_on_in_the_same_store(folder: Path, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for units in 4, 3:
            with pytest.raises(Stop):
                import_model(folder, store, largest_unit=UNIT, progress=stopping(units))
        record = importing.begun(store, "model")
        assert record is not None
        assert record.done == 7
        assert_same(import_model(folder, store, largest_unit=UNIT), LlamaForCausalLM.from_pretrained(folder))


KILLED = """
import os, sys, time
import torch
torch.set_num_threads(1)
from tiered import TieredStore
from tiered.integrations import importing
from tiered.integrations.transformers import import_model, quietly
quietly()
importing.COMMIT_SECONDS = 0
folder, path = sys.argv[1:]
with TieredStore.open(path, dram="2MiB") as store:
    import_model(folder, store, largest_unit=65536, progress=lambda what, share: print(what, flush=True))
    store.close()
print("whole", flush=True)
"""


def test_it_goes_on_after_a_kill(folder: Path, tmp_path: Path) -> None:
    draw, done, rounds = random.Random(3), 0, 0
    while not done:
        after = draw.randrange(1, 8)
        rounds += 1
        child = programs.Popen(
            [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "store")],
            stdout=programs.subprocess.PIPE,
            text=True,
            env=ONE_THREAD | {"HF_HUB_OFFLINE": "1"},
            imported=programs.MODELS,
        )
        assert child.stdout is not None
        for line in child.stdout:
            done |= line == "whole\n"
            after -= line.startswith("imported")
            if after == 0 and rounds < 5:
                child.send_signal(signal.SIGKILL)
                break
        child.stdout.close()
        assert child.wait() == (0 if done else -signal.SIGKILL)
    with opened(tmp_path, access="read") as store:
        assert_same(open_model(store), LlamaForCausalLM.from_pretrained(folder))
    assert rounds > 2


def test_other_sources_and_options_are_refused(folder: Path, tmp_path: Path, sources: Callable[..., Path]) -> None:
    with opened(tmp_path) as store:
        with pytest.raises(Stop):
            import_model(folder, store, largest_unit=UNIT, progress=stopping(4))
        shard = sorted(folder.glob("*.safetensors"))[1]
        status = shard.stat()
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        with pytest.raises(MisuseError, match=rf"not finished, and '{shard.name}' is not what it was begun with: .*overwrite"):
            import_model(folder, store, largest_unit=UNIT)
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
        for wrong, says in (
            ({"largest_unit": UNIT * 2}, r"begun with units of 64\.0 KiB, not units of 128\.0 KiB: .* to begin anew$"),
            ({"largest_unit": UNIT, "quantize": "int4"}, "begun with weights as they are, not weights packed as int4: import"),
            ({"largest_unit": UNIT, "cls": LlamaForSequenceClassification}, "begun with cls AutoModelForCausalLM"),
        ):
            with pytest.raises(MisuseError, match=says):
                import_model(folder, store, **wrong)
        with pytest.raises(MisuseError, match=r"'config\.json' is not what"):
            import_model(sources("tied"), store, largest_unit=UNIT)
        assert importing.begun(store, "model").done == 4  # type: ignore[union-attr]
        import_model(sources("mixtral"), store, largest_unit=UNIT, existing="overwrite")
        store.close()
    with opened(tmp_path, access="read") as store:
        assert_same(open_model(store), MixtralForCausalLM.from_pretrained(sources("mixtral")))


@pytest.mark.parametrize(
    ("file", "contents", "error", "says"),
    [
        ("config.json", "{}", MisuseError, r"cannot read .*config\.json"),
        ("config.json", "[", MisuseError, r"config\.json is damaged, or not JSON"),
        ("model.safetensors.index.json", "[]", SafetensorsError, "is not an index"),
        (None, "", SafetensorsError, "which is missing"),
    ],
)
def test_a_folder_that_is_damaged_is_named(
    file: str | None, contents: str, error: type[Exception], says: str, folder: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    if file is None:
        sorted(damaged.glob("*.safetensors"))[1].unlink()
    else:
        (damaged / file).write_text(contents)
    with opened(tmp_path) as store, pytest.raises(error, match=says):
        import_model(damaged, store)


CONFIGS: dict[str, tuple[dict[str, Any] | str, str]] = {
    "layers": ({"num_hidden_layers": 10_000_000}, "10,000,000 for 'num_hidden_layers'; the limit is 10,000"),
    "layers inside": ({"text_config": {"n_layer": 10_001}}, "10,001 for 'n_layer'"),
    "fewer than no layers": ({"num_hidden_layers": -1}, "-1 for 'num_hidden_layers'"),
    "depths": ({"depths": [200] * 100}, "20,000 for 'depths'"),
    "experts": ({"num_local_experts": 1_000_000}, "1,000,000 for 'num_local_experts'; the limit is 100,000"),
    "layers of experts": ({"num_hidden_layers": 5000, "num_experts": 500}, "5,000 layers of 500 experts"),
    "labels": ({"num_labels": 10**9}, "1,000,000,000 for 'num_labels'"),
    "vocabulary": ({"vocab_size": 10**12}, "1,000,000,000,000 for 'vocab_size'"),
    "a huge number": ({"hidden_size": 10**60}, "an integer of 200 bits"),
    "no heads": ({"num_attention_heads": 0}, "transformers cannot read"),
    "a text for a number": ({"hidden_size": "x"}, "expected int"),
    "none for a number": ({"vocab_size": None}, "expected int"),
    "an unknown type": ({"dtype": "float33"}, "float33"),
    "half a surrogate pair": ({"x": "\ud800"}, "not Unicode"),
    "nesting": ('{"a":' * 5000, "not JSON"),
    "no object": ("3", "is no configuration of a model, but 3"),
    "code": ({"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}, "contains custom code"),
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "cannot be paged"),
}


@pytest.mark.parametrize("wrong", CONFIGS)
def test_a_configuration_that_cannot_be_is_refused_before_anything_is_made(wrong: str, tmp_path: Path) -> None:
    """By every reader of a config.json, in one line with the number."""
    contents, says = CONFIGS[wrong]
    folder = tmp_path / "model"
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    if isinstance(contents, dict):
        contents = json.dumps({**json.loads((folder / "config.json").read_text()), **contents})
    (folder / "config.json").write_text(contents)
    save_file({}, folder / "model.safetensors")
    with opened(tmp_path) as store:
        calls: list[Callable[[], Any]] = [
            lambda: tiered.plan(folder, workload=tiered.Workload(sequence=4), dram="1MiB"),
            lambda: import_model(folder, store),
            lambda: from_pretrained(AutoModelForCausalLM, folder, store, existing="resume"),
        ]
        if says.startswith(tuple("0123456789-")):
            calls.append(lambda: from_pretrained(AutoModelForCausalLM, folder, store))
        for call in calls:
            with pytest.raises(MisuseError, match=re.escape(says)) as refused:
                call()
            assert str(refused.value).isprintable()
        assert list(store) == []


def test_a_stray_file_of_tensors_is_not_taken_for_the_weights(folder: Path, tmp_path: Path) -> None:
    """``transformers`` would read pytorch_model.bin beside it, as a whole."""
    torch.save(LlamaForCausalLM.from_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    shutil.copy(folder / "pytorch_model.bin", folder / "adapter_model.safetensors")
    with opened(tmp_path) as store:
        for call in (
            lambda: import_model(folder, store),
            lambda: from_pretrained(AutoModelForCausalLM, folder, store),
        ):
            with pytest.raises(MisuseError, match=r"neither model\.safetensors nor .*'adapter_model\.safetensors' is another"):
                call()


def test_other_memory_gives_other_units(folder: Path, tmp_path: Path) -> None:
    """With more memory the units stay as they were; with less MisuseError says how much there has to be."""
    with opened(tmp_path, dram="1MiB") as store:
        with pytest.raises(Stop):
            import_model(folder, store, progress=stopping(4))
        store.close()
    with opened(tmp_path, dram="1028KiB") as store, pytest.raises(Stop):
        import_model(folder, store, progress=stopping(2))
    with opened(tmp_path, dram="8MiB") as store:
        assert_same(import_model(folder, store), LlamaForCausalLM.from_pretrained(folder))
    with opened(tmp_path / "other", dram="4MiB") as store:
        with pytest.raises(Stop):
            import_model(folder, store, largest_unit=1 << 20, progress=stopping(2))
        store.close()
    with opened(tmp_path / "other", dram="1MiB") as store:
        with pytest.raises(MisuseError, match=r"4,194,304 bytes of memory \(--dram"):
            import_model(folder, store, largest_unit=1 << 20)
        store.close()


def test_a_finished_model_stays_until_another_is_whole(folder: Path, tmp_path: Path, sources: Callable[..., Path]) -> None:
    with opened(tmp_path) as store:
        import_model(folder, store)
        before = {key: store.get(key) for key in store}
        number, whole, old = 1, False, 0
        while not whole:  # stopped before each call that changes the store, in a program that goes on and commits
            with pytest.MonkeyPatch.context() as patch:
                whole = not stops_at(patch, number, lambda: import_model(sources("mixtral"), store, existing="overwrite"))
            store.commit()
            if not whole and not any(owner.kind == "import" for owner in store.owners()):
                old += 1
                assert {key: store.owner_of(key) for key in store} == dict.fromkeys(before, Owner("model", "model"))
                assert all(torch.equal(store.get(key), before[key]) for key in before)
            elif not whole:  # the new one was committed
                assert_same(open_model(store), MixtralForCausalLM.from_pretrained(sources("mixtral")))
                break
            number += STEP
        assert old >= 8
        import_model(sources("mixtral"), store, existing="overwrite")
        assert store.owners() == [Owner("model", "model")]
        store.close()
    with opened(tmp_path, access="read") as store:
        assert_same(open_model(store), MixtralForCausalLM.from_pretrained(sources("mixtral")))
    assert verify(tmp_path / "store").sound


STEP = 5


def stops_at(patch: pytest.MonkeyPatch, number: int, call: Callable[[], object]) -> bool:
    """Make a call and have what it does with a store end at step ``number`` by an exception; return whether it came so far."""
    made: list[str] = []

    def struck(name: str) -> Callable[..., Any]:
        original = getattr(TieredStore, name)

        def strikes(*given: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) == number:
                raise Stop
            return original(*given, **options)

        return strikes

    for name in ("put", "create", "delete", "delete_owned", "rename_many", "claim", "lease", "commit"):
        patch.setattr(TieredStore, name, struck(name))
    try:
        call()
    except Stop:
        return True
    return False


def test_a_full_disk_is_named_and_it_goes_on_with_more_room(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "COMMIT_SECONDS", 0)
    with opened(tmp_path, nvme="500KiB", dram="1MiB") as store:
        with pytest.raises(CapacityError, match=r"the import of model 'model' takes .*, and tier nvme has 500\.0 KiB free"):
            import_model(folder, store, largest_unit=UNIT)
        assert list(store) == []  # it began nothing
    with opened(tmp_path, nvme="1MiB", dram="1MiB") as store:

        def others_fill_it(what: str, share: float) -> None:
            if "other" not in store:
                store.put("other", torch.zeros(500 << 10, dtype=torch.uint8))

        with pytest.raises(CapacityError, match=r"the capacity of 1\.0 MiB in .* is used up"):
            import_model(folder, store, largest_unit=UNIT, progress=others_fill_it)
        store.close()
    with opened(tmp_path, dram="1MiB") as store:
        record = importing.begun(store, "model")
        assert record is not None
        assert record.done > 0
        assert_same(import_model(folder, store, largest_unit=UNIT), LlamaForCausalLM.from_pretrained(folder))


# What was written, and what is wrong with files


def test_what_was_written_is_compared(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Read(monkeypatch)
    told: list[str] = []
    with opened(tmp_path) as store:
        import_model(folder, store, largest_unit=UNIT, verify=True, name="right", progress=lambda what, _: told.append(what))
        assert any(what.startswith("verified ") for what in told)
        weights = sum(parameter.nbytes for parameter in LlamaForCausalLM.from_pretrained(folder).parameters())
        assert read.nbytes == 2 * weights
        verify = importing.Import.verify

        def damaged(filling: importing.Import) -> None:
            key = next(key for key in store if key.startswith("model/param/lm_head"))
            with store.lease(key, access="write", tier="dram") as unit:
                unit[9000] ^= 1
                del unit
            verify(filling)

        monkeypatch.setattr(importing.Import, "verify", damaged)
        with pytest.raises(TieredError, match=r"the values of 'lm_head.weight.*' in .* are not those in the files"):
            import_model(folder, store, largest_unit=100_000, verify=True)
        monkeypatch.undo()
        assert_same(import_model(folder, store, largest_unit=100_000, verify=True), LlamaForCausalLM.from_pretrained(folder))


def test_a_file_that_is_cut_short_is_named(folder: Path, tmp_path: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[-1]
    contents = shard.read_bytes()
    shard.write_bytes(contents[:-4])
    with opened(tmp_path) as store:
        with pytest.raises(SafetensorsError, match=shard.name):
            import_model(folder, store)
        assert list(store) == []
        shard.write_bytes(contents)

        def cut(what: str, share: float) -> None:
            if share > 0.3:
                shard.write_bytes(contents[:-4])

        with pytest.raises(SafetensorsError, match=f"{shard.name} became shorter while it was read"):
            import_model(folder, store, largest_unit=UNIT, progress=cut)
        with pytest.raises(SafetensorsError, match=shard.name):
            import_model(folder, store, largest_unit=UNIT, existing="overwrite")

        def touch(what: str, share: float) -> None:
            if share == 1:
                os.utime(shard, ns=(0, 0))

        shard.write_bytes(contents)
        with pytest.raises(MisuseError, match=f"{shard.name} was changed while it was imported"):
            import_model(folder, store, largest_unit=UNIT, existing="overwrite", progress=touch)
        with pytest.raises(MisuseError, match="has no model that can be opened"):
            open_model(store)
        store.close()


# Memory


MEASURED = """
import sys
import torch
torch.set_num_threads(1)
from transformers import Qwen3MoeForCausalLM
from tiered import TieredStore
from tiered.integrations.transformers import import_model, quietly

def memory(name):
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(name))) * 1024

quietly()
import transformers.conversion_mapping
folder, path = sys.argv[1:]
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
with TieredStore.open(path, dram="16MiB") as store:
    import_model(folder, store, largest_unit=4 << 20)
    store.close()
print(memory("VmHWM") - before)
"""


def test_experts_larger_than_the_memory_are_imported(tmp_path: Path) -> None:
    """All experts of a layer are one parameter, here of 48 and 24 MiB, three times the pool. The bound is 128 MiB beside it."""
    sizes = {"hidden_size": 512, "num_hidden_layers": 1, "num_experts": 32, "moe_intermediate_size": 384}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **sizes, "num_experts_per_tok": 2}))
    assert max(parameter.nbytes for parameter in model.parameters()) == 48 << 20
    model.save_pretrained(tmp_path / "moe", max_shard_size="40MB")
    child = programs.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "moe"), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        env=ONE_THREAD | {"HF_HUB_OFFLINE": "1"},
        imported=programs.MODELS,
    )
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) < 1.1 * (16 << 20) + (64 << 20)
    with TieredStore.open(tmp_path / "store", dram="8MiB", access="read") as store:
        assert_same(open_model(store), model)


# The command


def test_what_was_imported_is_exported_as_a_folder_to_open(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, out = str(tmp_path / "store"), tmp_path / "out"
    assert main(["import", str(folder), store, "--dram", "1MiB"]) == 0
    assert main(["export", store, "--out", str(out)]) == 0
    assert "with config.json" in capsys.readouterr().out
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert_same(AutoModelForCausalLM.from_pretrained(out), AutoModelForCausalLM.from_pretrained(folder))
    half = tmp_path / "half"
    assert main(["export", store, "--out", str(half), "--dtype", "bfloat16"]) == 0
    assert AutoModelForCausalLM.from_pretrained(half).dtype == torch.bfloat16
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")  # another model's
    capsys.readouterr()
    assert main(["export", store, "--out", str(other)]) == 1
    assert "has another config.json than the model: name another folder, or give --existing" in capsys.readouterr().err
    assert [one.name for one in other.iterdir()] == ["config.json"]
    (other / "merges.txt").write_text("a b")
    assert main(["export", store, "--out", str(other), "--existing", "overwrite"]) == 1
    assert "has a merges.txt, and the model has none: name another folder, or remove that file" in capsys.readouterr().err
    (other / "merges.txt").unlink()
    assert main(["export", store, "--out", str(other), "--existing", "overwrite"]) == 0
    assert_same(AutoModelForCausalLM.from_pretrained(other), AutoModelForCausalLM.from_pretrained(folder))


def test_a_part_of_a_model_is_not_taken_for_tensors(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part, store = tmp_path / "part", str(tmp_path / "store")
    shutil.copytree(folder, part)
    (part / "config.json").unlink()
    (part / "tokenizer.json").write_text("{}")
    assert main(["import", str(part), store]) == 1
    assert "has tokenizer.json and no config.json" in capsys.readouterr().err
    assert main(["import", str(folder / "config.json"), store]) == 1
    assert "is the configuration of a model: name its folder" in capsys.readouterr().err
    assert not Path(store).exists()
    assert main(["import", str(part), store, "--as", "tensors"]) == 0
    assert main(["generate", store, "--prompt", "a"]) == 1
    assert "tiered import FOLDER STORE makes one of a folder with config.json" in capsys.readouterr().err


def test_the_command_says_how_to_go_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(tmp_path / "store")
    given = ["import", str(folder), store, "--dram", "2MiB", "--unit", "64KiB"]
    shown = Progress.working

    def interrupted(progress: Progress, what: str, share: float) -> None:
        if share > 0.4:
            os.kill(os.getpid(), signal.SIGINT)
        shown(progress, what, share)

    monkeypatch.setattr(Progress, "working", interrupted)
    assert main(given) == 130
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("tiered: stopped; ")
    assert f"are in {store}: the same command goes on from there" in error
    monkeypatch.undo()
    assert main(["generate", store, "--prompt", "a"]) == 1
    assert "the import of model 'model'" in capsys.readouterr().err
    assert main([*given[:-1], "96KiB"]) == 1
    assert "--existing overwrite" in capsys.readouterr().err
    assert main([*given, "--verify"]) == 0
    assert "LlamaForCausalLM of " in capsys.readouterr().out
    with opened(tmp_path, access="read") as reading:
        assert_same(open_model(reading), LlamaForCausalLM.from_pretrained(folder))
