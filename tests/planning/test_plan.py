"""Plans: what they say of memory, budgets, modes and ranks, and what they refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.quick import quick
from tiered import Machine, MisuseError, Numbers, Sweep, TieredStore, Workload, zero
from tiered.planning.dry_run import TrainingSetup, Update, dry_run
from tiered.planning.notes import CreateNote, DeleteNote, LeaseNote, StepNotes
from tiered.planning.plan import Choice, Planner, _order
from tiered.planning.sizes import sizes_of
from tiered.planning.sources import Subject, subject_of
from tiered.planning.timing import Timing, measure_operations
from tiered.types import parse_size
from tiered.zero import Policy
from tiered.zero.paging.pager import pager_of
from tiered.zero.paging.units import Limits
from tiered.zero.rules.exact import AdamWRule
from tiered.zero.rules.known import CHOICES

DEEP = Numbers(layers=3, width=64, heads=4, vocabulary=256)
SMALL = Numbers(layers=2, width=64, heads=4, vocabulary=256)
"""Parameters, gradients and states are twice the smallest budget."""
ONE = Numbers(layers=1, width=64, heads=4, vocabulary=256)
RATES: dict[str, Any] = {"read": 1e9, "write": 2e9, "dram": "1GiB"}
STAYS = 64 << 20
"""Bytes of a small machine that stay for the system."""
ASKED: dict[str, Any] = {"workload": Workload(2, 32), "dram": "1MiB"}


def trained(subject: Subject) -> StepNotes:
    """A step in a budget in which all fits."""
    setup = TrainingSetup(16 << 20, Limits.of(16 << 20), AdamWRule(1e-3, (0.9, 0.999), 1e-8, 0.01, False))
    return dry_run(subject.model, subject.args, subject.kwargs, subject.loss, subject.target, setup, follow=True)


def saved(step: StepNotes) -> int:
    """Bytes that are alive when backward begins."""
    return step.alive[step.turns[0] - 1].now


def test_memory_by_kind_and_what_a_step_moves() -> None:
    found = tiered.plan(SMALL, machine={**RATES, "rated_life": 1e12}, update="on_fetch", activations="memory", **ASKED)
    chosen = found.chosen
    assert chosen is not None
    parameters = 4 * SMALL.parameters
    assert found.parameters == SMALL.parameters
    assert chosen.memory.parameters == pytest.approx(parameters, rel=0.02)  # and what aligns them
    assert chosen.memory.states == pytest.approx(2 * parameters, rel=0.02)
    assert chosen.memory.gradients == pytest.approx(parameters, rel=0.02)
    assert 0 < chosen.memory.pool <= 1 << 20
    assert chosen.memory.process > chosen.memory.pool + chosen.memory.activations
    assert chosen.read + chosen.written >= chosen.least_bytes > 0
    assert chosen.seconds == pytest.approx(chosen.processor + chosen.waiting)
    assert found.days_of_life == pytest.approx(1e12 / found.written_per_day)
    assert json.loads(json.dumps(found.as_json()))["fits"] is True


def test_no_plan_goes_below_the_optimum() -> None:
    pytest.importorskip("scipy")
    asked = ASKED | {"update": "on_fetch", "activations": "memory"}
    without, found = tiered.plan(SMALL, **asked), tiered.plan(SMALL, **asked, optimum=True)
    assert without.chosen is not None
    assert without.chosen.optimum is None
    assert found.chosen is not None
    assert found.chosen.optimum is not None
    assert 0 < found.chosen.optimum <= found.chosen.least_bytes * 1.001
    assert found.chosen.read + found.chosen.written >= found.chosen.optimum


@pytest.mark.parametrize("update", quick(["on_fetch", "in_backward"], ["in_backward"]))
def test_larger_chunks_in_a_rehearsal_move_as_many_bytes_in_the_same_time(update: Update) -> None:
    subject = subject_of(DEEP, Workload(2, 32))
    machine = Machine.of(RATES).but(read=1e8, write=1e8, lease=1e-7, transfer=1e-7)  # what a lease takes is that of each chunk
    rule = AdamWRule(1e-3, (0.9, 0.999), 1e-8, 0.01, False)
    whole, coarse = (Planner(subject, machine, rule, Policy(), 1, rehearsed=touches) for touches in (3000, 100))
    expected, found = (planner.predict(Choice(update, "memory", 1 << 20)) for planner in (whole, coarse))
    assert found.read + found.written == pytest.approx(expected.read + expected.written, rel=0.05)
    assert found.seconds == pytest.approx(expected.seconds, rel=0.1)
    assert coarse.notes
    assert not whole.notes


def test_chunks_that_are_taken_together_have_room_beside_the_largest_parameter() -> None:
    """And its gradient: together with all of its states they are larger than the budget."""
    subject = subject_of(Numbers(layers=12, width=256, heads=4, vocabulary=8192), Workload(1, 32))
    rule, choice = CHOICES["adamw"].usual, Choice("in_backward", "memory", 27 << 20)
    whole, coarse = (Planner(subject, None, rule, Policy(), 1, rehearsed=touches).predict(choice) for touches in (3000, 8))
    assert coarse.read + coarse.written == pytest.approx(whole.read + whole.written, rel=0.1)


def test_a_plan_without_a_machine_has_bytes_and_no_seconds() -> None:
    found = tiered.plan(SMALL, **ASKED)
    assert found.chosen is not None
    assert found.chosen.seconds == found.written_per_day == 0
    assert found.chosen.read > 0
    assert found.days_of_life is None
    modes = [(one.choice.update, one.choice.activations) for one in (found.chosen, *found.others)]
    assert sorted(way for _, way in modes) == ["memory", "memory", "recompute", "store"]
    assert {update for update, way in modes if way == "memory"} == {"on_fetch", "in_backward"}
    assert {update for update, way in modes if way != "memory"} == {found.chosen.choice.update}


def test_of_steps_that_take_long_to_play_ways_that_are_not_faster_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def modes(machine: dict[str, Any]) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
        found = tiered.plan(SMALL, machine=machine, **ASKED)
        assert found.chosen is not None
        return [(one.choice.update, one.choice.activations) for one in (found.chosen, *found.others)], found.notes

    assert len(modes(RATES)[0]) == 4
    monkeypatch.setattr("tiered.planning.plan.MANY", 0)
    fitting, notes = modes(RATES)
    assert sorted(fitting) == [("in_backward", "memory"), ("on_fetch", "memory")]
    assert any("no way is faster" in note for note in notes)
    slow = {"read": 1e6, "write": 1e6, "dram": "1GiB"}  # the drive decides, and updates on fetch move more
    assert modes(slow)[0] == [("in_backward", "memory")]
    assert any("update='on_fetch' is left out: no step is much faster" in note for note in modes(slow)[1])
    lacking, notes = modes({**RATES, "dram": 1 << 20})
    assert sorted(way for _, way in lacking) == ["memory", "memory", "recompute", "store"]
    assert len({update for update, way in lacking if way != "memory"}) == 1
    assert not any("left out" in note for note in notes)


def test_twice_the_budget_is_asked_for_where_the_machine_has_it() -> None:
    def played(dram: int | str) -> int:
        said: list[str] = []
        machine = {**RATES, "read": 1e7, "write": 1e7, "base": 0, "dram": dram}
        more = {"update": "on_fetch", "activations": "memory", "progress": lambda what, share: said.append(what)}
        found = tiered.plan(SMALL, machine=machine, **ASKED | more)
        assert found.fits
        return len(said)

    assert played("1GiB") == 2
    chosen = tiered.plan(SMALL, **ASKED, update="on_fetch", activations="memory").chosen
    assert chosen is not None
    assert played(chosen.memory.process + STAYS + (128 << 10)) == 1, "all states are 400 KiB more"


def test_a_note_says_which_choices_lease_too_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered.planning.plan.LONGEST", 10)
    found = tiered.plan(ONE, **ASKED, machine=RATES, activations="memory")
    assert found.chosen is not None
    (note,) = [one for one in found.notes if "follows orders of up to 10" in one]
    for one in (found.chosen, *found.others):
        assert f"{one.touches:,} tensors ({one.choice})" in note


def test_the_smallest_budget_is_the_one_that_paging_takes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv1d(64, 600, 9), nn.Flatten(), nn.Tanh())  # a parameter that is not sliced
    found = tiered.plan(model, workload=Workload(inputs=torch.zeros(1, 64, 9)), dram="1MiB")
    assert found.chosen is None
    assert not found.fits
    assert "smallest budget" in (found.refused or "")
    change = re.fullmatch(r"dram='([\d.]+\w+)'", found.changes[0])
    assert change
    assert found.enough <= parse_size(change[1]) <= 1.02 * found.enough
    assert found.enough >= found.smallest
    for dram, fits in ((found.smallest, True), (found.smallest - 4096, False)):
        with TieredStore.open(tmp_path / str(dram), dram=dram, durability="none") as store:
            if fits:
                zero.page(nn.Sequential(nn.Conv1d(64, 600, 9)), store)
            else:
                with pytest.raises(tiered.CapacityError, match="smallest"):
                    zero.page(nn.Sequential(nn.Conv1d(64, 600, 9)), store)


def test_the_smallest_budget_of_what_computes_again_is_larger(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv1d(64, 600, 9), nn.Flatten(), nn.Tanh())

    asked: dict[str, Any] = {"workload": Workload(inputs=torch.zeros(1, 64, 9)), "activations": "recompute"}
    found = tiered.plan(model(), dram="1MiB", **asked)
    assert not found.fits
    assert len(found.changes) == 2
    assert tiered.plan(model(), dram=found.smallest, **asked).fits
    with TieredStore.open(tmp_path / "store", dram=found.smallest, durability="none") as store:
        zero.page(model(), store, activations="recompute")
    less = TieredStore.open(tmp_path / "less", dram=found.smallest - 4096, durability="none")
    with less as store, pytest.raises(tiered.CapacityError, match="smallest"):
        zero.page(model(), store, activations="recompute")
    assert tiered.plan(model(), dram="1KiB", workload=Workload(inputs=torch.zeros(1, 64, 9))).smallest < found.smallest


def test_a_weight_is_divided_where_it_does_not_fit_beside_activations(tmp_path: Path) -> None:
    """A third of the budget holds the largest weight, so it is whole; where the store has activations, too, it is divided."""
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))

    dram, workload = 3_500_000, Workload(inputs=torch.zeros(1, 512))
    planner = Planner(subject_of(model(), workload), None, AdamWRule(), Policy(), 1)
    ways = [Choice(activations="memory", dram=dram), Choice(activations="store", dram=dram)]
    assert all(planner.fits(way) for way in ways)
    assert [bool(planner.divided(dram, saves=way.saves).sliced) for way in ways] == [False, True]
    for way in ways:
        with TieredStore.open(tmp_path / str(way.activations), dram=dram, durability="none") as store:
            paged = zero.page(model(), store, activations=way.activations)
            assert bool(pager_of(paged).sliced) == way.saves
            store.close()


def test_what_updates_whole_parameters_is_planned_where_none_is_divided() -> None:
    model, asked = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 8)), {"workload": Workload(inputs=torch.zeros(1, 512))}
    assert tiered.plan(model, dram="2MiB", **asked).fits
    found = tiered.plan(model, dram="2MiB", optimizer="adafactor", **asked)
    assert not found.fits
    assert found.smallest >= 3 << 20
    assert tiered.plan(model, dram=found.smallest, optimizer="adafactor", **asked).fits
    with pytest.raises(MisuseError, match="leave ranks out"):
        tiered.plan(model, dram="8MiB", optimizer="adafactor", sweep=Sweep(ranks=[2]), machine=RATES, **asked)


def test_what_does_not_fit_says_what_would() -> None:
    asked = {**ASKED, "workload": Workload(1, 4096), "update": "on_fetch", "activations": "memory"}
    none = tiered.plan(DEEP, machine={**RATES, "dram": STAYS + (64 << 20), "base": 1 << 20}, **asked)
    assert [one for one in none.changes if one.startswith("more memory")], "no batch is small enough"
    found = tiered.plan(DEEP, machine={**RATES, "dram": STAYS + (80 << 20), "base": 1 << 20}, **asked)
    assert not found.fits
    assert "activations" in (found.refused or "")
    assert any("smaller batch" in one for one in found.changes)
    assert not any("recompute" in one or "budget" in one for one in found.changes), "neither would be enough"


@pytest.mark.parametrize(("room", "budget"), quick([(92 << 20, False), (169 << 19, True)], [(169 << 19, True)]))
def test_a_change_that_is_said_to_fit_does(room: int, budget: bool) -> None:
    machine: dict[str, Any] = {**RATES, "dram": STAYS + room, "base": 1 << 20}
    asked: dict[str, Any] = {"workload": Workload(64, 32), "dram": "4MiB", "update": "on_fetch"}
    found = tiered.plan(DEEP, machine=machine, activations="memory", **asked)
    assert not found.fits
    told = found.changes[0]
    way, parts = re.match(r"activations='(\w+)'", told), re.match(r"micro_batch=(\d+)", told)
    assert way or parts
    mode: Any = {"activations": way[1]} if way else {"activations": "memory", "micro_batch": int(parts[1])}  # type: ignore[index]
    assert ("dram=" in told) is budget
    if budget:
        assert not tiered.plan(DEEP, machine=machine, **mode, **asked).fits
        asked["dram"] = told.partition("dram='")[2].partition("'")[0]
    assert tiered.plan(DEEP, machine=machine, **mode, **asked).fits


@pytest.mark.parametrize(("dram", "stays"), [(1 << 30, 64 << 20), (64 << 30, 4 << 30)])
def test_what_fits_leaves_memory_for_the_system(dram: int, stays: int) -> None:
    machine: dict[str, Any] = {**RATES, "dram": dram}
    asked: dict[str, Any] = ASKED | {"update": "on_fetch", "activations": "memory"}
    taken = tiered.plan(ONE, machine=machine, **asked).chosen
    assert taken is not None
    for base, fits in ((dram - stays - taken.memory.process, True), (dram - stays - taken.memory.process + 1, False)):
        found = tiered.plan(ONE, machine={**machine, "base": Machine(1, 1).base + base}, **asked)
        assert found.fits is fits
    assert f"{stays / 2**20:.1f} MiB of it for the system".replace("4096.0 MiB", "4.0 GiB") in (found.refused or "")


def test_what_does_not_fit_in_the_memory_of_a_device_is_not_chosen() -> None:
    asked: dict[str, Any] = {"workload": Workload(8, 256), "dram": "4MiB", "update": "on_fetch"}
    roomy = tiered.plan(DEEP, machine={**RATES, "hbm": "1GiB"}, **asked)
    assert roomy.chosen is not None
    assert roomy.chosen.choice.activations == "memory"
    most = roomy.chosen.memory
    assert most.parameters < 1 << 20
    assert most.device == most.activations + (1 << 20), "the smallest budget there is"
    assert most.process == Machine(1e9, 1e9).base + most.pool + most.workspace, "activations are on the device alone"
    machine = {**RATES, "hbm": most.activations}  # no unit has room beside them
    found = tiered.plan(DEEP, machine=machine, **asked)
    assert found.fits
    assert found.chosen is not None
    assert found.chosen.fits
    assert found.chosen.choice.activations != "memory"
    assert found.chosen.memory.device <= most.activations
    assert [one.fits for one in found.others].count(False) == 1
    assert found.others[-1].choice.activations == "memory", "what fits goes before what is fast and does not"
    alone = tiered.plan(DEEP, machine=machine, activations="memory", **asked)
    assert not alone.fits
    assert "of the device, and it has" in (alone.refused or "")
    assert alone.changes[0].startswith(("activations=", "micro_batch="))
    assert alone.changes[-1].startswith("a smaller batch")
    none = tiered.plan(DEEP, machine={**RATES, "hbm": "512KiB"}, **asked)
    assert not none.fits
    assert none.changes == ("a device with more memory: beside activations and with the smallest budget it takes 1.0 MiB",)


def test_of_ways_that_take_as_long_the_one_with_less_memory_comes_first() -> None:
    """Sums of the same seconds in another order differ in their last bits."""
    found = tiered.plan(DEEP, machine=RATES, workload=Workload(2, 32), dram="8MiB", activations="memory")
    one, other = sorted((found.chosen, *found.others), key=lambda way: way.seconds)
    assert 0 < other.seconds - one.seconds < 1e-12
    larger = replace(one, memory=replace(one.memory, process=other.memory.process + 1))
    assert min((larger, other), key=_order) is other
    assert min((larger, replace(other, seconds=1.01 * one.seconds)), key=_order) is larger


@pytest.mark.parametrize(("hbm", "rel"), [(1 << 20, 0.25), (64 << 20, 0.02)])
def test_what_crosses_the_link_of_a_device_is_what_a_run_sends(tmp_path: Path, hbm: int, rel: float) -> None:
    x, layers = torch.zeros(8, 128), 12
    with TieredStore.open(tmp_path / "store", hbm=hbm, device="cpu", dram="16MiB", durability="none") as store:
        model = zero.page(nn.Sequential(*[nn.Linear(128, 128) for _ in range(layers)]), store)
        optimizer = zero.AdamW(model.parameters())
        sent = list[int]()
        for _ in range(6):
            before = store.statistics().links[0].up.bytes
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            sent.append(store.statistics().links[0].up.bytes - before)
    machine = {**RATES, "hbm": hbm, "link": 1e6, "device_flops": 1e12, "device_memory": 1e12}
    planned = nn.Sequential(*[nn.Linear(128, 128) for _ in range(layers)])
    asked: dict[str, Any] = {"dram": "16MiB", "update": "on_fetch", "activations": "memory"}
    found = tiered.plan(planned, workload=Workload(inputs=x), machine=machine, **asked)
    assert found.chosen is not None
    assert found.chosen.sending * 1e6 == pytest.approx(sum(sent[2:]) / 4, rel=rel)


def test_each_backward_sends_its_gradients_from_a_device() -> None:
    def sending(passes: int) -> float:
        machine = {**RATES, "hbm": "1GiB", "link": 1e6, "device_flops": 1e12, "device_memory": 1e12}
        workload = Workload(inputs=torch.zeros(8, 64), accumulate=passes)
        asked: dict[str, Any] = {"update": "on_fetch", "activations": "memory", "dram": "4MiB"}
        found = tiered.plan(nn.Linear(64, 64), workload=workload, machine=machine, **asked).chosen
        assert found is not None
        return found.sending

    assert sending(3) == pytest.approx(3 * sending(1), rel=0.05)


def test_what_the_thread_of_the_store_takes_from_computing() -> None:
    """Nothing of forward and backward where a device computes, or where a core is left."""
    asked: dict[str, Any] = ASKED | {"update": "on_fetch", "activations": "memory"}
    taken = {}
    for name, machine in (
        ("alone", {"cores": 2, "threads": 1}), ("all cores", {"cores": 2, "threads": 2}),
        ("device", {"cores": 2, "threads": 2, "hbm": "1GiB"}),
    ):  # fmt: skip
        found = tiered.plan(DEEP, machine=RATES | machine, **asked).chosen
        assert found is not None
        taken[name] = found.by_work.get("transfers", 0.0)
    assert taken["alone"] == 0
    assert 0 < taken["device"] < 0.7 * taken["all cores"]


def test_bf16_products_of_backward_have_a_rate_of_their_own() -> None:
    def seconds(**rates: float) -> dict[str, float]:
        numbers = {**RATES, "flops": 1e9, "flops_half": 1e9, "operation": 0.0, **rates}
        found = tiered.plan(replace(SMALL, dtype="bfloat16"), machine=numbers, update="on_fetch", activations="memory", **ASKED)
        assert found.chosen is not None
        return found.chosen.by_work

    usual, slow = seconds(), seconds(flops_half_backward=1e8)
    assert slow["forward"] == usual["forward"]
    assert slow["backward"] > 5 * usual["backward"]


def test_a_plan_says_where_a_default_of_a_machine_decides() -> None:
    asked: dict[str, Any] = ASKED | {"dram": "16MiB", "update": "on_fetch", "activations": "memory"}
    machine = {**RATES, "lease": 0, "gradient": 0, "operation": 0, "flops": 1e15, "memory": 1e15}
    found = tiered.plan(SMALL, machine=machine, **asked)
    told = [one for one in found.notes if "by the default update=5e+08" in one]
    assert len(told) == 1
    assert told[0].startswith("the longest part, update ")
    for given in ({"update": 4e8}, {"update": 1e15, "gradient": 1.0}):
        assert not any("by the default" in one for one in tiered.plan(SMALL, machine=machine | given, **asked).notes)


def test_recomputing_takes_less_memory_and_more_time() -> None:
    ways = {
        way: tiered.plan(
            SMALL, workload=Workload(8, 64), machine=RATES, update="on_fetch", activations=way, dram="8MiB"
        ).chosen
        for way in ("memory", "recompute")
    }
    kept, again = ways["memory"], ways["recompute"]
    assert kept is not None
    assert again is not None
    assert again.memory.activations < kept.memory.activations
    assert again.processor > kept.processor


def test_other_budgets_and_ranks() -> None:
    machine = {**RATES, "network": 1e7, "latency": 1e-3}
    found = tiered.plan(
        SMALL, machine=machine, update="on_fetch", activations="memory", sweep=Sweep(["1MiB", 4 << 20], [1, 2, 1024]), **ASKED
    )
    assert [one.choice.dram for one in found.curve] == [1 << 20, 4 << 20]
    assert found.curve[0].read + found.curve[0].written > found.curve[1].read + found.curve[1].written == 0
    one, two, many = found.ranks
    assert one.sent == 0
    assert one.seconds <= two.seconds < many.seconds
    nbytes = 4 * SMALL.parameters
    assert 2.5 * nbytes / 2 < two.sent < 4.5 * nbytes / 2  # gathered in forward and in backward, and reduced once
    assert many.network > 1023 * 1e-3
    assert found.stops_paying == 1, "a network of 10 MB/s"


def test_what_is_done_of_a_plan_never_becomes_less() -> None:
    told: list[tuple[str, float]] = []
    asked: dict[str, Any] = ASKED | {"machine": {**RATES, "read": 1e8}, "sweep": Sweep(ranks=[1, 2])}
    tiered.plan(SMALL, **asked, progress=lambda *one: told.append(one))
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert [int(said.partition("number ")[2].partition(":")[0]) for said, _ in told] == list(range(1, len(told) + 1))
    assert [said.rpartition(": ")[2] for said, _ in told][-2:] == ["1 rank", "2 ranks"]


def test_ranks_of_one_node_exchange_through_its_memory_and_those_of_several_over_the_network() -> None:
    machine: dict[str, Any] = {**RATES, "latency": 1e-3, "memory": 1e10}
    for ranks, per_node, seconds in (
        (2, 2, 2 * 1e9 / 2 * 2 / 1e10),  # both send half, and each byte is read and written
        (4, 8, 2 * 1e9 * 3 / 4 * 4 / 1e10),
        (2, 1, 1e-3 + 1e9 / 2 / 1e8),
        (4, 2, 3e-3 + 1e9 * 3 / 4 * 2 / 1e8),  # two ranks share the network of their node
    ):
        timing = Timing(Machine.of({**machine, "network": 1e8, "ranks_per_node": per_node}), ranks=ranks)
        assert timing.network(1_000_000_000) == pytest.approx(seconds)


def test_a_budget_that_does_not_work_is_said() -> None:
    found = tiered.plan(SMALL, update="on_fetch", activations="memory", sweep=Sweep(["1KiB", "1MiB"]), **ASKED)
    assert [one.choice.dram for one in found.curve] == [1 << 20]
    assert [one for one in found.notes if "1.0 KiB is left out" in one and "1.0 MiB" in one]


def test_a_plan_says_whether_the_drive_hides_activations() -> None:
    """On a drive that takes no time, and on one that takes longer than computing."""
    asked: dict[str, Any] = {"update": "on_fetch", "activations": "store", "dram": "4MiB", "workload": Workload(8, 64)}
    machine = {**RATES, "lease": 0, "transfer": 0, "flops": 1e9}
    fast, slow = (tiered.plan(SMALL, machine={**machine, "read": rate, "write": rate}, **asked).chosen for rate in (1e12, 1e6))
    assert fast is not None
    assert slow is not None
    assert fast.offloading is not None
    assert slow.offloading is not None
    assert fast.offloading.stored == slow.offloading.stored > 0
    assert fast.hides_activations is True
    assert slow.hides_activations is False
    assert slow.offloading.waited > fast.offloading.waited
    memory = tiered.plan(SMALL, machine=RATES, **{**asked, "activations": "memory"}).chosen
    assert memory is not None
    assert memory.hides_activations is None
    assert fast.memory.activations < memory.memory.activations


def test_the_fastest_number_of_parts_that_fits_is_chosen() -> None:
    asked: dict[str, Any] = {"update": "on_fetch", "dram": "4MiB", "workload": Workload(8, 64), "machine": RATES}
    found = tiered.plan(ONE, micro_batch=[4, 1], **asked)
    assert found.chosen is not None
    assert found.chosen.choice.micro_batch == 1, "nothing is computed twice"
    divided = [one for one in found.others if one.choice.micro_batch == 4]
    assert len(divided) == 1
    assert divided[0].memory.activations < found.chosen.memory.activations
    room = (divided[0].memory.process + found.chosen.memory.process) // 2
    less = tiered.plan(ONE, micro_batch=[1, 4], activations="memory", **{**asked, "machine": {**RATES, "dram": STAYS + room}})
    assert less.fits
    assert less.chosen is not None
    assert less.chosen.choice.micro_batch == 4


def test_what_is_enough_does_not_depend_on_the_budget_that_was_named() -> None:
    asked: dict[str, Any] = {"update": "on_fetch", "activations": "memory", "workload": Workload(2, 32)}
    assert len({tiered.plan(SMALL, dram=dram, **asked).enough for dram in ("2MiB", "3MiB", "16MiB")}) == 1


def test_attention_keeps_no_scores() -> None:
    """As on the CPU: what a step keeps grows with the length of a sequence, and not with its square."""
    once, twice = (saved(trained(subject_of(SMALL, Workload(sequence=length)))) for length in (64, 128))
    assert twice == pytest.approx(2 * once, rel=0.1)


def test_live_bytes_are_those_of_tensors_that_are_alive() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
    found = trained(subject_of(model, Workload(inputs=torch.zeros(4, 8), loss=lambda out, _: out.sum())))
    after_relu, output, loss = 4 * 16 * 4, 4 * 8 * 4, 4
    assert saved(found) == after_relu + loss  # the output is gone: a sum keeps its shape
    assert found.peak >= saved(found) + output
    assert found.flops == 2 * 4 * (8 * 16 + 16 * 8) + 2 * 4 * 8 * 16 * 3  # backward: no gradient of the input


def test_operations_are_timed_by_shape() -> None:
    step, machine = trained(subject_of(SMALL, Workload(sequence=16))), Machine.of(RATES)
    found = measure_operations(step, machine, seconds=2.0)
    assert found
    assert all(seconds > 0 for seconds in found.values())
    slow = dict.fromkeys(found, 1.0)
    assert sum(Timing(machine, slow).compute(step)) > len(found) > sum(Timing(machine).compute(step))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"optimizer": "muon"}, "adamw"),
        ({"update": "later"}, "on_fetch"),
        ({"machine": {"read": 1e9}}, "write="),
        ({"machine": {"read": 1e9, "write": 1e9, "speed": 1}}, "has no speed"),
        ({"machine": {"read": 1e9, "write": 0}}, "above 0"),
        ({"machine": "/nowhere/machine.json"}, "tiered info --machine"),
        ({"workload": Workload(accumulate=2), "update": "in_backward"}, "on_fetch"),
        ({"sweep": Sweep(ranks=[2])}, "need machine="),
        ({"workload": 2}, "workload is a tiered.Workload"),
        ({"sweep": [2]}, "sweep is a tiered.Sweep"),
        ({"measure": "no"}, "measure is True or False, not 'no'"),
        ({"optimum": 1}, "optimum is True or False, not 1"),
        ({"micro_batch": 0}, "number of parts"),
        ({"micro_batch": []}, "number of parts"),
        ({"micro_batch": 2, "activations": "store"}, "leave one of them out"),
        ({"machine": {**RATES, "lease": -1}}, "lease is a number from 0 on"),
        ({"machine": {**RATES, "latency": float("nan")}}, "latency is a number from 0 on"),
        ({"machine": {**RATES, "read": float("inf")}}, "above 0"),
        ({"machine": {**RATES, "cores": 2.5}}, "cores is a count, a whole number"),
        ({"machine": {**RATES, "name": 5}}, "text"),
    ],
)
def test_what_cannot_be_planned(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(MisuseError, match=told):
        tiered.plan(SMALL, **{**ASKED, **asked})


@pytest.mark.parametrize(
    ("kind", "asked", "told"),
    [
        (Workload, {"batch": 0}, "batch is a number of sequences, a whole number from 1 on, not 0"),
        (Workload, {"sequence": 1.5}, "sequence is a number of tokens, a whole number"),
        (Workload, {"loss": 5}, "loss is called with the output and the target, and 5 cannot be"),
        (Workload, {"accumulate": 1.5}, "accumulate is how many forwards and backwards a step has, a whole number"),
        (Sweep, {"ranks": [2, 0]}, "from 1 on, not 0"),
        (Sweep, {"ranks": 2}, "ranks are several, each a number of ranks"),
        (Sweep, {"budgets": ["much"]}, "not a size"),
        (Sweep, {"budgets": "1MiB"}, "budgets are several"),
    ],
)
def test_values_that_cannot_be(kind: type, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(MisuseError, match=told):
        kind(**asked)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch, as it compiles
def test_a_plan_is_the_same_wherever_it_is_made() -> None:
    """Whatever is recorded there, and for a compiled model, which is not compiled for it."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    asked: dict[str, Any] = {"workload": Workload(inputs=torch.zeros(4, 64)), "dram": "1MiB", "update": "on_fetch"}
    expected = tiered.plan(model, **asked)
    assert expected.chosen is not None
    with torch.no_grad():
        assert tiered.plan(model, **asked).chosen == expected.chosen
    with torch.inference_mode():
        assert tiered.plan(model, **asked).chosen == expected.chosen
    model[1] = torch.compile(model[1])
    assert tiered.plan(model, **asked).chosen == expected.chosen
    assert tiered.plan(torch.compile(model), **asked).chosen == expected.chosen


