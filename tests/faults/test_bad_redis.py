"""All that may be wrong with a Redis, at a real server below a whole chain.

Each is named in one clear line, counted, and survived: requests are served on, and where somebody mends it
the tier comes back by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flexkv_core.testing import context_for
from flexkv_driver_remote_redis.config import RedisConfig
from flexkv_driver_remote_redis.tier import RedisTier
from tests.support.redis_server import Proxy, RedisServer, closed_port, free_port
from tests.support.remote_world import (
    DRIVER_S,
    LAYOUT,
    NAME,
    OpenWorld,
    RemoteWorld,
    check_mended,
    check_named,
    check_survived,
    foreign,
    forget_and_ask,
    prompt,
    world_over,
)
from tests.support.waiting import wait_until


@pytest.fixture
def open_world(stack: ExitStack) -> OpenWorld:
    """Chains over a URL."""

    def open_one(url: str, policy: dict[str, object] | None = None, **options: object) -> RemoteWorld:
        config = RedisConfig.model_validate(
            {"url": url, "timeout_s": DRIVER_S, "connect_timeout_s": DRIVER_S, **options}
        )
        return world_over(stack, RedisTier(config, context_for(LAYOUT, NAME)), **(policy or {}))

    return open_one


def nothing() -> None:
    """There is nothing to mend at the server's side."""


@dataclass
class Trouble:
    """A server as somebody left it.

    Attributes:
        url: What the chain is given.
        options: Further options of the tier.
        mend: Puts the trouble right.
        is_mendable: Whether that can be done without a new configuration.
    """

    url: str
    options: dict[str, object] = field(default_factory=dict)
    mend: Callable[[], object] = nothing

    @property
    def is_mendable(self) -> bool:
        return self.mend is not nothing


def wrong_password(stack: ExitStack, folder: Path) -> Trouble:
    redis = stack.enter_context(RedisServer(folder, "--requirepass", "right", probe={"password": "right"}))
    return Trouble(
        redis.unix_url, {"password": "wrong"}, lambda: redis.ask("CONFIG", "SET", "requirepass", "wrong")
    )


def no_permission(stack: ExitStack, folder: Path) -> Trouble:
    redis = stack.enter_context(RedisServer(folder))
    redis.ask("ACL", "SETUSER", "guest", "on", ">pw", "~elsewhere:*", "+@all")
    return Trouble(
        redis.unix_url,
        {"username": "guest", "password": "pw"},
        lambda: redis.ask("ACL", "SETUSER", "guest", "~flexkv:*"),
    )


def wrong_port(stack: ExitStack, folder: Path) -> Trouble:
    return Trouble(f"redis://127.0.0.1:{stack.enter_context(closed_port())}")


def unknown_name(stack: ExitStack, folder: Path) -> Trouble:
    return Trouble("redis://no-such-host.invalid")


def loading(stack: ExitStack, folder: Path) -> Trouble:
    redis = stack.enter_context(RedisServer(folder, "--enable-debug-command", "yes"))
    redis.ask("DEBUG", "POPULATE", "40000", "filler", "100")
    redis.ask("SAVE")
    redis.kill()
    # Each key is waited for when it is loaded, so that loading takes 40 s unless it is told otherwise.
    redis.start("--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024")
    return Trouble(redis.unix_url, mend=lambda: redis.ask("CONFIG", "SET", "key-load-delay", "0"))


def cluster_down(stack: ExitStack, folder: Path) -> Trouble:
    redis = stack.enter_context(RedisServer(folder, "--cluster-enabled", "yes", port=free_port()))
    return Trouble(redis.unix_url, mend=lambda: redis.ask("CLUSTER", "ADDSLOTSRANGE", "0", "16383"))


def restarted(stack: ExitStack, folder: Path) -> Trouble:
    redis = stack.enter_context(RedisServer(folder))
    redis.kill()
    return Trouble(redis.unix_url, mend=redis.start)


UNUSABLE = [
    (wrong_password, "denied", "wrong username or password"),
    (no_permission, "denied", "lacks rights"),
    (wrong_port, "unavailable", "refused"),
    (unknown_name, "unavailable", "resol|not known|No address"),
    (loading, "unavailable", "still loading"),
    (cluster_down, "unavailable", "CLUSTERDOWN"),
    (restarted, "unavailable", "refused"),
]


@pytest.mark.parametrize(("make", "cause", "hint"), UNUSABLE, ids=lambda x: getattr(x, "__name__", ""))
def test_a_server_that_cannot_be_used(
    stack: ExitStack,
    open_world: OpenWorld,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[ExitStack, Path], Trouble],
    cause: str,
    hint: str,
) -> None:
    trouble = make(stack, tmp_path)
    world = open_world(trouble.url, **trouble.options)
    check_survived(world, caplog, "lookup_failures", cause, hint)
    assert "wrong'" not in caplog.text
    assert "pw" not in caplog.text, "no password"
    trouble.mend()
    if trouble.is_mendable:
        check_mended(world)


