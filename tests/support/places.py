"""What must be true of a tier's places, whatever was done to them."""

from __future__ import annotations

from flexkv_core.index.places import TierPlaces


def check_places(places: TierPlaces) -> None:
    """Keys, places and followers agree; whatever may leave is queued; counts are right."""
    by_key, heads = places._by_key, places._heads
    all_places = {id(place): place for place in by_key.values()}.values()
    assert sum(len(place.keys) for place in all_places) == len(by_key)
    num_pins = num_bytes = 0
    for place in all_places:
        assert all(by_key[key] is place for key in place.keys)
        assert not any(key in heads for key in place.keys[:-1])
        assert (place.tokens(0), place.keys[0]) in heads[place.parent]
        assert place.num_tokens == place.tokens_each * len(place.keys)
        free_to_go = place.is_ready and place.keys[-1] not in heads and place.num_unpinned > 0
        assert not free_to_go or place.is_queued
        assert all(0 <= at < len(place.keys) and count > 0 for at, count in place.pins.items())
        num_pins += sum(place.pins.values())
        num_bytes += place.num_bytes * len(place.keys)
    for parent, below in heads.items():
        assert below == sorted(below)
        assert below
        assert all(by_key[key].parent == parent and by_key[key].keys[0] == key for _, key in below)
    assert sum(map(len, heads.values())) == len(all_places)
    assert (num_pins, num_bytes) == (places.num_pins, places.num_bytes)
