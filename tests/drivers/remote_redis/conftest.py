"""What the tests of ``remote_redis`` share: a server per module, and tiers that are closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from flexkv_core import TierContext
from flexkv_driver_remote_redis.config import RedisConfig
from flexkv_driver_remote_redis.tier import RedisTier
from tests.support.redis_server import RedisServer
from tests.support.waiting import DEADLINE_S

VALUE_BYTES = 1 << 20

OpenTier = Callable[..., RedisTier]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(autouse=True)
def _empty_server(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        request.getfixturevalue("server").ask("FLUSHALL")


@pytest.fixture
def open_tier() -> Iterator[OpenTier]:
    """Opens tiers, which wait long for a server unless they are told otherwise, and closes them."""
    tiers: list[RedisTier] = []

    def open_one(url: str, *, value_bytes: int = VALUE_BYTES, **options: object) -> RedisTier:
        settings = {"timeout_s": DEADLINE_S, "connect_timeout_s": DEADLINE_S, **options}
        config = RedisConfig.model_validate({"url": url, **settings})
        tiers.append(RedisTier(config, TierContext(name="far", value_bytes=value_bytes, head_bytes=4096)))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.close()
