"""Promise 27, of optimizers: states that were kept in a store go on with the values that they belong to, and with no others.

The values of parameters in memory are the user's to save. One bit of one of them is changed, of each parameter in turn: the
step is refused, with its name, before anything changes. Once the bit is back the training goes on, bit for bit.
"""

from __future__ import annotations

import copy
import functools
import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.stress.hostile import contents, digest
from tests.stress.tally import Tally
from tests.zero.harness import equal
from tests.zero.models import Tied
from tiered import ManifestError, MisuseError, Owner, TieredStore, zero

PROMISE = "27 (what is opened is what was kept)"


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Change one bit of one element, in place."""
    byte, bit = divmod(bit, 8)
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        one = flat[element : element + 1].clone()
        one.view(torch.uint8)[byte] ^= 1 << bit
        flat[element : element + 1] = one


def train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        for number, parameter in enumerate(model.parameters()):
            made = torch.Generator().manual_seed(number)
            parameter.grad = torch.randn(parameter.shape, generator=made).to(parameter.dtype)
        optimizer.step()


MAKE: dict[str, Any] = {
    "fp32": (lambda: Tied(layers=2), zero.AdamW),
    "bf16": (lambda: Tied(layers=2).bfloat16(), zero.AdamW),
    "fp16": (lambda: Tied(layers=2).half(), functools.partial(zero.SGD, momentum=0.9)),
    "8 bits": (lambda: Tied(layers=2), zero.AdamW8bit),
}


@pytest.mark.parametrize("kind", MAKE)
def test_states_go_on_with_their_values_only(kind: str, tmp_path: Path, tally: Tally) -> None:
    tally.what, chance = PROMISE, random.Random(kind)
    torch.manual_seed(0)
    make, rule = MAKE[kind]
    model = make()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        train(model, rule(model.parameters(), lr=1e-2, store=store), 2)  # nobody refers to the optimizer any more
    saved = copy.deepcopy(model.state_dict())
    reference, other = copy.deepcopy(model), make()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        optimizer = rule(other.named_parameters(), lr=1e-2, store=store, existing="resume")
        before = contents(store)
        for again in functools.partial(train, other, optimizer, 1), optimizer.state_dict:
            with pytest.raises(MisuseError, match="has other values than those that the states under 'optimizer'"):
                again()  # made anew, with values of its own
        other.load_state_dict(saved)
        for name, parameter in other.named_parameters():
            where = chance.randrange(parameter.numel()), chance.randrange(8 * parameter.itemsize)
            flip(parameter, *where)
            values = digest(dict(other.state_dict()))
            with pytest.raises(MisuseError, match=f"'{name}' has other values than those that the states"):
                train(other, optimizer, 1)
            assert digest(dict(other.state_dict())) == values
            flip(parameter, *where)
            tally.count("a bit of a parameter in memory", 1)
        assert contents(store) == before
        train(other, optimizer, 1)
        store.close()
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        optimizer = rule(reference.parameters(), lr=1e-2, store=store, existing="resume")
        train(reference, optimizer, 1)
        assert equal(reference.state_dict(), other.state_dict())
        store.close()


def test_values_that_change_between_steps_are_kept_as_they_are(tmp_path: Path) -> None:
    """A commit has what it finds, and not what the last step left; and what changes after it is where the next step begins."""
    model = nn.Linear(4, 4)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        optimizer = zero.AdamW(model.parameters(), store=store)
        train(model, optimizer, 2)
        store.commit()
        with torch.no_grad():
            model.weight[0] = 0
        store.commit_async().result()
        saved = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            model.weight[1] = 0
        train(model, optimizer, 1)
        store.close()
    model.load_state_dict(saved)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        optimizer = zero.AdamW(model.parameters(), store=store, existing="resume")
        store.commit()  # before anything was compared
        train(model, optimizer, 1)


def test_a_rollback_takes_the_values_of_then(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with TieredStore.open(tmp_path / "store", dram="1MiB", keep=3) as store:
        optimizer = zero.AdamW(model.named_parameters(), store=store)
        saved = []
        for _ in range(2):
            train(model, optimizer, 1)
            store.commit()
            saved.append(copy.deepcopy(model.state_dict()))
        train(model, optimizer, 1)
        for generation, right in ((None, 1), (1, 0), (2, 1)):
            store.rollback(generation)
            flip(model.weight, 3, 1)
            for _ in range(2):
                with pytest.raises(MisuseError, match="'weight' has other values"):
                    train(model, optimizer, 1)
                model.load_state_dict(saved[1 - right])
            if generation is not None:
                store.commit()  # of states whose values are not there
                with pytest.raises(MisuseError, match="has other values"):
                    train(model, optimizer, 1)
            model.load_state_dict(saved[right])
            train(model, optimizer, 1)
        store.close()


def test_states_that_say_nothing_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        train(model, zero.AdamW(model.parameters(), store=store), 1)
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:  # which no optimizer of before has anything to say to
        right = store.get("optimizer/values")
        for wrong, error, says in (
            (None, MisuseError, "nothing in .* says which values the states under 'optimizer' belong to"),
            (torch.ones(32), ManifestError, "'optimizer/values' is damaged"),
            (right[:8], ManifestError, "'optimizer/values' is damaged"),
            (right.flip(0), MisuseError, "has other values"),
        ):
            store.delete("optimizer/values", owner=Owner("optimizer", "optimizer"))
            optimizer = zero.AdamW(model.parameters(), store=store, name="optimizer", existing="resume")
            if wrong is not None:
                store.put("optimizer/values", wrong, owner=Owner("optimizer", "optimizer"))
            with pytest.raises(error, match=says):
                train(model, optimizer, 1)
            store.put("optimizer/values", right, owner=Owner("optimizer", "optimizer"))
        train(model, optimizer, 1)


def test_what_a_commit_needs_is_not_kept_for_longer(tmp_path: Path) -> None:
    with TieredStore.open(tmp_path / "store", dram="1MiB") as store:
        model = nn.Linear(4, 4)
        train(model, zero.AdamW(model.parameters(), store=store), 1)
        gone = weakref.ref(model.weight)
        del model
        gc.collect()
        assert gone() is not None
        store.commit()
        gc.collect()
        assert gone() is None