def test_a_server_out_of_memory(
    stack: ExitStack, open_world: OpenWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    redis = stack.enter_context(RedisServer(tmp_path, *options))
    world = open_world(redis.unix_url)
    check_survived(world, caplog, "store_failures", "no_space", "out of memory and evicts nothing")
    redis.ask("CONFIG", "SET", "maxmemory", "0")
    check_mended(world)


def test_a_read_only_replica(
    stack: ExitStack, open_world: OpenWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    master = stack.enter_context(
        RedisServer(tmp_path / "master", "--repl-diskless-sync-delay", "0", port=free_port())
    )
    open_world(master.unix_url).store(prompt(1))
    replica = RedisServer(tmp_path / "copy", "--replicaof", "127.0.0.1", str(master.port))
    stack.enter_context(replica)
    wait_until(lambda: int(str(replica.ask("DBSIZE"))) == 4, "the replica has caught up")
    reader = open_world(replica.unix_url, {"read_only": True})
    forget_and_ask(reader, prompt(1))
    assert reader.serve(prompt(1)).num_tokens == len(prompt(1)), "reading is what a replica is for"
    caplog.clear()
    world = open_world(replica.unix_url)
    check_survived(world, caplog, "store_failures", "unavailable", "read-only replica")
    replica.ask("REPLICAOF", "NO", "ONE")
    check_mended(world)


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[RedisServer, bytes], object]:
    """Puts other bytes in a value's place."""
    return lambda redis, name: redis.ask("SET", name, change(bytes(redis.ask("GET", name))))  # type: ignore[arg-type]  # a value is bytes


def as_list(redis: RedisServer, name: bytes) -> None:
    redis.ask("DEL", name)
    redis.ask("LPUSH", name, "x")


SPOILERS: dict[str, tuple[Callable[[RedisServer, bytes], object], str]] = {
    "another type": (as_list, "no value"),
    "something else": (with_bytes(lambda value: b"\x80\x04" + value[2:]), "not a block"),
    "another schema": (with_bytes(lambda value: value[:8] + b"\xff\xff" + value[10:]), "schema 65535"),
    "another layout": (with_bytes(lambda value: foreign()), "foreign layout"),
    "another size": (with_bytes(lambda value: value + b"more" * 99), "value of 70028 B, buffer of 69632 B"),
    "truncated": (with_bytes(lambda value: value[:-7]), "truncated value"),
    "truncated in the header": (with_bytes(lambda value: value[:30]), "truncated header"),
    "a flipped bit": (with_bytes(lambda value: value[:-1] + bytes([value[-1] ^ 1])), "checksum differs"),
}


@pytest.mark.parametrize("how", SPOILERS)
def test_values_that_are_not_what_was_stored(
    stack: ExitStack, open_world: OpenWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    spoil, hint = SPOILERS[how]
    redis = stack.enter_context(RedisServer(tmp_path))
    world = open_world(redis.unix_url)
    tokens = prompt(1)
    good = stored_values(world, redis, tokens)
    forget_and_ask(world, tokens)
    for name in good:
        spoil(redis, name)
    served = world.serve(tokens)
    assert (served.num_tokens, served.cause) == (0, f"{NAME}:corrupt")
    world.settle()
    assert world.count("load_failures", tier=NAME, cause="corrupt") == len(good)
    check_named(caplog, hint)
    left = {name: redis.ask("GET", name) for name in good}
    assert all(left[name] in (good[name], None) for name in good), "what is bad is stored anew, or removed"
    world.empty_host()
    world.serve_until(lambda served: served.num_tokens == len(tokens), tokens)


def test_an_empty_value_is_no_value(stack: ExitStack, open_world: OpenWorld, tmp_path: Path) -> None:
    redis = stack.enter_context(RedisServer(tmp_path))
    world = open_world(redis.unix_url)
    tokens = prompt(1)
    good = stored_values(world, redis, tokens)
    for name in good:
        redis.ask("SET", name, b"")
    forget_and_ask(world, tokens)
    assert world.serve(tokens).num_tokens == 0
    world.settle()
    assert {name: redis.ask("GET", name) for name in good} == good, "computed again, and stored again"


def stored_values(world: RemoteWorld, redis: RedisServer, tokens: Sequence[int]) -> dict[bytes, bytes]:
    """Store a prompt; what lies in Redis then."""
    world.store(tokens)
    names = redis.ask("KEYS", "flexkv:*")
    assert isinstance(names, list)
    assert len(names) == len(tokens) // LAYOUT.block_tokens
    return {name: bytes(redis.ask("GET", name)) for name in names}  # type: ignore[arg-type]  # a value is bytes


def test_a_proxy_that_closes_in_the_middle_of_a_value(
    stack: ExitStack, open_world: OpenWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    redis = stack.enter_context(RedisServer(tmp_path))
    proxy = stack.enter_context(Proxy(redis.path))
    world = open_world(proxy.url)
    tokens = prompt(1)
    world.store(tokens)
    forget_and_ask(world, tokens)
    proxy.reply_limit = LAYOUT.slot_bytes // 2
    proxy.cut_idle()
    served = world.serve(tokens)
    assert served.num_tokens == 0
    assert served.cause == f"{NAME}:unavailable"
    assert world.count("load_failures", tier=NAME, cause="unavailable") > 0
    check_named(caplog, "in the middle of an answer")
    proxy.reply_limit = None
    world.serve_until(lambda served: served.num_tokens == len(tokens), tokens)
