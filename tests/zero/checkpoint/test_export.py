"""``zero.export``: what ``safetensors`` and ``transformers`` load is what ``state_dict`` shows; the same without the model."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import tiered.format.safetensors_writer
from tests.quick import quick
from tests.zero.models import Mixed, Tied
from tiered import CapacityError, ManifestError, MisuseError, TieredStore, zero
from tiered.format.safetensors import INDEX, SINGLE, entry_of
from tiered.format.safetensors_writer import Shards, _Folder
from tiered.store.at_rest import StoreAtRest
from tiered.types import TensorSpec
from tiered.zero.checkpoint.safetensors import CONVERTED_AT_ONCE, export_at_rest, export_of_ranks

DRAM = "2MiB"
NO_FLOATS = (torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e8m0fnu)


class Narrow(Tied):
    """bf16, with a parameter in fp32, and buffers of all kinds, persistent and not."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor([3, 4]))
        self.register_buffer("transient", torch.ones(4), persistent=False)
        self.register_buffer("empty", torch.empty(0, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens).float() * self.gain.mean()


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """All that the index names, by the real package."""
    index = json.loads((folder / INDEX).read_text())
    found: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        part = load_file(folder / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == set(part)
        found |= part
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    return found


def expected(model: nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter under its first name."""
    state = model.state_dict()
    first = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: value for name, value in state.items() if name in first}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


KINDS: dict[str, tuple[Callable[[], nn.Module], zero.Policy]] = {
    "tied": (Tied, zero.Policy()),
    "mixed": (Mixed, zero.Policy()),
    "narrow": (Narrow, zero.Policy()),
    "converted": (Tied, zero.Policy(torch.bfloat16)),
}


def trained(store: TieredStore, kind: str, *, steps: int = 2) -> tuple[nn.Module, zero.AdamW]:
    """With an update that is pending."""
    make, policy = KINDS[kind]
    torch.manual_seed(0)
    model = zero.page(make(), store, policy=policy)
    optimizer = zero.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        model.loss(step).backward()  # type: ignore[operator]
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(
    ("kind", "shard"),
    quick(product(KINDS, ["5GB", 20_000, 1024]), [("tied", 20_000), ("mixed", 1024), ("narrow", "5GB"), ("converted", 20_000)]),
)
def test_what_is_loaded_is_what_state_dict_shows(tmp_path: Path, kind: str, shard: int | str) -> None:
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model, _ = trained(store, kind)
        names = zero.export(model, tmp_path / "out", shard=shard)
        assert same(loaded(tmp_path / "out"), expected(model))
        assert sorted([*names, INDEX]) == sorted(os.listdir(tmp_path / "out"))
        assert len(names) == 1 if shard == "5GB" else len(names) > 1
        assert store.statistics().tiers[0].held == 0
        model.loss(3).backward()  # type: ignore[operator]


def test_a_tied_weight_is_loaded_by_either_of_its_names(tmp_path: Path) -> None:
    """It is written under the first one, of which the docstring of ``zero.export`` says how it is loaded."""
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model, _ = trained(store, "tied")
        (name,) = zero.export(model, tmp_path / "out")
        values = {key: value.clone() for key, value in model.state_dict().items()}
        store.close()
    file = tmp_path / "out" / name
    with pytest.raises(RuntimeError, match=r'Missing key.*"head\.weight"'):
        Tied().load_state_dict(load_file(file))
    loading: list[Callable[[nn.Module], object]] = [
        lambda other: other.load_state_dict(load_file(file), strict=False),
        lambda other: load_model(other, file),
    ]
    for load in loading:
        other = Tied()
        load(other)
        assert same(dict(other.state_dict()), values)


@pytest.mark.parametrize(
    ("kind", "steps"), quick(product(KINDS, [1, 2]), [(kind, 1 + number % 2) for number, kind in enumerate(KINDS)])
)
def test_of_a_store_at_rest(tmp_path: Path, kind: str, steps: int) -> None:
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model, optimizer = trained(store, kind, steps=steps)
        generation = zero.commit(model, optimizer)
        values = expected(model)  # which applies what is pending, after the commit
        store.close()
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "state").iterdir()}
    with StoreAtRest(tmp_path / "state") as at_rest:
        export_at_rest(at_rest, tmp_path / "out", shard=30_000)
        export_at_rest(at_rest, tmp_path / "wide", dtype=torch.float32)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "state").iterdir()} == before
    assert same(loaded(tmp_path / "out"), values)
    wide = {name: value.float() if value.is_floating_point() else value for name, value in values.items()}
    assert same(loaded(tmp_path / "wide"), wide)
    assert generation == 1


def test_an_update_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model, optimizer = trained(store, "narrow")
        calls = 0

        def failing(*args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt
            original(*args)

        pager_unit = max((unit for unit in model.norm.weight._tiered.resolve()[0].units), key=lambda u: len(u.plan.placements))  # type: ignore[union-attr]
        original = pager_unit.pending.begin  # of a piece: between two of them
        pager_unit.pending.begin = failing
        with pytest.raises(KeyboardInterrupt):
            pager_unit.apply_update()
        pager_unit.pending.begin = original
        assert pager_unit.pending.pieces_done == 2
        zero.commit(model, optimizer)
        values = expected(model)
        store.close()
    with StoreAtRest(tmp_path / "state") as at_rest:
        export_at_rest(at_rest, tmp_path / "out")
    assert same(loaded(tmp_path / "out"), values)


def test_plain_tensors(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(3_000_000),
        "b/c": torch.randn(5, 7).to(torch.bfloat16),
        "flag": torch.tensor(True),
        "none": torch.empty(0, 2),
        "ü\n": torch.randn(3).to(torch.float8_e4m3fn),
    }
    with TieredStore.open(tmp_path / "state", dram="64MiB") as store:
        for key, tensor in tensors.items():
            store.put(key, tensor)
    with StoreAtRest(tmp_path / "state") as at_rest:
        export_at_rest(at_rest, tmp_path / "out")
    found = loaded(tmp_path / "out")
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_which_model(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram="4MiB") as store:
        one, two = zero.page(Tied(), store, name="one"), zero.page(Tied(), store, name="two")
        store.commit()
        store.put("plain", torch.ones(3))
        zero.commit(one)
        zero.commit(two)
        value = one.state_dict()["position"]
        store.close()
    with StoreAtRest(tmp_path / "state") as at_rest:
        with pytest.raises(MisuseError, match="name one of 'one', 'two'"):
            export_at_rest(at_rest, tmp_path / "out")
        with pytest.raises(MisuseError, match="no checkpoint of a model named 'three'; it has: 'one', 'two'"):
            export_at_rest(at_rest, tmp_path / "out", model="three")
        assert not (tmp_path / "out").exists()
        export_at_rest(at_rest, tmp_path / "out", model="one")
    assert torch.equal(loaded(tmp_path / "out")["position"], value)


def test_a_checkpoint_that_is_not_of_the_same_moment_is_refused(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=DRAM, keep=3) as store:
        model, optimizer = trained(store, "tied")
        store.commit()
        zero.commit(model, optimizer)
        with torch.no_grad():
            next(model.parameters()).add_(1)
        store.commit()
        store.close()
    with StoreAtRest(tmp_path / "state") as at_rest, pytest.raises(MisuseError, match="an earlier generation"):
        export_at_rest(at_rest, tmp_path / "out")
    with StoreAtRest(tmp_path / "state", generation=1) as at_rest, pytest.raises(MisuseError, match=r"with zero\.commit"):
        export_at_rest(at_rest, tmp_path / "out")
    with StoreAtRest(tmp_path / "state", generation=2) as at_rest:
        export_at_rest(at_rest, tmp_path / "out")


def test_what_is_written_at_a_time_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a parameter is, and in whichever order its elements lie."""
    sizes: list[int] = []
    original = tiered.format.safetensors_writer._pwrite

    def counted(fd: int, data: memoryview, offset: int) -> None:
        sizes.append(data.nbytes)
        original(fd, data, offset)

    monkeypatch.setattr(tiered.format.safetensors_writer, "_pwrite", counted)
    model = nn.Linear(1024, 3 << 10)
    model.columns = nn.Parameter(torch.randn(1024, 3 << 10).t())
    with TieredStore.open(tmp_path / "state", dram="64MiB") as store:
        zero.page(model, store)
        zero.commit(model)
        zero.export(model, tmp_path / "out")
        assert same(loaded(tmp_path / "out"), expected(model))
        values = expected(model)
        store.close()
    with StoreAtRest(tmp_path / "state") as at_rest:
        export_at_rest(at_rest, tmp_path / "again")
    assert same(loaded(tmp_path / "again"), values)
    assert max(sizes) <= CONVERTED_AT_ONCE


def test_of_a_store_on_several_drives(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    given = {str(number): torch.full((5000,), number) for number in range(9)}
    with TieredStore.open(tmp_path / "state", dram=DRAM, paths=paths) as store:
        for key, value in given.items():
            store.put(key, value)
    with pytest.raises(MisuseError, match="have to be named"):
        StoreAtRest(tmp_path / "state")
    with pytest.raises(ManifestError, match=r"drive\.\d .* is missing"):
        StoreAtRest(tmp_path / "state", paths=paths[:2])
    with StoreAtRest(tmp_path / "state", paths=paths[::-1]) as at_rest:
        export_at_rest(at_rest, tmp_path / "out")
    assert same(loaded(tmp_path / "out"), given)


# What is there already, and what goes wrong


def test_what_is_there_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model, _ = trained(store, "tied")
        zero.export(model, out, shard=50_000)
        (out / "config.json").write_text("{}")
        with pytest.raises(MisuseError, match="existing='overwrite'"):
            zero.export(model, out)
        zero.export(model, out, existing="overwrite")
        assert sorted(os.listdir(out)) == ["config.json", "model.safetensors", INDEX]
        assert same(loaded(out), expected(model))
        (out / "model-00001-of-00002.safetensors").write_text("of somebody else")
        with pytest.raises(MisuseError, match=r"model-00001-of-00002\.safetensors exists already"):
            zero.export(model, out, existing="overwrite")
        (out / INDEX).write_text("{}")
        with pytest.raises(MisuseError, match="it is kept"):
            zero.export(model, out, existing="overwrite")
        store.close()


@pytest.mark.parametrize("what", ["stopped", "full", "failed"])
def test_an_export_that_fails_leaves_nothing(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def stop(done: int, total: int) -> None:
        if what == "stopped" and done > total // 2:
            raise KeyboardInterrupt

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model, _ = trained(store, "tied")
        zero.export(model, out, shard=50_000)
        before = {path: path.read_bytes() for path in out.iterdir()}
        with monkeypatch.context() as patch:
            patch.setattr("os.posix_fallocate", full) if what == "full" else None
            patch.setattr("os.fsync", broken) if what == "failed" else None
            error = {"stopped": KeyboardInterrupt, "full": CapacityError, "failed": Exception}[what]
            with pytest.raises(error, match="another" if what != "stopped" else None):
                zero.export(model, out, existing="overwrite", progress=stop)
        assert {path: path.read_bytes() for path in out.iterdir()} == before
        assert store.statistics().tiers[0].held == 0
        (out / ".model.safetensors.tiered-part").write_text("of one that was killed")
        zero.export(model, out, existing="overwrite")
        assert sorted(os.listdir(out)) == ["model.safetensors", INDEX]
        store.close()


@pytest.mark.parametrize("before", [None, 1, 3])
@pytest.mark.parametrize("now", [1, 2])
def test_a_process_that_is_killed_as_files_are_replaced(tmp_path: Path, before: int | None, now: int) -> None:
    """After each change of the folder: what has all files of weights has the configuration that belongs to them, and the
    export can be done again, which leaves nothing of the other."""

    def write(out: Path, tensors: int, said: bytes, existing: str = "overwrite") -> None:
        entries = [entry_of(f"t{number}", TensorSpec("uint8", (1024,), 1)) for number in range(tensors)]
        contents = (memoryview(said * 1024) for _ in entries)
        Shards(out, entries, 1024, existing, {"config.json": said}).write(contents)

    def found(out: Path) -> bytes | None:
        """Return what all weights say, None where they are not complete, as transformers looks for them."""
        names = [SINGLE] if (out / SINGLE).exists() else []
        if not names and (out / INDEX).exists():
            names = sorted({*json.loads((out / INDEX).read_text())["weight_map"].values()})
        values = [value.numpy().tobytes() for name in names for value in load_file(out / name).values()]
        assert len({*values}) < 2
        return values[0][:1] if values else None

    class Killed(BaseException):
        pass

    struck = 0
    while True:
        out, left = tmp_path / str(struck), struck
        if before is not None:
            write(out, before, b"a", "refuse")

        def counted(call: Any) -> Any:
            def change(*args: Any, **kwargs: Any) -> None:
                nonlocal left
                if not left:
                    raise Killed
                left -= 1
                call(*args, **kwargs)

            return change

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Folder, "discard", _Folder.close_files)
            patch.setattr("os.rename", counted(os.rename))
            patch.setattr("os.unlink", counted(os.unlink))
            try:
                write(out, now, b"b")
            except Killed:
                struck += 1
            else:
                break
        said = found(out)
        assert said is None or said == (out / "config.json").read_bytes()
        write(out, now, b"c")
        names = [SINGLE] if now == 1 else [f"model-0000{number}-of-0000{now}.safetensors" for number in range(1, now + 1)]
        assert sorted(os.listdir(out)) == sorted(["config.json", *names, INDEX])
        assert found(out) == (out / "config.json").read_bytes() == b"c"
    assert struck > now + 3


def test_what_is_refused(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        with pytest.raises(MisuseError, match="not paged"):
            zero.export(Tied(), tmp_path / "out")
        model = zero.page(Tied(), store)
        hook = model.norm.register_forward_hook(lambda *_: zero.export(model, tmp_path / "out"))  # type: ignore[union-attr]
        with pytest.raises(MisuseError, match="outside forward and backward"):
            model.loss(1)  # type: ignore[operator]
        hook.remove()
        for wrong, says in (
            ({"shard": 0}, "shard=0 is not$"),
            ({"shard": "5 parsecs"}, "shard='5 parsecs' is not a size"),
            ({"shard": "5"}, r"at least 1 KiB, which shard='5' is not; .* did you mean '5GiB'\?$"),
            ({"existing": "ask"}, "existing is 'refuse' or"),
            *(({"dtype": dtype}, f"^dtype is torch.float32, .*, not {dtype}$") for dtype in NO_FLOATS),
            ({"dtype": "bfloat16"}, "not 'bfloat16': write torch.bfloat16$"),
            ({"dtype": "int8"}, "not 'int8'$"),
            ({"dtype": 16}, "not 16$"),
        ):
            with pytest.raises(MisuseError, match=says):
                zero.export(model, tmp_path / "out", **wrong)  # type: ignore[arg-type]
        for at_rest in (export_at_rest, export_of_ranks):
            with pytest.raises(MisuseError, match=r"^dtype is"):
                at_rest(cast(Any, store), tmp_path / "out", dtype=torch.int8)
        with pytest.raises(MisuseError, match="state is the folder of a store, which has files of its own: name another"):
            zero.export(model, tmp_path / "state")
        with pytest.raises(MisuseError, match=r"x\.safetensors is the name of a file, .*: name a folder$"):
            zero.export(model, tmp_path / "x.safetensors")
        assert not (tmp_path / "x.safetensors").exists()
        model.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
        with pytest.raises(MisuseError, match="'wide' is complex128"):
            zero.export(model, tmp_path / "out")
        del model.wide
        model.register_state_dict_post_hook(lambda module, state, *_: state.update(more=1))
        with pytest.raises(MisuseError, match="'more' of the model's state_dict"):
            zero.export(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        store.close()


@pytest.mark.filterwarnings("ignore")  # theirs
def test_transformers_load_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=4)
    torch.manual_seed(0)
    with TieredStore.open(tmp_path / "state", dram=DRAM) as store:
        model = zero.page(transformers.GPT2LMHeadModel(config), store)
        optimizer = zero.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.arange(32).reshape(2, 16)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        zero.export(model, tmp_path / "out", shard=100_000)
        model.config.save_pretrained(tmp_path / "out")
        again, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
        model.eval()
        with torch.no_grad():
            assert torch.equal(again(tokens).logits, model(tokens).logits)
