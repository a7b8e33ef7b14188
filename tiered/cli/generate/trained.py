"""The model of ``tiered train``, as ``tiered generate`` uses it: its tokens are bytes, and it needs no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tiered import MisuseError, TieredStore, zero
from tiered.cli.generate.models import Sampling, StoredModel
from tiered.cli.generate.text import ByteText
from tiered.cli.train.model import BYTES, build, go_on
from tiered.cli.train.options import NAME
from tiered.cli.train.resume import shape_of
from tiered.integrations.kept import kept_models
from tiered.types import Access
from tiered.zero.paging.pager import pager_of

if TYPE_CHECKING:
    from tiered.cli.generate.answers import Answers

__all__ = ["TrainedModel", "UpdatesPending", "is_trained"]


def is_trained(store: TieredStore, name: str | None) -> bool:
    """Return whether the model ``name`` (None: the only one) is one that ``tiered train`` has committed to ``store``."""
    return store.meta.get("command") == "train" and name in (None, NAME) and NAME not in kept_models(store)


class UpdatesPending(MisuseError):
    """The last step of the training is to be applied to parameters when they are fetched, which needs a store that is open for
    writing."""


class TrainedModel(StoredModel):
    """The model that ``tiered train`` has committed to ``store``. It sees the last bytes of a text, as many as its context has.
    Raises UpdatesPending."""

    def __init__(self, store: TieredStore) -> None:
        self.store, self.name = store, NAME
        self.model = build(shape_of(store, NAME)).eval()
        zero.page(self.model, store, name=NAME, existing="resume")
        if store.access is Access.READ and any(unit.pending is not None for unit in pager_of(self.model).units):
            raise UpdatesPending(f"{store} has updates that are not applied yet: open it for writing")
        self.vocabulary, self.positions = BYTES, None
        self.text = ByteText()
        self.ends = ()
        self.stops_between(self.model.blocks)

    def computed(self) -> _Nothing:
        return _Nothing()

    def generate(self, prompts: Sequence[Sequence[int]], answers: Answers, sampling: Sampling, **more: Any) -> None:
        rows = [go_on(self.model, prompt, sampling.temperature, sampling.top_p, sampling.seed) for prompt in prompts]
        ended = [False] * len(rows)
        with self._making(answers):
            for _ in range(sampling.tokens):
                ended = answers.take([0 if over else next(row) for row, over in zip(rows, ended, strict=True)])
                if all(ended):
                    return


class _Nothing:
    """Keeps nothing: as many bytes as the model sees are computed in one go."""

    def resumed(self, ids: list[int]) -> dict[str, Any]:
        return {}

    def keep(self, given: Mapping[str, Any], ids: list[int]) -> None: ...

    keep_stopped = keep
