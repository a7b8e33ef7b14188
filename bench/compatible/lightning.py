"""Rows that train with Lightning."""

from __future__ import annotations

from typing import Any

import torch

from bench.compatible.side import Side, Toy, row, tokens

GROUP = "lightning"
NEEDS = ("lightning.pytorch",)


def _fit(side: Side, *, scheduler: bool = False, manual: bool = False, validate: bool = False, **options: Any) -> None:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Toy()
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x = batch[0]
            loss = torch.nn.functional.cross_entropy(self.model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            side.show(f"loss {index}", loss)
            self.log("loss", loss)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", self.model(batch[0]).square().mean())

        def configure_optimizers(self) -> Any:
            optimizer = side.adamw(self.parameters(), lr=1e-3)
            if scheduler:
                return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]
            return optimizer

    module = side.page(Module())
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens(0, 12, 10)), batch_size=4)
    quiet = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 2, "default_root_dir": side.folder, **quiet, **options}
    )
    trainer.fit(module, data, data if validate else None)
    side.show("metrics", {name: value for name, value in trainer.callback_metrics.items() if "epoch" not in name})
    side.show_model(module)


for _name, _options in {
    "fit": {},
    "fit with validation": {"validate": True},
    "fit with a scheduler": {"scheduler": True},
    "gradient_clip_val by norm": {"gradient_clip_val": 0.1},
    "gradient_clip_val by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "accumulate_grad_batches=3": {"accumulate_grad_batches": 3},
    "accumulate_grad_batches=2 and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "precision='bf16-mixed'": {"precision": "bf16-mixed"},
    "manual optimization": {"manual": True},
    "enable_model_summary=True": {"enable_model_summary": True},
    "detect_anomaly=True": {"detect_anomaly": True},
}.items():

    @row(GROUP, _name, needs=NEEDS, slow=2)
    def _(side: Side, options: Any = _options) -> None:
        _fit(side, **options)


@row(GROUP, "track gradient norms (grad_norm in a callback)", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    import lightning.pytorch as lightning
    from lightning.pytorch.utilities import grad_norm

    class Norms(lightning.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            side.show("norms", grad_norm(module, norm_type=2))

    _fit(side, callbacks=[Norms()])


@row(GROUP, "ModelCheckpoint, and the checkpoint loaded", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    import lightning.pytorch as lightning

    saver = lightning.callbacks.ModelCheckpoint(dirpath=side.folder / "checkpoints", save_weights_only=False)
    _fit(side, callbacks=[saver], enable_checkpointing=True)
    kept = torch.load(saver.best_model_path, weights_only=False)
    side.show("weights", kept["state_dict"])
    side.show("states", kept["optimizer_states"][0]["state"])


@row(GROUP, "StochasticWeightAveraging", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    import lightning.pytorch as lightning

    average = lightning.callbacks.StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)
    _fit(side, callbacks=[average], max_epochs=3)


@row(GROUP, "Fabric: setup, backward, clip_gradients", needs=NEEDS, slow=2)
def _(side: Side) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = side.page(Toy())
    wrapped, optimizer = fabric.setup(model, side.adamw(model.parameters()))
    for number in range(3):
        optimizer.zero_grad()
        loss = wrapped(tokens(number, 4, 8)).square().mean()
        fabric.backward(loss)
        side.show("norm", fabric.clip_gradients(wrapped, optimizer, max_norm=0.1))
        optimizer.step()
        side.show("loss", loss)
    side.show_model(model)
