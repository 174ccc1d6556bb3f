"""Discovery's parts that need no distributions of their own; the rest is in packaging/test_discovery.py."""

from __future__ import annotations

import pytest

from flexkv_core import hookimpl
from flexkv_core.drivers import Observers, find_driver, installed_drivers


class Watcher:
    """Takes every argument of every hook."""

    def __init__(self):
        self.told = []

    @hookimpl
    def flexkv_blocks_stored(self, tier, keys, num_bytes):
        self.told.append(("stored", tier, keys, num_bytes))

    @hookimpl
    def flexkv_blocks_loaded(self, tier, keys, num_bytes):
        self.told.append(("loaded", tier, keys, num_bytes))

    @hookimpl
    def flexkv_blocks_evicted(self, keys, tier):
        self.told.append(("evicted", tier, keys))

    @hookimpl
    def flexkv_tier_state_changed(self, tier, state, reason):
        self.told.append(("state", tier, state, reason))


def test_observers_are_told_everything_in_any_order_of_arguments():
    watcher = Watcher()
    observers = Observers([watcher])
    observers.stored("host", [b"k"], 10)
    observers.loaded("disk", [b"k"], 10)
    observers.evicted("host", [b"k"])
    observers.state_changed("disk", "down", "gone")
    assert watcher.told == [
        ("stored", "host", [b"k"], 10),
        ("loaded", "disk", [b"k"], 10),
        ("evicted", "host", [b"k"]),
        ("state", "disk", "down", "gone"),
    ]


def test_no_observers_cost_nothing():
    observers = Observers()
    observers.stored("host", [], 0)
    observers.state_changed("host", "up", "")


def test_wrong_argument_of_an_observer_is_refused():
    class Wrong:
        @hookimpl
        def flexkv_blocks_stored(self, tiers):
            raise AssertionError("never called")

    with pytest.raises(Exception, match="tiers"):
        Observers([Wrong()])


def test_our_drivers_come_from_this_distribution():
    installed = installed_drivers()
    assert list(installed) == sorted(installed)
    for name in ("cpu", "ssd"):
        spec, offer = find_driver(name)
        assert offer.provider.startswith("flexkv-core ")
        assert spec.name == name
        assert spec.config.model_config.get("extra") == "forbid", "unknown options must be told"
        for field, info in spec.config.model_fields.items():
            assert info.description, f"{name}.{field} is not explained"
