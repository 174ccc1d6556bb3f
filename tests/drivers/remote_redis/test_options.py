"""Options are checked before anything is connected, and a secret is never repeated."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from flexkv_core import TierContext, UnsupportedOperationError
from flexkv_driver_remote_redis.config import RedisConfig
from flexkv_driver_remote_redis.tier import RedisTier


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://10.0.0.5", "redis://10.0.0.5:6379"),
        ("redis://cache:6390/3", "redis://cache:6390"),
        ("rediss://[::1]:6380", "rediss://[::1]:6380"),
        ("unix:///run/redis/redis.sock", "unix:///run/redis/redis.sock"),
    ],
)
def test_urls(url, text):
    assert str(RedisConfig(url=url).address) == text


FINDINGS = [
    ({"url": "10.0.0.5:6379"}, "must begin with redis://"),
    ({"url": "http://10.0.0.5"}, "must begin with redis://"),
    ({"url": "redis://"}, "must name a host"),
    ({"url": "redis://cache:port"}, "port must be a number up to 65535"),
    ({"url": "redis://cache:70000"}, "port must be a number up to 65535"),
    ({"url": "redis://[cache]"}, "address of version 6"),
    ({"url": "redis://a", "ttl_s": "100us"}, "greater than or equal to 0.001"),
    ({"url": "redis://cache/blocks"}, "must end in a database number"),
    ({"url": "redis://cache?socket_timeout=3"}, "must hold no query"),
    ({"url": "unix://run/redis.sock"}, "must name a socket"),
    ({"url": "redis://a", "nodes": ["b:1"]}, "nodes is for a cluster"),
    ({"url": "redis://a", "cluster": True, "nodes": ["b:x"]}, "port must be a number up to 65535"),
    ({"url": "redis://a", "cluster": True, "sentinel": {"master": "m"}}, "exclude each other"),
    ({"url": "redis://a/2", "cluster": True}, "no databases"),
    ({"url": "unix:///s", "cluster": True}, "Unix socket"),
    ({"url": "redis://a", "tls": {}}, "does not begin with rediss://"),
    ({"url": "redis://a", "ttl_refresh": True}, "needs ttl_s"),
    ({"url": "redis://a", "username": "u"}, "username needs password"),
    ({"url": "redis://a", "ttl_s": 0}, "greater than or equal to 0.001"),
    ({"url": "redis://a", "prefix": "{tag}:"}, "pattern"),
    ({"url": "redis://a", "connections": 0}, "greater than or equal to 1"),
    ({"url": "redis://a", "max_value": "1GiB"}, "less than or equal to"),
    ({"url": "redis://a", "timeout": 3}, "Extra inputs are not permitted"),
]


def test_findings():
    for options, hint in FINDINGS:
        with pytest.raises(ValidationError, match=hint):
            RedisConfig.model_validate(options)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@cache",
        "redis://user:hunter2/x@cache",
        "redis://user:hunter2?x@cache",
        "redis://user:hunter2#x@cache",
        "redis://[hunter2@cache",
        "redis://[hunter2]@cache",
        "redis://cache/hunter2",
        "hunter2",
    ],
)
def test_credentials_in_the_url_are_refused_and_not_repeated(url):
    with pytest.raises(ValidationError) as caught:
        RedisConfig(url=url)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValidationError) as caught:
        RedisConfig(url="redis://a", cluster=True, nodes=[url.removeprefix("redis://") + "/"])
    assert "hunter2" not in str(caught.value)


def test_a_password_shows_nowhere():
    config = RedisConfig(
        url="redis://cache",
        password="hunter2",
        sentinel={"master": "m", "password": "hunter2"},
    )
    assert "hunter2" not in f"{config!r} {config} {config.model_dump_json()}"


def test_members_of_a_cluster_and_of_sentinels():
    cluster = RedisConfig(url="redis://a:7000", cluster=True, nodes=["b", "c:7002"])
    assert cluster.members == [("a", 7000), ("b", 7000), ("c", 7002)]
    watched = RedisConfig(url="redis://a", nodes=["b:1"], sentinel={"master": "m"})
    assert watched.members == [("a", 26379), ("b", 1)]


def test_a_block_longer_than_a_value_is_refused_at_start():
    config = RedisConfig(url="redis://127.0.0.1:1")
    context = TierContext(name="far", value_bytes=(512 << 20) + 1, head_bytes=4096)
    with pytest.raises(UnsupportedOperationError, match="lower block_tokens"):
        RedisTier(config, context)