def test_models_that_cannot_be_planned(tmp_path: Path) -> None:
    class ByValue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum().item() > 0 else x

    with pytest.raises(MisuseError, match=r"meta device, .* with float32 of shape \(1, 4\): .*Workload\(inputs="):
        tiered.plan(ByValue(), workload=Workload(inputs=torch.zeros(1, 4)), dram="1MiB")
    with pytest.raises(MisuseError, match=r"with int64 of shape \(2, 32\): .*Workload\(inputs="):  # the tokens of a usual plan
        tiered.plan(nn.Linear(4, 4), **ASKED)
    with pytest.raises(MisuseError, match=r"with int64 of shape \(2, 32\): .*missing 1 required .*Workload\(inputs="):
        tiered.plan(nn.Bilinear(4, 4, 4), **ASKED)
    for model in (nn.Linear(4, 4).requires_grad_(False), nn.ReLU()):
        with pytest.raises(MisuseError, match="has no parameter that is trained"):
            tiered.plan(model, workload=Workload(inputs=torch.zeros(1, 4)), dram="1MiB")
    with pytest.raises(MisuseError, match=r"'weight' has no shape yet, .* call the model once, then plan"):
        tiered.plan(nn.LazyLinear(4), workload=Workload(inputs=torch.zeros(1, 4)), dram="1MiB")
    with pytest.raises(MisuseError, match="returns is a tensor, not None"):
        tiered.plan(nn.Linear(4, 4), workload=Workload(inputs=torch.zeros(1, 4), loss=lambda *_: None), dram="1MiB")  # type: ignore[arg-type, return-value]
    with pytest.raises(MisuseError, match=r"config\.json"):
        tiered.plan(tmp_path)
    with pytest.raises(MisuseError, match="heads"):
        Numbers(1, 10, 3, 256)
    for numbers in ({"inner": 0}, {"kv_heads": 0}, {"layers": 1.5}, {"vocabulary": "10"}, {"dtype": "int64"}):
        with pytest.raises(MisuseError, match=next(iter(numbers)).replace("dtype", "the dtype of parameters is")):
            tiered.plan({"layers": 1, "width": 8, "heads": 2, "vocabulary": 8, **numbers}, **ASKED)
    with TieredStore.open(tmp_path / "store", dram="1MiB", durability="none") as store:
        paged = zero.page(nn.Linear(4, 4), store)
        with pytest.raises(MisuseError, match="paged already"):
            tiered.plan(paged, workload=Workload(inputs=torch.zeros(1, 4)))


