"""Several tiers on one bucket, the index, and objects that change behind a tier's back."""

from __future__ import annotations

import random
import time

import pytest

from flexkv_core import Status, TierContext, TierUnavailableError
from flexkv_driver_s3.index import KeyIndex
from flexkv_driver_s3.journal import encode
from flexkv_driver_s3.names import names_of
from flexkv_driver_s3.tier import S3Tier
from tests.support.s3_stub import BUCKET, refuse
from tests.support.s3_values import statuses, values


def load_one(tier, key, num_bytes=1 << 20):
    into = memoryview(bytearray(num_bytes))
    (outcome,) = tier.load([key], [into])
    return outcome, into


def test_lookups_ask_nobody(stub, open_tier):
    keys, data = values(64, 2000)
    open_tier().store(keys, data)
    tier = open_tier(index_ttl_s=60)
    before = len(stub.requests)
    for _ in range(16):
        assert statuses(tier.lookup(keys)) == [Status.OK] * 64
    assert [row.num_bytes for row in tier.lookup(keys)] == [2000] * 64
    assert len(stub.requests) == before


def test_what_one_stores_the_other_finds_by_one_listing_and_no_head(stub, open_tier):
    first, second = open_tier(), open_tier()
    keys, data = values(20, 2000)
    first.store(keys, data)
    before = len(stub.requests)
    assert statuses(second.lookup(keys)) == [Status.OK] * 20
    asked = [path.partition("?")[2][:40] or path for _, path in stub.requests[before:]]
    assert len(asked) == 2, f"one listing and one journal entry, not {asked}"
    for key, value in zip(keys, data, strict=True):
        outcome, into = load_one(second, key)
        assert outcome.is_ok
        assert into[: outcome.num_bytes] == value


def test_news_come_no_sooner_than_their_time(stub, open_tier):
    first, second = open_tier(), open_tier(index_ttl_s=3600)
    keys, data = values(2, 2000)
    first.store(keys, data)
    assert statuses(second.lookup(keys)) == [Status.MISS] * 2
    outcome, _ = load_one(second, keys[0])
    assert outcome.is_ok, "a load asks the store, whatever the index knows"
    assert statuses(second.lookup(keys)) == [Status.OK, Status.MISS]


def test_without_journals_the_next_listing_finds_it(stub, open_tier):
    first = open_tier(journal=False)
    second = open_tier(journal=False, relist_every_s=1e-9)
    keys, data = values(3, 2000)
    first.store(keys, data)
    assert not [name for name in stub.objects if "/journal/" in name]
    assert statuses(second.lookup(keys)) == [Status.OK] * 3


def test_a_removed_block_is_told_and_a_stale_hit_is_a_miss(stub, open_tier):
    first, second, deaf = open_tier(), open_tier(), open_tier(index_ttl_s=3600)
    keys, data = values(3, 2000)
    first.store(keys, data)
    assert statuses(second.lookup(keys)) == [Status.OK] * 3
    load_one(deaf, keys[0])
    assert statuses(first.evict(keys)) == [Status.OK] * 3
    assert statuses(second.lookup(keys)) == [Status.MISS] * 3
    assert statuses(deaf.lookup(keys[:1])) == [Status.OK], "not told yet"
    assert load_one(deaf, keys[0])[0].status is Status.MISS
    assert statuses(deaf.lookup(keys[:1])) == [Status.MISS]


def test_stored_again_after_it_was_removed(open_tier):
    first, second = open_tier(), open_tier()
    keys, data = values(1, 2000)
    first.store(keys, data)
    first.evict(keys)
    second.store(keys, data)
    assert statuses(first.lookup(keys)) == [Status.OK]
    assert statuses(second.lookup(keys)) == [Status.OK], "an old removal does not hide what came later"


def test_a_miss_that_comes_late_does_not_hide_what_was_stored_meanwhile(stub, open_tier):
    tier = open_tier()
    keys, data = values(1, 2000)

    def stored_meanwhile(handler):
        tier.store(keys, data)
        refuse(404, "NoSuchKey")(handler)

    stub.treat("GET", "/blocks/", stored_meanwhile, times=1)
    assert load_one(tier, keys[0])[0].status is Status.MISS
    assert statuses(tier.lookup(keys)) == [Status.OK]


def test_news_of_a_writer_whose_clock_is_ahead_do_not_outlive_a_miss(stub, open_tier):
    tier, names = open_tier(), names_of("flexkv", bytes(16), 2)
    (key,), _ = values(1, 2000)
    ahead = f"{int((time.time() + 20) * 1000):014d}"
    stub.objects[f"{names.journal}{ahead}-other-1"] = encode([(key, 2000)])
    assert statuses(tier.lookup([key])) == [Status.OK], "so it was told"
    assert load_one(tier, key)[0].status is Status.MISS
    assert statuses(tier.lookup([key])) == [Status.MISS]


def test_objects_removed_by_a_lifecycle_rule_leave_the_index_with_the_next_listing(stub, open_tier):
    tier = open_tier(relist_every_s=1e-9)
    keys, data = values(5, 2000)
    tier.store(keys, data)
    for name in [name for name in stub.objects if keys[2].hex() in name]:
        del stub.objects[name]
    assert statuses(tier.lookup(keys)) == [Status.OK] * 2 + [Status.MISS] + [Status.OK] * 2
    assert tier.usage().num_blocks == 4
    assert tier.usage().used_bytes == 4 * 2000


