"""What a newcomer does wrong, as real programs: each ends with one line that names the thing and what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests import filesystems, programs
from tiered import (
    CapacityError,
    KeyNotFound,
    MisuseError,
    StoreClosed,
    StoreLocked,
    TieredDataset,
    TieredError,
    TieredStore,
    zero,
)
from tiered.errors import NEAREST_OF


def layers(count: int = 2, width: int = 64) -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(count)])


def committed(model: torch.nn.Module) -> None:
    with TieredStore.open("s/", dram="4MiB") as store:
        optimizer = zero.AdamW(zero.page(model, store).parameters())
        zero.commit(model, optimizer)


def resumed(model: torch.nn.Module, make: Callable[..., zero.Optimizer] = zero.AdamW) -> None:
    with TieredStore.open("s/", dram="4MiB") as store:
        optimizer = make(zero.page(model, store, existing="resume").parameters(), lr=1e-3)
        zero.resume(model, optimizer)


def trained(optimizer: Callable[..., torch.optim.Optimizer], when: str) -> None:
    model = layers()
    with TieredStore.open("s/", dram="4MiB") as store:
        if when == "before page":
            made = optimizer(model.parameters(), lr=1e-3)
        zero.page(model, store)
        if when == "after page":
            made = optimizer(model.parameters(), lr=1e-3)
        model(torch.randn(2, 64)).sum().backward()
        made.step()


def used(work: Callable[[TieredStore], object]) -> None:
    with TieredStore.open("s/", dram="4MiB") as store:
        store.put("layer0.weight", torch.zeros(4))
        work(store)


def half_of_what_is_trained() -> None:
    def work(store: TieredStore) -> None:
        model = zero.page(layers(), store)
        optimizer = zero.AdamW(model.parameters())
        model.half()
        optimizer.step()

    used(work)


def resumed_late() -> None:
    def work(store: TieredStore) -> None:
        model = zero.page(layers(), store, existing="continue")
        optimizer = zero.AdamW(model.parameters())
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        zero.resume(model, optimizer)

    used(work)


def of_frozen_weights(store: TieredStore) -> None:
    model = zero.page(layers(), store, policy=zero.Policy(quantize="int8"))
    with pytest.raises(RuntimeError, match=r"does not require grad .*: the parameters of .* train an adapter over it"):
        model(torch.ones(2, 64)).sum().backward()
    with pytest.raises(ValueError, match=r"got an empty parameter list: .* train an adapter over it"):
        zero.AdamW([one for one in model.parameters() if one.requires_grad])
    zero.AdamW(model.parameters())


def after_the_block() -> None:
    model = layers()
    with TieredStore.open("s/", dram="4MiB") as store:
        zero.page(model, store)
    model(torch.randn(2, 64))


def other_names() -> None:
    committed(layers())
    model = torch.nn.Module()
    model.net = layers()
    resumed(model)


def too_small() -> None:
    with TieredStore.open("s/", dram="1MiB") as store:
        zero.page(torch.nn.Conv2d(512, 512, 3), store)


def foreign() -> None:
    Path("docs").mkdir()
    Path("docs/page.txt").write_text("text")
    TieredStore.open("docs/", dram="4MiB")


MISTAKES: dict[str, tuple[Callable[[], object], type[TieredError], str]] = {
    "a budget of 8": (lambda: TieredStore.open("s/", dram=8), CapacityError, "DRAM budget of 8 bytes .* did you mean '8GiB'"),
    "a budget of '512'": (lambda: TieredStore.open("s/", dram="512"), CapacityError, "did you mean '512MiB'"),
    "a device budget of 16": (
        lambda: TieredStore.open("s/", dram="4MiB", hbm=16, device="cpu"), CapacityError, "HBM budget.*did you mean '16GiB'",
    ),
    "a budget in words": (lambda: TieredStore.open("s/", dram="8 gigs"), MisuseError, "'8 gigs' is not a size; .*'256MiB'"),
    "a budget in M": (lambda: TieredStore.open("s/", dram="8M"), MisuseError, "'8M' is not a size; did you mean '8MiB'"),
    "a budget in g": (lambda: TieredStore.open("s/", dram=" 8 g "), MisuseError, "' 8 g ' is not a size; did you mean '8GiB'"),
    "a budget of a half": (lambda: TieredStore.open("s/", dram="0.5"), CapacityError, "did you mean '0.5GiB'"),
    "a budget in KiB": (lambda: TieredStore.open("s/", dram=524288), CapacityError, r"the smallest is 1,048,576 bytes$"),
    "what a restart means, of a store": (
        lambda: TieredStore.open("s/", dram="8MiB", existing=cast(Any, "continue")), MisuseError, r"said of a model, in zero",
    ),
    "a budget that holds no unit": (too_small, CapacityError, "the smallest that works is"),
    "the constructor": (lambda: TieredStore("s/", dram="8MiB"), MisuseError, r"TieredStore\.open\(path, dram=\) opens"),
    "an optimizer before the model is paged": (
        lambda: trained(zero.AdamW, "before page"), MisuseError, r"call tiered\.zero\.page.* before making the optimizer",
    ),
    "torch's optimizer, before": (lambda: trained(torch.optim.AdamW, "before page"), MisuseError, r"make tiered\.zero\.AdamW"),
    "torch's optimizer, after": (lambda: trained(torch.optim.AdamW, "after page"), MisuseError, r"make tiered\.zero\.AdamW"),
    "a lease without with: a method": (
        lambda: used(lambda store: store.lease("layer0.weight").mul_(2)), MisuseError,
        r"with store\.lease\('layer0\.weight'\) as",
    ),
    "a lease without with: an operator": (
        lambda: used(lambda store: torch.ones(4) @ store.lease("layer0.weight")), MisuseError, r"with store\.lease",
    ),
    "leases without with": (
        lambda: used(lambda store: list(store.lease(["layer0.weight"]))), MisuseError, r"with store\.lease",
    ),
    "a key with a typo": (
        lambda: used(lambda store: store.get("layer0.wieght")), KeyNotFound,
        r"no tensor 'layer0\.wieght'.*mean 'layer0\.weight'\?",
    ),
    "after the block": (after_the_block, StoreClosed, "with block has ended"),
    "a folder that is not there": (lambda: TieredStore.open("ther/", access="read"), MisuseError, "ther is not a folder: name"),
    "a folder with something else": (foreign, MisuseError, "is not a tiered store; name an empty or new folder"),
    "in use by itself": (
        lambda: used(lambda store: TieredStore.open("s/", dram="4MiB")), StoreLocked,
        "use the TieredStore that is open already",
    ),
    "paged twice": (
        lambda: used(lambda store: [zero.page(model, store) for model in [layers()] * 2]), MisuseError, "page a model once",
    ),
    "run twice": (lambda: [committed(layers()) for _ in range(2)], MisuseError, "already holds a model.*existing='continue'"),
    "another model: more layers": (
        lambda: [committed(layers()), resumed(layers(3))], MisuseError,
        r"the commit has no '2\.weight' .* and 1 more\. Page a model",
    ),
    "another model: fewer layers": (
        lambda: [committed(layers(3)), resumed(layers())], MisuseError,
        r"the commit has '2\.weight' .*which this model has not",
    ),
    "another model: wider": (
        lambda: [committed(layers()), resumed(layers(width=32))], MisuseError,
        r"the commit has '0\.weight' \(torch\.float32 of shape \(64, 64\)\), and this model '0\.weight' \(.*\(32, 32\)\)",
    ),
    "another model: other names": (
        other_names, MisuseError,
        r"the commit has '0\.weight' .* and 3 more, and this model 'net\.0\.weight' .* and 3 more instead",
    ),
    "another optimizer": (
        lambda: [committed(layers()), resumed(layers(), zero.SGD)], MisuseError,
        "by 'AdamWRule' .*make the optimizer as it was",
    ),
    "half once there is an optimizer": (
        half_of_what_is_trained, MisuseError,
        r"cannot change in the store once an optimizer keeps states .*: change it before an optimizer is made",
    ),
    "resumed after a step": (resumed_late, MisuseError, r"since it was paged: call zero\.resume before the first step"),
    "an optimizer of a quantised model": (lambda: used(of_frozen_weights), MisuseError, "for reading only: train an adapter"),
    "a model for an optimizer": (
        lambda: used(lambda store: zero.commit(zero.page(layers(), store), cast(Any, layers()))), MisuseError,
        "optimizer= is a model, a Sequential: the model comes first",
    ),
    "a commit of a model that is not paged": (
        lambda: zero.commit(layers()), MisuseError,
        r"this Sequential is not paged: call tiered\.zero\.page\(model, store\) first",
    ),
    "a type by its name": (
        lambda: zero.Policy(storage=cast(Any, "bfloat16")), MisuseError, "^storage .* not 'bfloat16': write torch.bfloat16$",
    ),
    "a type that is none to compute with": (
        lambda: zero.Policy(compute=torch.int64), MisuseError, r"^compute is torch\.float32, not torch\.int64$",
    ),
    "a type for DeepSpeed's Init": (
        lambda: zero.Init(config={}, dtype=torch.int8), MisuseError, r"^dtype is torch\.float32, .*, not torch\.int8$",
    ),
    "a table with other blocks": (
        lambda: used(lambda store: [store.table("t", 1000, 8, block=size) for size in ("4KiB", "16KiB")]), MisuseError,
        "has 128 rows in a block, where 16KiB would have 512: open it with its name alone",
    ),
    "two keys to rename": (
        lambda: used(lambda store: store.rename(cast(Any, "layer0.weight"), "w")), MisuseError,
        r"a mapping from keys to keys: store\.rename\({'layer0\.weight': 'w'}\)$",
    ),
    "a device that there is not": (
        lambda: TieredStore.open("s/", dram="4MiB", device="gpu"), MisuseError, "'gpu' is not a device; name cuda, cuda:1",
    ),
    "resumed before it was begun": (
        lambda: resumed(layers()), MisuseError,
        "has no model named 'model' to go on with: existing='continue' begins one where there is none$",
    ),
    "a list for a tensor": (lambda: used(lambda store: store.put("a", [1, 2])), MisuseError, "holds tensors, not list"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_line_with_its_mend(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers.trainer", raising=False)  # with that, it is told what its Trainer is given
    work, kind, says = MISTAKES[name]
    with pytest.raises(kind if "method" not in name else AttributeError, match=says) as found:
        work()
    assert "\n" not in str(found.value)


@filesystems.root
def test_a_disk_without_room_is_named(tmp_path: Path) -> None:
    def fill(store: TieredStore) -> None:
        for number in range(32):
            store.put(str(number), torch.zeros(1 << 18))

    with filesystems.small_ext4(tmp_path, 16 << 20) as disk, TieredStore.open(disk / "s", dram="4MiB") as store:
        with pytest.raises(CapacityError, match=rf"{disk}.* 0 bytes free, 1\.0 MiB needed .*make room there") as found:
            fill(store)
        assert "\n" not in str(found.value)
        store.close()


def test_a_store_that_nobody_closes_says_what_is_lost(tmp_path: Path) -> None:
    program = (
        "import torch, tiered\n"
        "store = tiered.TieredStore.open('s/', dram='1MiB')\n"
        "store.put('a', torch.zeros(3))\n"
    )
    done = programs.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert "s was closed with changes of 1 tensor that were not committed: call commit() first, or leave a with" in done.stderr


def test_the_nearest_key_of_every_kind_of_tensor(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "s", dram="4MiB") as store:
        store.put("layer0.weight", torch.zeros(4))
        small = store.small("small")
        small["row/17"] = torch.zeros(2)
        with pytest.raises(KeyNotFound, match=r"mean 'row/17'\?"):
            small.get("row17")
        store.commit()
        for samples in (["layer0.wait"], ["layer.0.weight"]):
            with pytest.raises(KeyNotFound, match=r"mean 'layer0\.weight'\?"):
                TieredDataset(store, samples)[0]
    with TieredStore.open(tmp_path / "s", access="read") as store, pytest.raises(KeyNotFound, match=r"mean 'layer0\.weight'\?"):
        store.get("layer0_weight")


def test_a_server_without_its_libraries_names_them() -> None:
    program = "import runpy, sys; sys.modules['uvicorn'] = None; runpy.run_path(sys.argv[1])"
    example = Path(__file__).resolve().parents[1] / "docs" / "examples" / "serve.py"
    done = programs.run([sys.executable, "-c", program, str(example)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith("pip install '.[hf,serve]' brings what a server needs")
    assert "Traceback" not in done.stderr


def test_an_optimizer_of_ones_own_is_told_what_to_use(tmp_path: Path) -> None:
    """Where it is given to a commit, as where it makes a step."""

    class Mine(torch.optim.SGD):
        pass

    with TieredStore.open(tmp_path / "s", dram="4MiB") as store:
        model = zero.page(torch.nn.Linear(4, 4), store)
        mine = Mine(model.parameters(), lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        for call in (lambda: zero.commit(model, cast(Any, mine)), mine.step):
            with pytest.raises(MisuseError, match=r"tiered\.zero\.Elementwise takes Mine, .* tiered\.zero\.Optimizer a rule"):
                call()


def test_the_nearest_of_a_million_keys_is_among_the_first(tmp_path: Path) -> None:
    """Nothing is compared until the error is shown, and then with so many names at most."""
    names = {f"row/{number}": None for number in range(1_000_000)}
    found = KeyNotFound("no tensor 'row/00'", "row/00", names)
    assert len(found._names) == NEAREST_OF
    assert "did you mean 'row/" in str(found)
    assert str(KeyNotFound("no tensor", "q", names)) == "no tensor"
    assert str(KeyNotFound("no tensor", "row/" + "0" * 10_000, names)) == "no tensor"
