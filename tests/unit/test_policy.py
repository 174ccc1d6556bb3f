"""Eviction orders and amounts, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from flexkv_core.index.policy import eviction_amount, eviction_order
from flexkv_core.models import EvictionConfig, EvictionPolicy


@dataclass
class Place:
    name: str
    created: float
    last_used: float
    hits: int


PLACES = [Place("a", 1, 9, 5), Place("b", 2, 7, 1), Place("c", 3, 8, 0), Place("d", 4, 4, 2)]


@pytest.mark.parametrize(
    ("policy", "order"),
    [("lru", "dbca"), ("lfu", "cbda"), ("slru", "bcda"), ("fifo", "abcd"), ("mru", "acbd"), ("filo", "dcba")],
)
def test_order_of_leaving(policy, order):
    rank = eviction_order(EvictionConfig(policy=policy)).rank
    assert "".join(place.name for place in sorted(PLACES, key=rank)) == order


def test_every_policy_has_an_order():
    for policy in EvictionPolicy:
        eviction_order(EvictionConfig(policy=policy))


def test_a_hit_can_be_worth_seconds():
    rank = eviction_order(EvictionConfig(hit_reward_s=10)).rank
    assert "".join(place.name for place in sorted(PLACES, key=rank)) == "cbda"


@pytest.mark.parametrize(("threshold", "order"), [(1, "cdba"), (2, "bcda"), (5, "dbca"), (6, "dbca")])
def test_slru_protects_from_its_threshold_on(threshold, order):
    rank = eviction_order(EvictionConfig(policy="slru", slru_protected_threshold=threshold)).rank
    assert "".join(place.name for place in sorted(PLACES, key=rank)) == order


@pytest.mark.parametrize(
    ("ratio", "threshold", "used", "needed", "amount"),
    [
        (0.0, 1.0, 0, 10, 0),
        (0.0, 1.0, 8, 2, 0),
        (0.0, 1.0, 8, 3, 1),
        (0.0, 1.0, 10, 4, 4),
        (0.5, 1.0, 8, 3, 5),
        (0.5, 1.0, 8, 2, 0),
        (0.0, 0.8, 8, 1, 1),
        (0.0, 0.8, 10, 0, 2),
        (0.5, 0.8, 8, 1, 5),
        (1.0, 1.0, 6, 5, 6),
        (0.0, 1.0, 10, 25, 10),
        (0.0, 0.01, 1, 1, 1),
    ],
)
def test_how_much_goes(ratio, threshold, used, needed, amount):
    config = EvictionConfig(ratio=ratio, start_threshold=threshold)
    assert eviction_amount(config, used=used, capacity=10, needed=needed) == amount


@pytest.mark.parametrize(
    "wrong",
    [{"policy": "random"}, {"ratio": 1.5}, {"ratio": -0.1}, {"start_threshold": 0}, {"hit_reward": 1}],
)
def test_invalid_settings_are_errors(wrong):
    with pytest.raises(ValidationError):
        EvictionConfig(**wrong)
