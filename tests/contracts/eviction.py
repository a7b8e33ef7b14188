"""What every EvictionPolicy must do. Subclass ``EvictionContract`` and provide the fixture ``new_policy``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiered.interfaces import EvictionPolicy


@dataclass(frozen=True)
class Copied:
    """A candidate."""

    nbytes: int = 10
    dirty: bool = False


NewPolicy = Callable[[], EvictionPolicy]
KEYS = [f"t{i}" for i in range(8)]
# A shared test runs under several classes, and its fixture only hands out a function: each example starts afresh.
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]


class EvictionContract:
    @pytest.fixture
    def new_policy(self) -> NewPolicy:
        """A function that makes a fresh policy."""
        raise NotImplementedError

    def test_is_a_policy(self, new_policy: NewPolicy) -> None:
        assert isinstance(new_policy(), EvictionPolicy)

    def test_nothing_is_needed(self, new_policy: NewPolicy) -> None:
        assert new_policy().victims(0, {"a": Copied()}) == []
        assert new_policy().victims(0, {}) == []

    def test_too_little_is_none(self, new_policy: NewPolicy) -> None:
        assert new_policy().victims(1, {}) is None
        assert new_policy().victims(21, {"a": Copied(), "b": Copied(dirty=True)}) is None

    def test_all_of_them_when_all_are_needed(self, new_policy: NewPolicy) -> None:
        found = new_policy().victims(20, {"a": Copied(dirty=True), "b": Copied()})
        assert found is not None
        assert sorted(found) == ["a", "b"]

    def test_forgetting_a_stranger_is_allowed(self, new_policy: NewPolicy) -> None:
        new_policy().forgotten("never seen")

    def test_asking_changes_nothing(self, new_policy: NewPolicy) -> None:
        policy = new_policy()
        among = {key: Copied() for key in KEYS}
        for key in KEYS:
            policy.touched(key)
        assert policy.victims(30, among) == policy.victims(30, among)

    @settings(suppress_health_check=SHARED, deadline=None)
    @given(
        history=st.lists(st.tuples(st.sampled_from(["touched", "forgotten"]), st.sampled_from(KEYS)), max_size=40),
        among=st.dictionaries(st.sampled_from(KEYS), st.builds(Copied, st.integers(1, 100), st.booleans())),
        nbytes=st.integers(-10, 500),
    )
    def test_victims_are_enough_and_no_more(
        self, new_policy: NewPolicy, history: list[tuple[str, str]], among: dict[str, Copied], nbytes: int
    ) -> None:
        policy, twin = new_policy(), new_policy()
        for event, key in history:
            getattr(policy, event)(key)
            getattr(twin, event)(key)
        sizes = {key: copied.nbytes for key, copied in among.items()}
        found = policy.victims(nbytes, among)
        assert found == twin.victims(nbytes, among), "the same history gives the same victims"
        if sum(sizes.values()) < nbytes:
            assert found is None
            return
        assert found is not None
        assert len(set(found)) == len(found)
        assert set(found) <= set(sizes)
        assert sum(sizes[key] for key in found) >= nbytes
        assert not found or sum(sizes[key] for key in found[:-1]) < nbytes
        longer = policy.victims(nbytes + 50, among)
        assert longer is None or longer[: len(found)] == found, "victims are a prefix of one order"