def test_long_listing_goes_on_in_steps(stub, open_tier):
    names = names_of("flexkv", bytes(16), 2)
    chance = random.Random(3)
    keys = [chance.randbytes(32) for _ in range(2500)]
    stub.objects.update({names.block(key): b"x" for key in keys})
    stub.objects[names.blocks + "zz/stranger"] = b"not ours"
    tier = open_tier(list_timeout_s=0, list_step_s=0, journal=False, index_ttl_s=3600)
    assert tier.usage().num_blocks == 1000, "one page, then the time was over"
    tier.lookup([])
    assert tier.usage().num_blocks == 2000
    tier.lookup([])
    assert tier.usage().num_blocks == 2500
    before = len(stub.requests)
    found = [row for at in range(0, 2500, 64) for row in tier.lookup(keys[at : at + 64])]
    assert {row.status for row in found} == {Status.OK}
    assert len(stub.requests) == before


@pytest.mark.parametrize("first", ["lookup", "load", "store"])
def test_store_that_is_down_does_not_look_healthy_for_what_is_remembered(stub, open_tier, first):
    tier = open_tier(index_ttl_s=0 if first == "lookup" else 3600)
    keys, data = values(2, 2000)
    tier.store(keys, data)
    for method in ("GET", "PUT"):
        stub.treat(method, "/", lambda handler: (handler.body(), handler.refuse(503, "SlowDown")))
    calls = {
        "lookup": lambda: tier.lookup(keys),
        "load": lambda: load_one(tier, keys[0]),
        "store": lambda: tier.store(keys, data),
    }
    with pytest.raises(TierUnavailableError):
        calls[first]()
    for _ in range(3):
        with pytest.raises(TierUnavailableError):
            tier.lookup(keys)
    stub.behave()
    assert statuses(tier.lookup(keys)) == [Status.OK] * 2, "and nothing was forgotten"
    before = len(stub.requests)
    if first != "lookup":
        tier.lookup(keys)
        assert len(stub.requests) == before


def test_truncated_and_replaced_objects_are_handed_on_as_they_are(stub, open_tier):
    tier = open_tier()
    keys, data = values(2, 2000)
    tier.store(keys, data)
    places = {key: next(name for name in stub.objects if key.hex() in name) for key in keys}
    stub.objects[places[keys[0]]] = bytes(data[0][:700])
    stub.objects[places[keys[1]]] = b"\x80\x04cos\nsystem\n."
    outcome, into = load_one(tier, keys[0])
    assert (outcome.status, outcome.num_bytes) == (Status.OK, 700)
    assert into[:700] == data[0][:700]
    assert load_one(tier, keys[1])[0].num_bytes == 14, "the core's header check is what rejects it"


def test_layouts_prefixes_and_shards_are_kept_apart(stub, open_tier):
    keys, data = values(1, 2000)
    tier = open_tier(prefix="/a//b/")
    tier.store(keys, data)
    (name,) = [name for name in stub.objects if "/blocks/" in name]
    assert name == f"a/b/{bytes(16).hex()}/blocks/{keys[0].hex()[:2]}/{keys[0].hex()}"
    assert statuses(open_tier(prefix="a").lookup(keys)) == [Status.MISS]
    assert load_one(open_tier(prefix="a"), keys[0])[0].status is Status.MISS
    other = TierContext(name="other", value_bytes=1 << 20, head_bytes=64, fingerprint=bytes([7]) * 16)
    with S3Tier(tier._config, other) as foreign:
        assert statuses(foreign.lookup(keys)) == [Status.MISS]
        assert load_one(foreign, keys[0])[0].status is Status.MISS
    unsharded = open_tier(prefix="", shard_chars=0)
    unsharded.store(keys, data)
    assert f"{bytes(16).hex()}/blocks/{keys[0].hex()}" in stub.objects
    assert stub.count("GET", f"/{BUCKET}/") == stub.count("GET"), "path style at an own endpoint"


def test_namespace_is_kept_for_people(stub, open_tier):
    open_tier()
    assert [value for name, value in stub.objects.items() if "/namespaces/" in name] == [b'{"model": "m"}']
    assert not [name for name in stub.objects if "/probe/" in name]


def test_damaged_and_abandoned_journal_entries(stub, open_tier):
    tier = open_tier()
    now = int(time.time() * 1000)
    root = f"flexkv/{bytes(16).hex()}/journal"
    stub.objects[f"{root}/{now:014d}-stranger-1"] = b"cos\nsystem\n(S'x'\ntR."
    stub.objects[f"{root}/{now:014d}-stranger-2"] = b"FLEXKVJ\x01" + bytes(41)
    stub.objects[f"{root}/{now:014d}-stranger-3"] = bytes(1 << 20)
    stub.objects[f"{root}/00000000000001-dead-1"] = b"FLEXKVJ\x01"
    assert statuses(tier.lookup([bytes(32)])) == [Status.MISS]
    open_tier()
    assert f"{root}/00000000000001-dead-1" not in stub.objects, "whoever starts removes what the dead left"
    assert f"{root}/{now:014d}-stranger-1" in stub.objects


def test_what_was_stored_before_the_clock_was_set_back_is_missed_all_the_same():
    index = KeyIndex()
    index.add([(bytes(32), 10)], time.time() + 3600)
    index.discard_older([bytes(32)], time.time())
    assert index.lengths([bytes(32)]) == [None]
