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

    def test_of_nothing_nothing_leaves(self, new_policy: NewPolicy) -> None:
        assert list(new_policy().victims({})) == []

    def test_strangers_leave_too(self, new_policy: NewPolicy) -> None:
        assert sorted(new_policy().victims({"a": Copied(dirty=True), "b": Copied()})) == ["a", "b"]

    def test_forgetting_a_stranger_is_allowed(self, new_policy: NewPolicy) -> None:
        new_policy().forgotten("never seen")

    def test_asking_changes_nothing(self, new_policy: NewPolicy) -> None:
        policy = new_policy()
        among = {key: Copied() for key in KEYS}
        for key in KEYS:
            policy.touched(key)
        first = next(policy.victims(among))  # whoever asked needs no more
        found = list(policy.victims(among))
        assert found == list(policy.victims(among))
        assert found[0] == first

    @settings(suppress_health_check=SHARED, deadline=None)
    @given(
        history=st.lists(st.tuples(st.sampled_from(["touched", "forgotten"]), st.sampled_from(KEYS)), max_size=40),
        among=st.dictionaries(st.sampled_from(KEYS), st.builds(Copied, st.integers(1, 100), st.booleans())),
    )
    def test_each_leaves_once_in_an_order_that_its_history_says(
        self, new_policy: NewPolicy, history: list[tuple[str, str]], among: dict[str, Copied]
    ) -> None:
        policy, twin = new_policy(), new_policy()
        for event, key in history:
            getattr(policy, event)(key)
            getattr(twin, event)(key)
        found = list(policy.victims(among))
        assert sorted(found) == sorted(among)
        assert found == list(twin.victims(among)), "the same history gives the same order"
