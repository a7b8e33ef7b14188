"""Ranks that do what ranks should not have to think about: all of it comes out as with one process, or is refused on all."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.zero.ranks import on_ranks
from tests.zero.test_ranks import STAGES
from tiered import CapacityError, CommitError, ManifestError, MisuseError, TieredStore, zero

Say = Callable[[Path, int, zero.Stage], Any]


class Deep(nn.Module):
    """``raises``: backward fails in the first layer. ``delay``: seconds that each layer of backward takes."""

    def __init__(self, layers: int = 6, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.raises, self.delay = False, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 0 and self.raises:
                x.register_hook(self._raise)
            if self.delay:
                x.register_hook(lambda _: time.sleep(self.delay))
        return x

    def _raise(self, _: torch.Tensor) -> None:
        raise ArithmeticError("of all ranks")


class Heads(nn.Module):
    """Each rank uses a head of its own, a unit by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        found: torch.Tensor = (self.second if which else self.first)(torch.tanh(self.body(x)))
        return found


def leftovers(store: TieredStore) -> list[str]:
    return [key for key in store if key.rsplit("/", 1)[-1] in ("local", "received", "gathered")]


def gradients_given_up(folder: Path, rank: int, stage: zero.Stage) -> Any:
    """Zeros take the place of what was not reduced yet, too."""
    found = []
    for paused in (False, True):
        model = nn.Linear(64, 64, bias=False)
        with TieredStore.open(folder / f"{paused}", dram="4MiB", durability="none") as store:
            zero.page(model, store, stage=stage)
            optimizer = zero.AdamW(model.parameters())
            if paused:
                with zero.no_sync(model):
                    model(torch.full((1, 64), 100.0)).sum().backward()
            else:
                model(torch.full((1, 64), 100.0)).sum().backward()
            optimizer.zero_grad(set_to_none=False)
            model(torch.ones(1, 64)).sum().backward()
            found.append(optimizer.grad(model.weight).unique().tolist())
    return found


def heads(folder: Path, rank: int, stage: zero.Stage) -> Any:
    torch.manual_seed(0)
    model = Heads()
    with TieredStore.open(folder / "store", dram="6MiB", durability="none") as store:
        if isinstance(stage, zero.Stage3):
            return "gathers parameters together"
        zero.page(model, store, stage=stage)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 256) * (rank + 1), rank).square().mean().backward()
            optimizer.step()
        values = model.state_dict()
        assert not leftovers(store)
    return {key: value.sum().item() for key, value in values.items()}


def two_models(folder: Path, rank: int, stage: zero.Stage) -> Any:
    """In one backward pass, with ranks that are slow in turn."""
    torch.manual_seed(0)
    first, second = Deep(4), Deep(4)
    with TieredStore.open(folder / "store", dram="6MiB", durability="none") as store:
        zero.page(first, store, name="first", stage=stage)
        zero.page(second, store, name="second", stage=stage)
        optimizers = [zero.AdamW(model.parameters(), lr=1e-2) for model in (first, second)]
        for step in range(2):
            first.delay = second.delay = 0.02 if rank == step % 2 else 0.0
            for optimizer in optimizers:
                optimizer.zero_grad()
            second(first(torch.ones(2, 128))).square().mean().backward()
            optimizers[step].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert not leftovers(store)
        return [value.sum().item() for model in (first, second) for value in model.state_dict().values()]


def interrupted(folder: Path, rank: int, stage: zero.Stage) -> Any:
    """An exception on all ranks, at the same place and at another time; then they go on."""
    torch.manual_seed(0)
    model, done = Deep(), []
    with TieredStore.open(folder / "store", dram="6MiB", durability="none") as store:
        zero.page(model, store, stage=stage)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            model.raises, model.delay = step == 1, 0.05 if step == 1 and rank == 1 else 0.0
            try:
                model(torch.ones(2, 128)).square().mean().backward()
            except ArithmeticError:
                done.append("gave up")
                continue
            optimizer.step()
            done.append("made a step")
        optimizer.zero_grad()
        assert not leftovers(store)
        return done, [value.sum().item() for value in model.state_dict().values()]


