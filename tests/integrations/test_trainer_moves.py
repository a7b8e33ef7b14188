"""Checkpoints of Trainer that are copied without their store: resumed from in memory and in another store, or refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, Trainer, TrainerState  # noqa: E402

from tests.integrations.test_transformers import SAVING, assert_states, gpt2, llama, logged, paged, same, trainer  # noqa: E402
from tests.quick import quick  # noqa: E402
from tiered import MisuseError, TieredStore, zero  # noqa: E402
from tiered.integrations.transformers import CommitCheckpoints, TieredTrainer, training  # noqa: E402
from tiered.zero.checkpoint.torch_writer import TorchFileWriter  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
RUN: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 1}
RUN |= {"weight_decay": 0.1, "label_names": ["labels"]}
WHOLE = {"checkpoints": "whole"}


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


class Tokenizer:
    """Stands for a tokenizer: a collator has it, and it saves itself."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("{}")

    @property
    def tokenizer(self) -> Tokenizer:
        return self


def train(store: TieredStore, model: Any, folder: Path, existing: str = "refuse", **options: Any) -> Any:
    """A trainer whose checkpoints are whole."""
    more = {**WHOLE, **options.pop("more", {})}
    return trainer(TieredTrainer, paged(model, store, existing=existing), folder, more, **RUN, **options)


def moved(folder: Path, to: Path) -> str:
    shutil.copytree(folder, to / folder.name)
    shutil.rmtree(folder.parent)
    return str(to / folder.name)


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "gpt2": (gpt2, {"gradient_accumulation_steps": 2}),
    "llama, sgd": (llama, {"optim": "sgd"}),
    "adapter": (adapted, {}),
}


@pytest.mark.parametrize("case", quick(CASES, ["gpt2", "adapter"]))
def test_a_whole_checkpoint_is_resumed_from_without_its_store(case: str, tmp_path: Path) -> None:
    make, options = CASES[case]
    collator = {"data_collator": Tokenizer()}
    reference = trainer(Trainer, make(), tmp_path / "a", collator, **RUN, **options)
    reference.train()
    expected = tmp_path / "a" / "checkpoint-2"
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        ours = train(store, make(), tmp_path / "b", more=collator, **options)
        ours.train()
        assert same(ours.model, reference.model)
        store.close()
    there = tmp_path / "b" / "checkpoint-2"
    names = {path.name for path in there.iterdir()} - {"tiered.json", "model.safetensors.index.json"}
    assert names == {path.name for path in expected.iterdir()} > {"optimizer.pt", "rng_state.pth", "tokenizer.json"}
    for file in expected.glob("*.safetensors"):
        found, wanted = load_file(there / file.name), load_file(file)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert_states(*(torch.load(folder / "optimizer.pt", weights_only=True)["state"] for folder in (there, expected)))
    folder = moved(there, tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "store")
    again = trainer(Trainer, make(), tmp_path / "c", collator, **RUN, **options)
    again.train(resume_from_checkpoint=folder)
    with TieredStore.open(tmp_path / "new", dram="1MiB") as store:
        there_too = train(store, make(), tmp_path / "d", more=collator, **options)
        there_too.train(resume_from_checkpoint=folder)
        for one in (again, there_too):
            assert same(one.model, reference.model)
            assert logged(one)[:-1] == logged(reference)[:-1]
        store.close()


def test_a_folder_that_only_names_a_commit_says_what_to_copy(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        trainer(TieredTrainer, paged(llama(), store), tmp_path / "a", **SAVING).train()
        store.close()
    folder = moved(tmp_path / "a" / "checkpoint-5", tmp_path / "elsewhere")
    memory = llama()
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        trainer(Trainer, memory, tmp_path / "b", **SAVING).train(resume_from_checkpoint=folder)
    assert same(memory, llama())
    with TieredStore.open(tmp_path / "new", dram="1MiB") as store:
        ours = trainer(TieredTrainer, paged(llama(), store), tmp_path / "elsewhere", **SAVING)
        why = rf"only names that commit, of the store {tmp_path}/store: .*checkpoints='whole'"
        for given in (folder, True):
            with pytest.raises(MisuseError, match=why):
                ours.train(resume_from_checkpoint=given)
        assert same(ours.model, llama())
        store.close()


def test_a_folder_with_the_model_alone_is_loaded_and_not_resumed_from(tmp_path: Path) -> None:
    class Mine(CommitCheckpoints, Trainer):  # type: ignore[misc]
        pass

    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        ours = trainer(Mine, paged(llama(), store), tmp_path / "a", {"checkpoints": "model"}, **SAVING)
        ours.train()
        ours.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))  # by its commit
        expected = {name: value.clone() for name, value in ours.model.state_dict().items()}
        store.close()
    folder = moved(tmp_path / "a" / "checkpoint-5", tmp_path / "elsewhere")
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "trainer_state.json").write_bytes(Path(folder, "trainer_state.json").read_bytes())
    torch.save(loaded, tmp_path / "pickled" / "pytorch_model.bin")  # as of a Trainer with save_only_model=True
    with TieredStore.open(tmp_path / "new", dram="1MiB") as store:
        model = paged(llama(), store)
        for there in (folder, str(tmp_path / "pickled")):
            with pytest.raises(MisuseError, match=r"has no optimizer\.pt.*checkpoints='whole'"):
                trainer(TieredTrainer, model, tmp_path / "b", **SAVING).train(resume_from_checkpoint=there)
        assert same(model, llama())
        with pytest.raises(MisuseError, match="checkpoints is 'commits', 'model' or 'whole', not 'all'"):
            trainer(TieredTrainer, model, tmp_path / "b", {"checkpoints": "all"})
        with pytest.raises(MisuseError, match="save_only_model=True has the model in place of commits"):
            trainer(TieredTrainer, model, tmp_path / "b", WHOLE, save_only_model=True)
        store.close()