def test_a_machine_is_kept_as_a_file(tmp_path: Path) -> None:
    machine = Machine(read=1e9, write=2e9, name="here")
    machine.save(tmp_path / "machine.json")
    assert Machine.of(tmp_path / "machine.json") == machine
    whole = (tmp_path / "machine.json").read_text()
    for text, says in (
        ("{}", "has read= and write= at least"),
        ('{"read": 3.5, "write": "3GB"}', "read=3.5 is in bytes a second, .* did you mean '3.5GB'"),
        ('{"tiered": "report", "read": 1, "write": 1}', "is no machine: .* or write one by hand"),
        ("[" * 100_000, "not JSON"),
        (whole.replace("1000000000.0", "9" * 400), "an integer of 1,329 bits"),
        (whole.replace("1000000000.0", "1e999"), "read is a rate above 0"),
        (whole.replace("1000000000.0", '"' + "9" * 5000 + '"'), "read is a rate above 0"),
        ('{"read": "7 GB/s", "write": "3GB"}', "a machine's read is a rate above 0, in bytes a second, not '7 GB/s'; .* '7GB'"),
        ('{"read": 0, "write": "3GB"}', "a machine's read is a rate above 0, in bytes a second, not 0"),
        ('{"read": 1e9, "write": 1e9, "flops": "400GFLOPS"}', "flops is a rate .*, in operations a second, not '400GFLOPS'"),
        ('{"read": 1e9, "write": 1e9, "lease": "fast"}', "lease is a number from 0 on, in seconds, not 'fast'; write a number"),
        ('{"read": 1e9, "write": 1e9, "cores": "two"}', "cores is a count, a whole number, not 'two'"),
        ('{"read": 1e9, "write": 1e9, "drma": "8GiB"}', r"a machine has no drma; did you mean 'dram'\?$"),
        (whole.replace('"here"', '"\\ud800"'), "not Unicode"),
        (whole.replace('"name"', '"\\u001b[2J"'), r"has no \\x1b\[2J"),
    ):
        (tmp_path / "machine.json").write_text(text)
        with pytest.raises(MisuseError, match=says) as refused:
            Machine.of(tmp_path / "machine.json")
        assert "machine.json" in str(refused.value)
        assert str(refused.value).isprintable()
    for what in (None, 3, b"machine.json", "a\0b", tmp_path):
        with pytest.raises(MisuseError):
            Machine.of(what)  # type: ignore[arg-type]