def assigned(folder: Path, rank: int, stage: zero.Stage) -> Any:
    """Gradients of the caller's own: one that is infinite for one rank's share, and one of which a rank has nothing."""
    model = nn.Linear(32, 32)
    model.tiny = nn.Parameter(torch.ones(1, dtype=torch.float64))
    with TieredStore.open(folder / "store", dram="4MiB", durability="none") as store:
        zero.page(model, store, stage=stage)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        scaler = zero.GradScaler(init_scale=2.0)
        for infinite in (True, False):
            scaler.scale(torch.ones(1))
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            if infinite:
                model.weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        steps = [int(state["step"]) for state in optimizer.state_dict()["state"].values()]
        model.weight.grad = torch.full((32, 32), float("nan"))
        try:
            optimizer.step()
        except MisuseError as error:
            said = str(error)
        optimizer.zero_grad()
        kept = torch.ones(32, 32)
        model.weight.grad = kept
        with pytest.raises(MisuseError, match=r"'weight' and is kept.*grad\.clone"):
            model(torch.ones(1, 32)).sum().backward()
        optimizer.zero_grad()
        model.weight.grad = kept.clone()
        model(torch.ones(1, 32)).sum().backward()
        assert torch.equal(optimizer.grad(model.weight), torch.full((32, 32), 2.0))
        optimizer.zero_grad()
        return scaler.get_scale(), steps, said, model.state_dict()["tiny"].item()


def buffers(folder: Path, rank: int, stage: zero.Stage) -> Any:
    """All have rank 0's, of any type and strides."""
    model = nn.Linear(8, 8)
    values = {
        "int16": torch.arange(6, dtype=torch.int16),
        "uint16": torch.arange(6).to(torch.uint16),
        "bool": torch.tensor([True, False]),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "scalar": torch.tensor(4),
        "complex": torch.ones(2, dtype=torch.complex64),
    }
    for name, value in values.items():
        model.register_buffer(name, value if rank == 0 else torch.zeros_like(value))
    with TieredStore.open(folder / "store", dram="4MiB", durability="none") as store:
        zero.page(model, store, stage=stage)
        return all(torch.equal(getattr(model, name), value) for name, value in values.items())


def pools(folder: Path, rank: int, stage: zero.Stage) -> Any:
    """Of different sizes: units are those of the smallest."""
    torch.manual_seed(0)
    model = Deep()
    with TieredStore.open(folder / "store", dram=f"{3 + 5 * rank}MiB", durability="none") as store:
        zero.page(model, store, stage=stage)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 128)).square().mean().backward()
            optimizer.step()
        return zero.statistics(model).units


SCENES: list[Say] = [gradients_given_up, heads, two_models, interrupted, assigned, buffers, pools]


def play(rank: int, folder: Path) -> dict[Any, Any]:
    return {
        (scene.__name__, type(stage).__name__): scene(folder / f"{rank}" / scene.__name__ / type(stage).__name__, rank, stage)
        for scene in SCENES
        for stage in STAGES
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return on_ranks(2, play, tmp_path_factory.mktemp("scenes"), timeout=20.0)


@pytest.mark.parametrize("stage", [type(stage).__name__ for stage in STAGES])
@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_all_ranks_say_the_same(played: list[dict[Any, Any]], scene: str, stage: str) -> None:
    first, second = (found[scene, stage] for found in played)
    assert first == second
    if stage != "Stage3":
        assert first == played[0][scene, "Stage1"]
    expected = {
        "gradients_given_up": [[1.0], [1.0]],
        "buffers": True,
    }
    if scene in expected:
        assert first == expected[scene]
    if scene == "interrupted":
        assert first[0] == ["made a step", "gave up", "made a step"]
    if scene == "assigned":
        assert first[:2] == (1.0, [1, 1, 1])
        assert "not finite" in first[2]


# Commits


def parts(folder: Path, rank: int, size: int = 64, **options: Any) -> tuple[TieredStore, Any, zero.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size))
    store = zero.open_store(folder, dram="4MiB", **options)
    zero.page(model, store, stage=zero.Stage3(), existing="resume" if "model/checkpoint" in store else "refuse")
    return store, model, zero.AdamW(model.parameters(), lr=1e-2)


