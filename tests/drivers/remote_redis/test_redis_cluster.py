"""A real cluster of three masters: blocks by slot, slots that move, nodes that die."""

from __future__ import annotations

import shutil
import socket
import subprocess
from contextlib import ExitStack, suppress

import pytest
import redis

from flexkv_core import Status, TierTimeoutError, TierUnavailableError
from flexkv_core.testing.kit import Crew
from tests.support.redis_server import RedisServer, buffer, free_port, key, name, value
from tests.support.waiting import CHILD_S, DEADLINE_S, wait_until

NUM_KEYS = 60
KEYS = [key(i) for i in range(NUM_KEYS)]


class Cluster:
    def __init__(self, nodes):
        self.nodes = nodes
        self.url = nodes[0].url
        addresses = [f"127.0.0.1:{node.port}" for node in nodes]
        command = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
        subprocess.run(command, check=True, capture_output=True, timeout=CHILD_S)
        for node in nodes:
            wait_until(lambda node=node: self.state(node) == "ok", "the cluster is formed")

    def state(self, node):
        return "ok" if b"cluster_state:ok" in node.ask("CLUSTER", "INFO") else "down"

    def identity(self, node):
        return node.ask("CLUSTER", "MYID").decode()

    def owner(self, name):
        """The node that has the name's slot, as the nodes themselves see it."""
        slot = redis.crc.key_slot(name)
        for node in self.nodes:
            for start, end, master, *_ in node.ask("CLUSTER", "SLOTS"):
                if start <= slot <= end and master[1] == node.port:
                    return node
        raise AssertionError(f"slot {slot} is nobody's")

    def flush(self):
        for node in self.nodes:
            node.ask("FLUSHALL")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not installed (Debian: apt-get install redis-tools)")
    with ExitStack() as stack:
        yield Cluster(_nodes(stack, tmp_path_factory.mktemp("cluster")))


def _nodes(stack, folder):
    # So long that no node is taken for dead, and the whole cluster for down, because a machine is busy.
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "60000")
    return [stack.enter_context(RedisServer(folder / str(i), *options, port=free_port())) for i in range(3)]


def test_blocks_are_spread_and_come_back(cluster, open_tier):
    cluster.flush()
    tier = open_tier(cluster.url, cluster=True)
    assert all(o.is_ok for o in tier.store(KEYS, [value(i, 50_000) for i in range(NUM_KEYS)]))
    sizes = [node.ask("DBSIZE") for node in cluster.nodes]
    assert sum(sizes) == NUM_KEYS
    assert min(sizes) > 0
    assert [o.num_bytes for o in tier.lookup(KEYS)] == [50_000] * NUM_KEYS
    into = [buffer(50_000) for _ in KEYS]
    assert all(o.is_ok for o in tier.load(KEYS, into))
    assert into == [value(i, 50_000) for i in range(NUM_KEYS)]
    assert [o.status for o in tier.evict(KEYS[:3])] == [Status.OK] * 3
    assert [o.status for o in tier.lookup(KEYS[:4])] == [Status.MISS] * 3 + [Status.OK]


def test_calls_do_not_queue_up_before_a_cluster_that_hangs(open_tier):
    """To connect takes a time-out; each of eight calls would wait for all before it, and then connect."""
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(64)
        tier = open_tier(
            f"redis://127.0.0.1:{hole.getsockname()[1]}", cluster=True, timeout_s=0.3, connections=8
        )
        assert _num_taken(hole) == 1, "when it was opened"
        with pytest.raises((TierUnavailableError, TierTimeoutError)):
            tier.lookup(KEYS[:1])
        assert _num_taken(hole) == 1, "by a call"
        calls = Crew(DEADLINE_S)
        with tier._servers._connecting():  # another call is at it
            calls.start(8, lambda _number: _waits_in_vain(tier))
            calls.join()
        assert _num_taken(hole) == 0


def _num_taken(hole):
    """How many have connected."""
    hole.setblocking(False)
    count = 0
    with suppress(BlockingIOError):
        while True:
            hole.accept()[0].close()
            count += 1
    return count


