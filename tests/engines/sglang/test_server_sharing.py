"""Two real SGLang servers over one Redis: what one stored the other serves, and a Redis that dies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.engines.sglang.server import ask_after_flush, prompt
from tests.engines.sglang.sharing import BLOCK, Pair, SharedStore, SharingTests
from tests.support.redis_server import RedisServer, require_redis
from tests.support.server import ask
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    require_redis()
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def store(redis: RedisServer) -> SharedStore:
    options = f'{{url: "{redis.unix_url}"}}'
    return SharedStore("remote_redis", options, lambda: int(str(redis.ask("DBSIZE"))))


class TestRedis(SharingTests):
    pass


def test_a_dead_store_is_a_recompute_and_comes_back(redis: RedisServer, pair: Pair) -> None:
    first, second = pair.first, pair.second
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

    seeds, empty = count(1000), pair.store.num_blocks()

    def is_back() -> bool:
        # Traffic, by which the tier is probed: a prompt that the host tier has asks nobody.
        ask_after_flush(first, prompt(BLOCK + 1, seed=next(seeds)))
        return pair.store.num_blocks() > empty

    wait_until(is_back, "the tier takes blocks again")
    before = pair.store.num_blocks()
    fresh = ask(first, later)
    pair.wait_for_blocks(before + 4)
    wait_until(lambda: ask_after_flush(second, later).tier_tokens >= 3 * BLOCK, "the other serves them")
    assert ask_after_flush(second, later).output_ids == fresh.output_ids