def step(model: Any, optimizer: zero.AdamW) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()


def refused(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def half_a_commit(rank: int, folder: Path, where: Path) -> Any:
    """It fails on rank 1; then nobody goes back to, or on from, what only one has."""
    store, model, optimizer = parts(where, rank)
    step(model, optimizer)
    zero.commit(model, optimizer, extra={"done": 1})
    step(model, optimizer)
    real = store.commit
    if rank == 1:
        store.commit = lambda meta=None: (_ for _ in ()).throw(CommitError("no room"))  # type: ignore[method-assign]
    refused(CommitError, lambda: zero.commit(model, optimizer, extra={"done": 2}))
    store.commit = real  # type: ignore[method-assign]
    said = refused(CommitError, lambda: zero.rollback(model, optimizer))
    store.close()
    with TieredStore.open(where / f"rank-{rank}-of-2", dram="4MiB") as alone:  # not by zero.open_store
        torch.manual_seed(0)
        again = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        apart = refused(MisuseError, lambda: zero.page(again, alone, stage=zero.Stage3(), existing="resume"))
        alone.close()
    store, model, optimizer = parts(where, rank)
    done = zero.resume(model, optimizer)["done"]
    large = torch.zeros(2 << 20)  # more than the pool: nothing is begun, on any rank
    kind = CapacityError if rank == 1 else CommitError
    early = refused(kind, lambda: zero.commit(model, optimizer, extra={"done": 3, **({"large": large} if rank == 1 else {})}))
    zero.commit(model, optimizer, extra={"done": 4})
    store.close()
    return said, apart, done, early


def test_what_some_ranks_have_is_gone_on_from_by_none(tmp_path: Path) -> None:
    for rank, (said, apart, done, early) in enumerate(on_ranks(2, half_a_commit, tmp_path / "a", tmp_path / "state")):
        assert "zero.open_store" in said
        assert "not as of one commit" in apart
        assert done == 1
        assert rank == 1 or "rank 1, which says why, could not begin" in early


def drives(rank: int, folder: Path, where: Path) -> Any:
    """Rank 1's is not there for a while."""
    for _ in range(2):
        store, model, optimizer = parts(where, rank)
        step(model, optimizer)
        zero.commit(model, optimizer)
        store.close()
    mine, away = where / f"rank-{rank}-of-2", where / "away"
    dist.barrier()
    if rank == 1:
        mine.rename(away)
    dist.barrier()
    gone = refused(ManifestError, lambda: parts(where, rank))
    dist.barrier()
    if rank == 1:
        shutil.rmtree(mine, ignore_errors=True)
        away.rename(mine)
    dist.barrier()
    store, _, _ = parts(where, rank)
    generation = store.generation
    store.close()
    keep = refused(MisuseError, lambda: parts(where, rank, keep=1))
    scratch = refused(MisuseError, lambda: parts(where, rank, durability="none"))
    own = zero.open_store(where / "own", dram="4MiB")
    own.put("mine", torch.ones(3))
    own.commit()
    own.close()
    alone = refused(ManifestError, lambda: zero.open_store(where / "own", dram="4MiB"))
    return gone, generation, keep, scratch, alone


def test_nothing_is_given_up_because_a_drive_is_missing(tmp_path: Path) -> None:
    for gone, generation, keep, scratch, alone in on_ranks(2, drives, tmp_path / "a", tmp_path / "state"):
        assert "rank 0 has 1, 2; rank 1 has no store there: is its drive mounted?" in gone
        assert generation == 3  # the first is of the begin
        assert "at least 2" in keep
        assert "scratch" in scratch
        assert "zero.commit" in alone


def several(rank: int, folder: Path, where: Path) -> Any:
    """Two models in one store, committed one after the other; the end comes between the two."""
    torch.manual_seed(0)
    models = [nn.Linear(16, 16), nn.Linear(16, 16)]
    with zero.open_store(where, dram="4MiB") as store:
        optimizers = []
        for name, model in zip("ab", models, strict=True):
            zero.page(model, store, name=name, stage=zero.Stage2())
            optimizers.append(zero.AdamW(model.parameters(), lr=1e-2))
        for done in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(2, 16)).square().mean().backward()
                optimizer.step()
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                if done == 0 or number == 0:
                    zero.commit(model, optimizer, extra={"done": done})
        store.close()
    with zero.open_store(where, dram="4MiB") as store:
        there = sorted(key for key in store if key.endswith("/checkpoint"))
        store.close()
    return there