def _waits_in_vain(tier):
    with pytest.raises((TierUnavailableError, TierTimeoutError), match="still trying to connect"):
        tier.lookup(KEYS[:1])


def test_any_member_will_do(cluster, open_tier):
    nobody = f"127.0.0.1:{free_port()}"
    tier = open_tier(f"redis://{nobody}", cluster=True, nodes=[f"127.0.0.1:{cluster.nodes[2].port}"])
    assert {o.status for o in tier.lookup(KEYS)} <= {Status.OK, Status.MISS}


def test_a_slot_that_moves_and_one_on_its_way(cluster, open_tier):
    """MOVED and ASK are followed, key by key; the other keys of the batch are not disturbed."""
    cluster.flush()
    tier = open_tier(cluster.url, cluster=True, ttl_s=3600, ttl_refresh=True)
    values = [value(i, 50_000) for i in range(NUM_KEYS)]
    tier.store(KEYS, values)
    source = cluster.owner(name(0))
    target = next(node for node in cluster.nodes if node is not source)
    slot = redis.crc.key_slot(name(0))
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.identity(source))
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.identity(target))
    source.ask("MIGRATE", "127.0.0.1", target.port, name(0), 0, 5000)
    _assert_whole(tier, values)  # ASK
    for node in (target, source, *cluster.nodes):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", cluster.identity(target))
    _assert_whole(tier, values)  # MOVED
    _assert_whole(tier, values)  # known by now
    other = open_tier(cluster.url, cluster=True)
    assert all(o.is_ok for o in other.lookup(KEYS))


def _assert_whole(tier, values):
    into = [buffer(50_000) for _ in KEYS]
    assert [o.status for o in tier.load(KEYS, into)] == [Status.OK] * NUM_KEYS
    assert into == values
    assert [o.num_bytes for o in tier.lookup(KEYS)] == [50_000] * NUM_KEYS
    assert all(o.is_ok for o in tier.store(KEYS, values))
    assert tier.load(KEYS[:1], [buffer(10)])[0].status is Status.CORRUPT


def test_a_node_that_dies_costs_its_own_blocks(tmp_path, open_tier):
    with ExitStack() as stack:
        nodes = _nodes(stack, tmp_path)
        cluster = Cluster(nodes)
        for node in nodes:
            node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        tier = stack.enter_context(open_tier(cluster.url, cluster=True))
        tier.store(KEYS, [value(i, 1000) for i in range(NUM_KEYS)])
        lost = {place for place in range(NUM_KEYS) if cluster.owner(name(place)) is nodes[1]}
        nodes[1].kill()
        outcomes = tier.load(KEYS, [buffer(1000) for _ in KEYS])
        assert {place for place, o in enumerate(outcomes) if not o.is_ok} == lost
        assert {outcomes[place].status for place in lost} == {Status.UNAVAILABLE}
        nodes[1].start()
        wait_until(lambda: _all_answer(tier), "all three answer again")


def _all_answer(tier):
    try:
        outcomes = tier.lookup(KEYS)
    except TierUnavailableError:
        return False
    return {o.status for o in outcomes} <= {Status.OK, Status.MISS}


def test_a_cluster_that_is_away(open_tier):
    tier = open_tier(f"redis://127.0.0.1:{free_port()}", cluster=True)
    with pytest.raises(TierUnavailableError, match="cluster cannot be reached"):
        tier.lookup(KEYS)


def test_a_server_that_is_no_cluster(tmp_path, open_tier):
    with RedisServer(tmp_path, port=free_port()) as server:
        tier = open_tier(server.url, cluster=True)
        with pytest.raises(TierUnavailableError, match="[Cc]luster"):
            tier.lookup(KEYS)


def test_a_member_that_is_used_without_cluster_is_named(cluster, open_tier):
    tier = open_tier(cluster.url)
    outcomes = tier.lookup(KEYS)
    wrong = [o for o in outcomes if o.status is Status.UNAVAILABLE]
    assert wrong
    assert "set cluster: true" in wrong[0].reason
