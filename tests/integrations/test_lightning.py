"""Lightning's Trainer with ``TieredStrategy`` against the same Trainer in memory: bit for bit, also after a resume, and between
the two."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.quick import quick
from tiered import MisuseError, TieredStore, zero
from tiered.integrations.lightning import TieredStrategy

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|to use the best model|Checkpoint directory|run into issues|log_every_n_steps).*",
    "ignore:.*(The dirpath has changed|dataloader is not resumable).*",
    "ignore:.*isinstance.treespec, LeafSpec.*",
    "ignore:.*weights_only.*",
)
FIRST = "epoch=0-step=2.ckpt"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Net(pl.LightningModule):
    """An embedding that is tied to the head, and dropout. ``seen``: the losses of training and of validation."""

    def __init__(self, kind: Any, *, late: bool = False) -> None:
        super().__init__()
        self.kind, self.late = kind, late
        self.seen: list[float] = []
        if not late:
            self.build()

    def build(self) -> None:
        self.embed = nn.Embedding(17, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 17, bias=False)
        self.head.weight = self.embed.weight

    def configure_model(self) -> None:
        if not hasattr(self, "embed"):
            self.build()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(self.embed(x))).flatten(0, 1), x.flatten())

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.loss(batch[0])
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.seen.append(self.loss(batch[0]).item())

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=1e-2, **({"fused": True} if self.kind.__name__ == "AdamW" else {}))
        optimizer._step_supports_amp_scaling = False  # else Lightning refuses to clip what torch's fused kernel updates
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.state_dict().items()}


def loaders() -> tuple[Any, Any]:
    data = torch.utils.data.TensorDataset(torch.randint(0, 17, (24, 5), generator=torch.Generator().manual_seed(3)))
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True), torch.utils.data.DataLoader(data, batch_size=8)


@dataclass
class Case:
    """``trainer``: its arguments. ``late``: the module is built by configure_model."""

    trainer: dict[str, Any] = field(default_factory=dict)
    late: bool = False


CASES = {
    "norm": Case({"gradient_clip_val": 0.5}, late=True),
    "value": Case({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "precision": "bf16-mixed"}),
}


def trainer(strategy: Any, folder: str, **more: Any) -> pl.Trainer:
    saving = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    steps = {"max_epochs": 2, "accumulate_grad_batches": 2, "callbacks": [saving]}
    return pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, **steps, **quiet, **more)


def fit(case: Case, strategy: Any, kind: Any, folder: str, ckpt: str | None = None, seed: int = 5) -> Net:
    pl.seed_everything(seed, verbose=False)
    net = Net(kind, late=case.late)
    trainer(strategy, folder, **case.trainer).fit(net, *loaders(), ckpt_path=ckpt)
    return net


def same(one: Net, other: Net) -> bool:
    mine, theirs = one.values(), other.values()
    equal = all(torch.equal(mine[name], theirs[name]) for name in mine)
    return one.seen == other.seen and mine.keys() == theirs.keys() and equal


@pytest.mark.parametrize("name", CASES)
def test_fit_and_resume_are_those_in_memory(name: str) -> None:
    case = CASES[name]
    memory = fit(case, "auto", torch.optim.AdamW, "memory")
    with TieredStore.open("store", dram="1MiB", keep=9) as store:
        paged = fit(case, TieredStrategy(store), zero.AdamW, "paged")
        assert same(paged, memory)
        assert len(memory.seen) == 2 + 2 * (6 + 3)  # two of the check before
        assert sorted(os.listdir("paged")) == sorted(os.listdir("memory"))
        assert os.path.getsize(f"paged/{FIRST}") < 5000 < os.path.getsize(f"memory/{FIRST}")
        before = len(paged.seen)
        for net in (paged, Net(zero.AdamW)):  # which was trained on, and a new one
            checking = trainer(TieredStrategy(store), "paged", **case.trainer)
            checking.validate(net, loaders()[1], ckpt_path=f"paged/{FIRST}", verbose=False)
        assert paged.seen[before:] == net.seen
        store.close()
    resumed = fit(case, "auto", torch.optim.AdamW, "memory", f"memory/{FIRST}", seed=7)
    again = TieredStrategy("store", dram="1MiB", keep=9)  # as in a process that begins anew
    assert same(fit(case, again, zero.AdamW, "paged", f"paged/{FIRST}", seed=7), resumed)
    assert again.store.generation > 3
    again.close()


@pytest.mark.parametrize("kind", quick([zero.SGD, zero.AdamW8bit, zero.Lion], [zero.AdamW8bit]))
def test_runs_of_other_optimizers_are_resumed(kind: Any) -> None:
    """From a commit as from a file that has everything."""
    case, resumed = CASES["norm"], []
    for checkpoints in ("whole", "commits"):
        for ckpt, seed in ((None, 5), (f"{checkpoints}/{FIRST}", 7)):
            strategy = TieredStrategy(f"store-{checkpoints}", dram="1MiB", keep=9, checkpoints=checkpoints)
            net = fit(case, strategy, kind, checkpoints, ckpt, seed)
            found = net.values(), net.seen
            strategy.close()
        resumed.append(found)
    (whole, losses), (commits, same_losses) = resumed
    assert losses == same_losses
    assert whole.keys() == commits.keys()
    assert all(torch.equal(commits[name], value) for name, value in whole.items())


def test_checkpoints_go_between_memory_and_a_store() -> None:
    case = CASES["norm"]
    fit(case, "auto", torch.optim.AdamW, "memory")
    resumed = fit(case, "auto", torch.optim.AdamW, "resumed", f"memory/{FIRST}", seed=7)
    with TieredStore.open("store", dram="1MiB", durability="none") as store:
        strategy = TieredStrategy(store, checkpoints="whole", page={"name": "net"})
        assert same(fit(case, strategy, zero.AdamW, "paged", f"memory/{FIRST}", seed=7), resumed)
        strategy.close()
        assert any(key.startswith("net/param/") for key in store)
    last = "epoch=1-step=6.ckpt"
    ends = [fit(case, "auto", torch.optim.AdamW, "x", f"{folder}/{last}", seed=8) for folder in ("resumed", "paged")]
    assert same(*ends)


def test_other_optimizers_are_refused_before_the_first_step() -> None:
    for kind, mend in ((torch.optim.AdamW, "which takes the same arguments"), (torch.optim.Adagrad, "zero.AdamW")):
        strategy = TieredStrategy("store", dram="1MiB")
        net = Net(lambda parameters, kind=kind, **_: kind(parameters, lr=0.1))
        with pytest.raises(MisuseError, match=rf"configure_optimizers made a {kind.__name__}.*return tiered\.{mend}|{mend}"):
            trainer(strategy, "paged").fit(net, *loaders())
        assert net.seen == []
        strategy.close()


def test_what_does_not_go_together_is_named() -> None:
    with TieredStore.open("store", dram="1MiB", durability="none") as store:
        for arguments, complaint in (
            ({"dram": "1MiB"}, "is open, and has its options already"),
            ({"page": {"existing": "resume"}}, r"page=\['existing'\] is not for this strategy"),
            ({"checkpoints": "none"}, "'commits' or 'whole'"),
        ):
            with pytest.raises(MisuseError, match=complaint):
                TieredStrategy(store, **arguments)  # type: ignore[arg-type]
        with TieredStore.open(None, dram="1MiB") as another:
            net = Net(zero.AdamW)
            zero.page(net, another)
            with pytest.raises(MisuseError, match="and this strategy has"):
                trainer(TieredStrategy(store), "paged").fit(net, *loaders())


def test_a_commit_that_is_not_kept_is_named() -> None:
    with TieredStore.open("store", dram="1MiB", keep=1) as store:
        fit(CASES["norm"], TieredStrategy(store), zero.AdamW, "paged")
        with pytest.raises(MisuseError, match=r"refers to generation 1 of a store.*\(it keeps 3\): .* with keep="):
            trainer(TieredStrategy(store), "paged").fit(Net(zero.AdamW), *loaders(), ckpt_path=f"paged/{FIRST}")
        store.close()