def test_a_model_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert tiered.plan(model, workload=Workload(inputs=torch.zeros(1, 4)), dram="1MiB").parameters == 24
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model[0].weight.grad is None
    assert not model[0]._forward_hooks


@pytest.mark.parametrize("update", ["on_fetch", "in_backward"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_update_once_gradients_are_reduced(ranks: int, update: Update) -> None:
    rule = AdamWRule(1e-3, (0.9, 0.999), 1e-8, 0.01, False)
    planner = Planner(subject_of(SMALL, Workload(sequence=8)), None, rule, Policy(), 1)
    sizes, step = sizes_of(planner.divided(2 << 20, ranks), "model", rule), planner.step(Choice(update, dram=2 << 20), ranks)
    there, updated = set(step.initial), set[str]()
    for one in step.operations:
        if isinstance(one, CreateNote):
            there.add(one.key)
        elif isinstance(one, DeleteNote):
            there.remove(one.key)
        elif isinstance(one, LeaseNote):
            assert there.issuperset(one.keys)
            updated.update(key for key in one.keys if key.endswith("/grad"))
    assert there == set(step.initial), "the next step is the same"
    assert updated == {f"{unit.key}/grad" for unit in sizes if unit.gradient}


@pytest.mark.parametrize("family", quick(["Llama", "GPT2"], ["Llama"]))
def test_a_folder_of_transformers(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 256, "bos_token_id": 1}
    more = {"intermediate_size": 128} if family == "Llama" else {"n_positions": 64}
    config = getattr(transformers, f"{family}Config")(**sizes, **more, eos_token_id=2)
    config.save_pretrained(tmp_path)
    model = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
    before = transformers.masking_utils.find_packed_sequence_indices
    ways = ("memory", "recompute", "store")
    for what, asked in (tmp_path, {}), (model, {"activations": "recompute"}):  # the model itself is on the CPU
        found = tiered.plan(what, update="on_fetch", machine=RATES, **asked, **ASKED)
        assert found.chosen is not None
        assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert {one.choice.activations for one in (found.chosen, *found.others)} == {*(asked.values() or ways)}
    assert transformers.masking_utils.find_packed_sequence_indices is before
