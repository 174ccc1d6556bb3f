"""Connections that stay with their wires between calls are as good as fresh ones, or are not used."""

from __future__ import annotations

import socket
from contextlib import closing

from flexkv_driver_remote_redis.kept import Held, KeptWires
from flexkv_driver_remote_redis.raw_wire import RawWire
from tests.support.redis_server import Proxy, buffer, key, value


class Connection:
    """A connection, and the pool that it came from, which count what is done with them."""

    def __init__(self) -> None:
        self.num_ended = self.num_released = 0

    def disconnect(self) -> None:
        self.num_ended += 1

    def release(self, _connection: object) -> None:
        self.num_released += 1


def ends(server) -> set[str]:
    """The clients at the server, without the one that asks."""
    with closing(server.client()) as client:
        own = client.client_id()
        return {row["id"] for row in client.client_list() if int(row["id"]) != own}


def test_one_connection_serves_call_after_call(server, open_tier):
    tier = open_tier(server.unix_url)
    tier.store([key(1)], [value(1, 100)])
    before = ends(server)
    for _ in range(20):
        assert tier.load([key(1)], [buffer(100)])[0].is_ok
        assert tier.store([key(1)], [value(1, 100)])[0].is_ok
    assert ends(server) == before


def test_a_connection_that_the_server_closed_costs_no_call(server, open_tier):
    tier = open_tier(server.unix_url)
    tier.store([key(1)], [value(1, 100)])
    for _ in range(3):
        server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert tier.load([key(1)], [buffer(100)])[0].is_ok


def test_a_connection_that_was_cut_while_idle_costs_no_call(server, open_tier):
    with Proxy(server.path) as proxy:
        tier = open_tier(proxy.url)
        tier.store([key(1)], [value(1, 100)])
        proxy.cut_idle()
        assert tier.load([key(1)], [buffer(100)])[0].is_ok
        tier.close()


def test_what_nobody_asked_for_is_not_taken_for_an_answer():
    near, far = socket.socketpair()
    with near, far:
        owner = Connection()
        kept = KeptWires()
        kept.keep(Held(owner, owner, RawWire(near, 1.0)))
        far.sendall(b"+PONG\r\n")
        assert kept.take(owner) is None
        assert (owner.num_ended, owner.num_released) == (1, 1)


def test_all_that_are_idle_are_dropped_the_one_in_use_is_not():
    pairs = [socket.socketpair() for _ in range(3)]
    pool = Connection()
    owners = [Connection() for _ in pairs]
    kept = KeptWires()
    for owner, (near, _) in zip(owners, pairs, strict=True):
        kept.keep(Held(pool, owner, RawWire(near, 1.0)))
    taken = kept.take(pool)
    assert taken is not None
    assert taken.connection is owners[-1], "the last used is taken first"
    assert kept.take(Connection()) is None
    kept.drop_all()
    kept.drop_all()
    assert [owner.num_ended for owner in owners] == [1, 1, 0]
    assert pool.num_released == 2
    for near, far in pairs:
        near.close()
        far.close()