def test_of_several_models_the_commit_is_taken_that_has_all(tmp_path: Path) -> None:
    for found in on_ranks(2, several, tmp_path / "a", tmp_path / "state"):
        assert found == ["a/checkpoint", "b/checkpoint"]


def overtaken(rank: int, folder: Path, where: Path, other: Path) -> Any:
    """A store that has a checkpoint already, older than the source's."""
    store, model, optimizer = parts(where, rank)
    step(model, optimizer)
    zero.commit(model, optimizer)
    store.close()
    shutil.copytree(where / f"rank-{rank}-of-2", other / f"rank-{rank}-of-2")
    store, model, optimizer = parts(where, rank)
    zero.resume(model, optimizer)
    step(model, optimizer)
    zero.commit(model, optimizer)
    store.close()
    dist.barrier()
    with zero.open_store(other, dram="4MiB") as late:
        again = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        said = refused(
            MisuseError, lambda: zero.page(again, late, stage=zero.Stage3(), existing="resume", source=where)
        )
        late.close()
    return said


def test_an_older_checkpoint_is_not_gone_on_from_in_silence(tmp_path: Path) -> None:
    first, second = on_ranks(2, overtaken, tmp_path / "a", tmp_path / "state", tmp_path / "copy")
    assert "a newer one, 2" in first
    assert "rank 0 finds a newer checkpoint" in second


# What a second look found


def frozen_between(rank: int, folder: Path, stage: zero.Stage | None) -> Any:
    """Between backward and step, while gradients are unreduced; and an interrupted pass that was not to be reduced."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
    with TieredStore.open(folder / f"{rank}-{type(stage).__name__}", dram="4MiB", durability="none") as store:
        zero.page(model, store, **({} if stage is None else {"stage": stage}))
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        for number in range(3):
            optimizer.zero_grad()
            with zero.no_sync(model):
                model(torch.ones(2, 40)).square().mean().backward()
            if number == 1:
                model[0].requires_grad_(False)
                model[2].bias.requires_grad_(False)
            optimizer.step()
            model.requires_grad_(True)
        norm = None
        model(torch.ones(2, 40)).square().mean().backward()
        norm = optimizer.clip_grad_norm_(1e9)
        return {key: value.clone() for key, value in model.state_dict().items()}, norm.dtype


def frozen_on_ranks(rank: int, folder: Path) -> Any:
    return [frozen_between(rank, folder, stage) for stage in STAGES]


def test_what_is_frozen_before_the_step_has_its_gradient(tmp_path: Path) -> None:
    alone, kind = frozen_between(0, tmp_path / "alone", None)
    for found in on_ranks(2, frozen_on_ranks, tmp_path / "a"):
        for values, dtype in found:
            assert dtype is kind
            for key, value in alone.items():
                assert torch.equal(values[key], value), key


def interrupted_without_reducing(rank: int, folder: Path) -> Any:
    """One rank alone fails within ``no_sync``, and goes on outside of it."""
    torch.manual_seed(0)
    model = Deep()
    with TieredStore.open(folder / f"{rank}", dram="6MiB", durability="none") as store:
        zero.page(model, store, stage=zero.Stage2())
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        try:
            with zero.no_sync(model):
                model.raises = rank == 0
                model(torch.ones(2, 128)).square().mean().backward()
        except ArithmeticError:
            pass
        optimizer.zero_grad()
        model.raises = False
        model(torch.ones(2, 128)).square().mean().backward()
        optimizer.step()
        return [value.sum().item() for value in model.state_dict().values()]


def test_what_one_rank_gives_up_without_reducing_is_its_own_affair(tmp_path: Path) -> None:
    first, second = on_ranks(2, interrupted_without_reducing, tmp_path / "a", timeout=20.0)
    assert first == second


def damaged(rank: int, folder: Path, where: Path) -> Any:
    """A manifest of rank 1's; then a store of before, as from a backup."""
    for number in range(4):
        store, model, optimizer = parts(where, rank, keep=4)
        if number == 2 and rank == 1:
            shutil.copytree(where / "rank-1-of-2", where / "before")
        dist.barrier()
        step(model, optimizer)
        zero.commit(model, optimizer)
        store.close()
    dist.barrier()
    newest = where / "rank-1-of-2" / "manifest.5"
    if rank == 1:
        data = bytearray(newest.read_bytes())
        data[-1] ^= 1
        newest.write_bytes(data)
    dist.barrier()
    torn = refused(ManifestError, lambda: parts(where, rank, keep=4))
    dist.barrier()
    if rank == 1:
        shutil.rmtree(where / "rank-1-of-2")
        (where / "before").rename(where / "rank-1-of-2")
    dist.barrier()
    old = refused(ManifestError, lambda: parts(where, rank, keep=4))
    return torn, old, sorted(path.name for path in (where / "rank-0-of-2").glob("manifest.*"))