def test_files_outlive_their_generations_and_are_not_read_in_part(tmp_path: Path) -> None:
    """Also where a limit, and the best checkpoint, drop others; of an earlier training in the folder nothing stays."""
    options = {**SAVING, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.05, "load_best_model_at_end": True}
    reference = trainer(Trainer, llama(), tmp_path / "a", **options, save_total_limit=2)
    reference.train()
    (tmp_path / "b" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "b" / "checkpoint-5" / "pytorch_model.bin").write_bytes(b"of another training")
    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=1) as store:
        ours = trainer(TieredTrainer, paged(llama(), store), tmp_path / "b", WHOLE, **options)
        ours.train()
        assert same(ours.model, reference.model)
        assert len(store.generations) < 5
        folders = sorted(path.name for path in (tmp_path / "b").glob("checkpoint-*"))
        assert folders == [f"checkpoint-{step}" for step in range(1, 6)]
        assert not (tmp_path / "b" / "checkpoint-5" / "pytorch_model.bin").exists()
        CommitCheckpoints.adopt(
            limited := trainer(
                Trainer,
                paged(llama(), store, existing="overwrite"),
                tmp_path / "c",
                {"optimizer_cls_and_kwargs": (zero.AdamW, {"lr": 0.05})},
                **options,
                save_total_limit=2,
            ),
            checkpoints="whole",
        )
        limited.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-1"))  # whose generation is gone
        assert same(limited.model, reference.model)
        assert limited.state.best_model_checkpoint == str(tmp_path / "b" / "checkpoint-1")
        assert sorted(path.name for path in (tmp_path / "c").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]
        number = json.loads((tmp_path / "b" / "checkpoint-2" / "tiered.json").read_text())["generation"]
        assert number not in store.generations
        with (tmp_path / "b" / "checkpoint-2" / "optimizer.pt").open("ab") as file:
            file.truncate(1000)
        with pytest.raises(MisuseError, match=r"is not whole: optimizer\.pt .* copy it again"):
            limited.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
        store.close()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


STRIKES: dict[str, tuple[Any, str]] = {
    "states": (TorchFileWriter, "end"),
    "last file": (TrainerState, "save_to_json"),
    "commit": (training, "_commit"),
    "name": (training, "_write"),
}


@pytest.mark.parametrize("where", quick(STRIKES, ["states", "commit"]))
def test_a_folder_that_was_being_written_is_not_resumed_from(where: str, tmp_path: Path) -> None:
    reference = trainer(Trainer, llama(), tmp_path / "a", **RUN)
    reference.train()
    child = os.fork()
    if not child:
        try:
            owner, name = STRIKES[where]
            wrapped, calls = getattr(owner, name), []

            def struck(*given: Any, **options: Any) -> Any:
                calls.append(name)
                return killed() if len(calls) == 2 else wrapped(*given, **options)

            setattr(owner, name, struck)
            with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
                train(store, llama(), tmp_path / "b").train()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    half = tmp_path / "b" / "checkpoint-4"
    assert (half / "model.safetensors").exists()
    assert (half / "trainer_state.json").exists() is (where in ("commit", "name"))
    again = trainer(Trainer, llama(), tmp_path / "b", **RUN)
    if where in ("commit", "name"):  # nothing is missing in it
        again.train(resume_from_checkpoint=True)
        assert same(again.model, reference.model)
    else:
        with pytest.raises(FileNotFoundError, match=r"trainer_state\.json"):
            again.train(resume_from_checkpoint=True)
    with TieredStore.open(tmp_path / "new", dram="1MiB") as store:  # without the commits
        fresh = train(store, llama(), tmp_path / "b")
        if where not in ("commit", "name"):
            with pytest.raises(MisuseError, match=r"has no trainer_state\.json.*half written"):
                fresh.train(resume_from_checkpoint=str(half))
            assert same(fresh.model, llama())
        store.close()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        ours = train(store, llama(), tmp_path / "b", existing="resume")
        ours.train(resume_from_checkpoint=True)
        assert same(ours.model, reference.model)
        assert json.loads((half / "tiered.json").read_text())["files"].keys() >= {"model.safetensors", "optimizer.pt"}
        store.close()
