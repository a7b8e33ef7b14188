from __future__ import annotations

import pytest

from tests.contracts.eviction import EvictionContract, NewPolicy
from tiered.eviction import LRU
from tiered.types import Candidate


class TestLRU(EvictionContract):
    @pytest.fixture
    def new_policy(self) -> NewPolicy:
        return LRU


def among(*keys: str) -> list[Candidate]:
    return [Candidate(key, 10) for key in keys]


def test_oldest_first() -> None:
    policy = LRU()
    for key in "abcab":
        policy.touched(key)
    assert policy.victims(30, among("a", "b", "c")) == ["c", "a", "b"]
    assert policy.victims(11, among("b", "a", "c")) == ["c", "a"]


def test_only_candidates_count() -> None:
    policy = LRU()
    for key in "abc":
        policy.touched(key)
    assert policy.victims(20, among("c", "b")) == ["b", "c"]
    assert policy.victims(30, among("c", "b")) is None


def test_never_touched_is_oldest_and_forgotten_is_never_touched() -> None:
    policy = LRU()
    for key in "abc":
        policy.touched(key)
    policy.forgotten("c")
    assert policy.victims(40, among("a", "b", "c", "x")) == ["c", "x", "a", "b"]
    policy.touched("c")
    assert policy.victims(30, among("a", "b", "c")) == ["a", "b", "c"]