def test_acknowledged_commits_are_not_dropped_for_one_rank(tmp_path: Path) -> None:
    for torn, old, there in on_ranks(2, damaged, tmp_path / "a", tmp_path / "state"):
        assert "the store of rank 1 cannot be read" in torn
        assert "move manifest.5 away" in torn
        assert "of different times" in old
        assert there == [f"manifest.{number}" for number in (2, 3, 4, 5)]


def kept_gradients(rank: int, folder: Path, where: Path, source: Path | None, stepped: bool) -> Any:
    """A commit after a backward pass, or after the step that used it and whose update is pending; then another pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
    with zero.open_store(where, dram="4MiB") as store:
        more = {"existing": "resume", "source": source} if source is not None else {}
        zero.page(model, store, **more)  # type: ignore[arg-type]
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        if source is not None:
            zero.resume(model, optimizer)
        else:
            model(torch.ones(2, 40)).square().mean().backward()
            if stepped:
                optimizer.step()
            zero.commit(model, optimizer)
            if stepped:
                optimizer.zero_grad()
        model(torch.ones(2, 40)).square().mean().backward()
        found = [optimizer.grad(parameter) for parameter in model.parameters()]
        store.close()
    return found


@pytest.mark.parametrize("stepped", [False, True], ids=("to_be_added_to", "used_by_a_pending_step"))
def test_gradients_of_several_ranks_are_taken_over_until_a_step_uses_them(tmp_path: Path, stepped: bool) -> None:
    had = on_ranks(2, kept_gradients, tmp_path / "a", tmp_path / "old", None, stepped)
    has = on_ranks(1, kept_gradients, tmp_path / "b", tmp_path / "new", tmp_path / "old", stepped)
    for one, other in zip(had[0], has[0], strict=True):
        assert one.any()
        assert torch.equal(one, other)


def killed_in_its_first_commit(rank: int, folder: Path, where: Path) -> Any:
    """Rank 1 was about to write its manifest of the first commit, and rank 0 had."""
    for attempt in range(2):
        store, model, optimizer = parts(where, rank)
        begun = "model/checkpoint" in store
        step(model, optimizer)
        zero.commit(model, optimizer)
        store.close()
        if rank == 1 and not attempt:
            manifest = where / "rank-1-of-2" / "manifest.2"
            manifest.rename(manifest.with_name("manifest.2.tmp"))
        dist.barrier()
    return begun


def test_a_training_that_was_killed_in_its_first_commit_begins_anew(tmp_path: Path) -> None:
    assert on_ranks(2, killed_in_its_first_commit, tmp_path / "a", tmp_path / "state") == [False, False]
