"""Values against a real server: what is written, how it expires, and what others left there."""

from __future__ import annotations

import itertools

from flexkv_core import BufferState, Status
from flexkv_driver_remote_redis import servers
from tests.support.redis_server import Proxy, buffer, key, name, value
from tests.support.waiting import wait_until


def test_a_value_is_the_bytes_under_prefix_and_hex_key(server, open_tier):
    tier = open_tier(server.unix_url)
    assert tier.store([key(1)], [value(1)])[0].is_ok
    assert server.ask("GET", name(1)) == value(1)
    assert server.ask("TTL", name(1)) == -1
    other = open_tier(server.unix_url, prefix="other:")
    assert other.lookup([key(1)])[0].status is Status.MISS


def test_batches_of_all_lengths(server, open_tier):
    tier = open_tier(server.unix_url)
    for count, num_bytes in itertools.product([1, 2, 3, 17, 128], [1, 63, 64, 65, 4096, 70_000]):
        keys = [key(i) for i in range(count)]
        values = [value(i, num_bytes + i) for i in range(count)]
        assert [o.num_bytes for o in tier.store(keys, values)] == [len(v) for v in values]
        assert [o.num_bytes for o in tier.lookup(keys)] == [len(v) for v in values]
        into = [buffer(num_bytes + count) for _ in keys]
        for outcome, got, wanted in zip(tier.load(keys, into), into, values, strict=True):
            assert outcome.num_bytes == len(wanted)
            assert got[: len(wanted)] == wanted
            assert set(got[len(wanted) :]) <= {0xA5}, "nothing is written behind the value"


def test_a_thousand_keys_in_one_round_trip(server, open_tier):
    with Proxy(server.path) as proxy:
        tier = open_tier(proxy.url)
        there = set(range(0, 1000, 3))
        for number in there:
            server.ask("SET", name(number), b"x" * (1 + number))
        assert tier.capabilities.max_lookup >= 1000
        before, asked = proxy.num_connections, proxy.num_asked
        outcomes = tier.lookup([key(number) for number in range(1000)])
        assert [o.num_bytes for o in outcomes] == [n + 1 if n in there else 0 for n in range(1000)]
        assert [o.is_ok for o in outcomes] == [n in there for n in range(1000)]
        assert proxy.num_connections == before
        assert proxy.num_asked - asked < 100, "some 90 kB: a few pieces, and not one a key"
        tier.close()


def test_lookups_leave_no_trace(server, open_tier):
    tier = open_tier(server.unix_url)
    tier.store([key(1)], [value(1, 100)])
    for _ in range(1000):
        tier.lookup([key(1), key(2)])
    assert server.ask("DBSIZE") == 1


def test_ttl_and_its_refresh(server, open_tier):
    tier = open_tier(server.unix_url, ttl_s=10_000)
    assert tier.capabilities.expires
    tier.store([key(1)], [value(1, 100)])
    assert 9_000_000 < server.ask("PTTL", name(1)) <= 10_000_000
    server.ask("PEXPIRE", name(1), 5_000_000)
    tier.load([key(1)], [buffer(100)])
    assert server.ask("PTTL", name(1)) <= 5_000_000
    fresh = open_tier(server.unix_url, ttl_s=10_000, ttl_refresh=True)
    into = buffer(100)
    assert fresh.load([key(1)], [into])[0].is_ok
    assert into == value(1, 100)
    assert 9_000_000 < server.ask("PTTL", name(1)) <= 10_000_000


def test_expired_blocks_are_misses(server, open_tier):
    tier = open_tier(server.unix_url, ttl_s=0.05)
    tier.store([key(1)], [value(1, 100)])
    wait_until(lambda: tier.lookup([key(1)])[0].status is Status.MISS, "the block expires")
    assert tier.load([key(1)], [buffer(100)])[0].status is Status.MISS


def test_a_value_longer_than_its_buffer_is_corrupt_and_costs_no_connection(server, open_tier):
    tier = open_tier(server.unix_url)
    server.ask("SET", name(0), bytes(value(0, 5 << 20)))
    tier.store([key(1)], [value(1)])
    made = server.ask("INFO", "stats")["total_connections_received"]
    into = [buffer(), buffer(), buffer(0)]
    server.ask("SET", name(2), b"no room at all")
    long, good, none = tier.load([key(0), key(1), key(2)], into)
    assert long.status is Status.CORRUPT
    assert long.buffer is BufferState.UNCERTAIN
    assert str(5 << 20) in long.reason
    assert good.is_ok
    assert into[1] == value(1)
    assert none.status is Status.CORRUPT
    asked = 2  # by this test
    assert server.ask("INFO", "stats")["total_connections_received"] - made == asked


def test_what_is_no_value_is_corrupt_or_a_miss(server, open_tier):
    tier = open_tier(server.unix_url)
    server.ask("LPUSH", name(0), b"a list")
    server.ask("SET", name(1), b"")
    keys = [key(0), key(1), key(2)]
    tier.store([key(2)], [value(2)])
    assert [o.status for o in tier.lookup(keys)] == [Status.CORRUPT, Status.MISS, Status.OK]
    into = [buffer() for _ in keys]
    loads = tier.load(keys, into)
    assert [o.status for o in loads] == [Status.CORRUPT, Status.OK, Status.OK]
    assert loads[1].num_bytes == 0, "the core finds no header in it"
    assert into[2] == value(2)
    assert tier.store([key(0)], [value(0)])[0].is_ok, "a foreign value is replaced"
    assert tier.load([key(0)], into[:1])[0].is_ok


def test_a_value_over_the_limit_is_refused_alone(server, open_tier):
    tier = open_tier(server.unix_url, max_value=VALUE, value_bytes=VALUE)
    outcomes = tier.store([key(0), key(1), key(2)], [value(0, VALUE), value(1, VALUE + 1), value(2, 5)])
    assert [o.status for o in outcomes] == [Status.OK, Status.INVALID, Status.OK]
    assert server.ask("DBSIZE") == 2


VALUE = 64 << 10


def test_two_instances_share(server, open_tier):
    one, two = open_tier(server.unix_url), open_tier(server.unix_url)
    one.store([key(1)], [value(1)])
    into = buffer()
    assert two.load([key(1)], [into])[0].is_ok
    assert into == value(1)
    assert two.evict([key(1)])[0].is_ok
    assert one.lookup([key(1)])[0].status is Status.MISS


def test_a_library_that_shows_no_socket_is_gone_through(server, open_tier, monkeypatch, caplog):
    monkeypatch.setattr(servers, "_socket_of", lambda connection: None)
    tier = open_tier(server.unix_url, ttl_s=100, ttl_refresh=True)
    assert caplog.text.count("shows no socket") == 1
    keys, values = [key(i) for i in range(5)], [value(i, 10_000 + i) for i in range(5)]
    assert [o.num_bytes for o in tier.store(keys, values)] == [len(v) for v in values]
    assert [o.num_bytes for o in tier.lookup([*keys, key(9)])] == [*map(len, values), 0]
    into = [buffer(10_003) for _ in keys]
    outcomes = tier.load(keys, into)
    assert [o.status for o in outcomes] == [Status.OK] * 4 + [Status.CORRUPT]
    assert all(view[: o.num_bytes] == v for view, o, v in zip(into[:4], outcomes, values, strict=False))
    server.ask("LPUSH", name(7), b"a list")
    assert [o.status for o in tier.load([key(7), key(8)], into[:2])] == [Status.CORRUPT, Status.MISS]
    assert tier.evict([key(0)])[0].is_ok
    assert caplog.text.count("shows no socket") == 1
