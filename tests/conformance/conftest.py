"""Servers that the kit's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.media import SERVERS
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        SERVERS[running.unix_url] = running
        yield running
