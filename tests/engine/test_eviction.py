from __future__ import annotations

import pytest

from tests.contracts.eviction import Copied, EvictionContract, NewPolicy
from tiered.engine.policy import LRU


class TestLRU(EvictionContract):
    @pytest.fixture
    def new_policy(self) -> NewPolicy:
        return LRU


def among(*keys: str, dirty: str = "") -> dict[str, Copied]:
    return {key: Copied(dirty=key in dirty) for key in keys}


def test_oldest_first() -> None:
    policy = LRU()
    for key in "abcab":
        policy.touched(key)
    assert list(policy.victims(among("a", "b", "c"))) == ["c", "a", "b"]
    assert next(policy.victims(among("b", "a", "c"))) == "c"


def test_only_candidates_count() -> None:
    policy = LRU()
    for key in "abc":
        policy.touched(key)
    assert list(policy.victims(among("c", "b"))) == ["b", "c"]


def test_clean_before_dirty() -> None:
    policy = LRU()
    for key in "abcd":
        policy.touched(key)
    assert list(policy.victims(among("a", "b", "c", "d", dirty="ac"))) == ["b", "d", "a", "c"]


def test_never_touched_is_last_and_forgotten_is_never_touched() -> None:
    policy = LRU()
    for key in "abc":
        policy.touched(key)
    policy.forgotten("b")
    assert list(policy.victims(among("a", "b", "c", "x"))) == ["a", "c", "b", "x"]
    policy.touched("b")
    assert list(policy.victims(among("a", "b", "c"))) == ["a", "c", "b"]
