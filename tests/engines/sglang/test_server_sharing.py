"""Two real SGLang servers over one Redis: what one stored the other serves, and a Redis that dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv_core.cli._process import ServerProcess
from tests.engines.sglang.server import ask_after_flush, complaints, flags, prompt
from tests.support.redis_server import RedisServer, require_redis, wait_until
from tests.support.server import Setup, StartServer, ask

pytestmark = pytest.mark.server

Pair = tuple[ServerProcess, ServerProcess]
BLOCK = 64
CHAIN = """\
version: 1
block_tokens: {block}
tiers:
  - {{name: host, driver: cpu, options: {{capacity: 64MiB}}}}
  - name: far
    driver: remote_redis
    breaker_failures: 2
    breaker_reset_s: 0.5
    load_deadline_s: 2
    options: {{url: "{url}"}}
engine: {{lookup_wait_s: 2}}
"""


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    require_redis()
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def pair(
    redis: RedisServer, start_server: StartServer, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    file = tmp_path_factory.mktemp("chain") / "chain.yaml"
    file.write_text(CHAIN.format(block=BLOCK, url=redis.unix_url))
    setup = Setup(tiny_llama, [*flags(file), "--sleep-on-idle"])
    with start_server(setup) as first, start_server(setup) as second:
        yield first, second


def blocks_in(redis: RedisServer) -> int:
    return int(str(redis.ask("DBSIZE")))


def test_what_one_stored_the_other_serves(
    redis: RedisServer, pair: tuple[ServerProcess, ServerProcess]
) -> None:
    first, second = pair
    tokens = prompt(5 * BLOCK + 9, seed=31)
    fresh = ask(first, tokens)
    wait_until(lambda: blocks_in(redis) >= 5, "five whole blocks in Redis")
    shared = ask(second, tokens)
    assert shared.by_tier == {"device": 0, "host": 0, "storage": 5 * BLOCK}
    assert shared.output_ids == fresh.output_ids
    assert complaints(second) == []


def test_tenants_do_not_share(redis: RedisServer, pair: Pair) -> None:
    first, second = pair
    tokens = prompt(3 * BLOCK, seed=32)
    before = blocks_in(redis)
    fresh = ask(first, tokens, cache_salt="tenant-a")
    wait_until(lambda: blocks_in(redis) >= before + 3, "three whole blocks in Redis")
    assert ask(second, tokens, cache_salt="tenant-b").cached_tokens == 0
    assert ask(second, tokens).cached_tokens == 0
    own = ask(second, tokens, cache_salt="tenant-a")
    assert own.tier_tokens >= 2 * BLOCK
    assert own.output_ids == fresh.output_ids


def test_a_dead_store_is_a_recompute_and_comes_back(redis: RedisServer, pair: Pair) -> None:
    first, second = pair
    tokens = prompt(4 * BLOCK, seed=33)
    redis.kill()
    fresh = ask(first, tokens)
    assert fresh.cached_tokens == 0
    assert ask_after_flush(first, tokens).by_tier["host"] == 4 * BLOCK - 1, "the host tier goes on serving"
    assert ask(second, tokens).output_ids == fresh.output_ids
    assert first.is_alive()
    assert second.is_alive()
    redis.start()
    later = prompt(4 * BLOCK, seed=34)

    def is_back() -> bool:
        ask_after_flush(first, prompt(BLOCK + 1, seed=35))  # traffic, by which the tier is probed
        return " is up" in first.log_text()

    wait_until(is_back, "the tier is up again")
    before = blocks_in(redis)
    fresh = ask(first, later)
    wait_until(lambda: blocks_in(redis) >= before + 4, "stores reach Redis again")
    wait_until(lambda: ask_after_flush(second, later).tier_tokens >= 3 * BLOCK, "the other serves them")
    assert ask_after_flush(second, later).output_ids == fresh.output_ids
