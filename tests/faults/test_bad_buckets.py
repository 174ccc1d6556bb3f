"""All that may be wrong with a bucket, below a whole chain.

Each is named in one clear line, counted, and survived: requests are served on, and where somebody mends it
the tier comes back by itself.  What only a large installation does (a bucket in another region, a gateway
that is overloaded) is played by a small server; moto's and (slow) Ceph's are real ones.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

import pytest

from flexkv_core.testing import context_for
from flexkv_driver_s3 import signing
from flexkv_driver_s3.config import S3Config
from flexkv_driver_s3.tier import S3Tier
from tests.support.ceph_rgw import Gateway
from tests.support.redis_server import closed_port
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
from tests.support.s3_client import KEYS, Bucket, make_client
from tests.support.s3_moto import MotoServer
from tests.support.s3_stub import BUCKET, StubS3, cut_after, end_after, refuse


@pytest.fixture
def open_world(stack: ExitStack) -> OpenWorld:
    """Chains over a bucket.  Nothing is asked at start."""

    def open_one(endpoint: str, bucket: str = BUCKET, **options: object) -> RemoteWorld:
        given = {"access_key_id": KEYS[0], "secret_access_key": KEYS[1], "index_ttl_s": 0, "probe": "none"}
        given |= {f"{what}_timeout_s": DRIVER_S for what in ("connect", "read", "request")}
        config = S3Config.model_validate({"bucket": bucket, "endpoint_url": endpoint, **given, **options})
        return world_over(stack, S3Tier(config, context_for(LAYOUT, NAME)), lookup_wait_s=0.3)

    return open_one


@pytest.fixture
def stub(stack: ExitStack) -> StubS3:
    return stack.enter_context(closing(StubS3()))


def bucket_at(stack: ExitStack, endpoint: str, keys: tuple[str, str] = KEYS) -> Bucket:
    """A bucket of its own, as a test sees it behind the chain's back."""
    client = stack.enter_context(closing(make_client(endpoint, keys)))
    return Bucket(endpoint, f"test-{uuid.uuid4().hex}", client, keys)


# ---- what a server refuses -----------------------------------------------------------------------

REFUSALS = [
    (403, "SignatureDoesNotMatch", "denied", r"mend options\.secret_access_key"),
    (403, "InvalidAccessKeyId", "denied", r"mend options\.access_key_id"),
    (403, "AccessDenied", "denied", "these keys may not do this: allow s3:"),
    (404, "NoSuchBucket", "invalid", r"create it, or mend options\.bucket"),
    (301, "PermanentRedirect", "invalid", r"another region: set options\.region to eu-west-3"),
    (403, "RequestTimeTooSkewed", "denied", "clock differs too much"),
    (503, "SlowDown", "unavailable", "overloaded"),
]


@pytest.mark.parametrize(("status", "code", "cause", "hint"), REFUSALS)
def test_a_bucket_that_cannot_be_used(
    stub: StubS3,
    open_world: OpenWorld,
    caplog: pytest.LogCaptureFixture,
    status: int,
    code: str,
    cause: str,
    hint: str,
) -> None:
    for method in ("GET", "PUT", "POST", "DELETE"):
        stub.treat(method, "/", refuse(status, code, **{"x-amz-bucket-region": "eu-west-3"}))
    world = open_world(stub.endpoint)
    check_survived(world, caplog, "lookup_failures", cause, hint)
    stub.behave()
    check_mended(world)


def test_keys_that_may_only_read(
    stub: StubS3, open_world: OpenWorld, caplog: pytest.LogCaptureFixture
) -> None:
    stub.treat("PUT", "/", refuse(403, "AccessDenied"))
    world = open_world(stub.endpoint)
    check_survived(world, caplog, "store_failures", "denied", "these keys may not do this: allow s3:")
    stub.behave()
    check_mended(world)


def test_a_store_over_its_quota(
    stub: StubS3, open_world: OpenWorld, caplog: pytest.LogCaptureFixture
) -> None:
    stub.treat("PUT", "/blocks/", refuse(403, "QuotaExceeded"))
    world = open_world(stub.endpoint)
    check_survived(world, caplog, "store_failures", "no_space", "full or over its quota")
    stub.behave()
    check_mended(world)


@pytest.mark.parametrize(
    ("endpoint", "hint"),
    [("http://127.0.0.1:{port}", "nobody listens"), ("http://no-such-host.invalid", "does not resolve")],
)
def test_an_endpoint_where_nobody_is(
    stack: ExitStack, open_world: OpenWorld, caplog: pytest.LogCaptureFixture, endpoint: str, hint: str
) -> None:
    world = open_world(endpoint.format(port=stack.enter_context(closed_port())))
    check_survived(world, caplog, "lookup_failures", "unavailable", hint)


def test_a_server_that_is_restarted(
    stack: ExitStack, open_world: OpenWorld, caplog: pytest.LogCaptureFixture
) -> None:
    first = StubS3()
    world = open_world(first.endpoint)
    first.close()
    check_survived(world, caplog, "lookup_failures", "unavailable", "nobody listens|connection was lost")
    stack.enter_context(closing(StubS3(port=first.port)))
    check_mended(world)


# ---- what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", [cut_after(30_000), end_after(30_000)], ids=["reset", "closed"])
def test_a_connection_that_ends_in_the_middle_of_a_value(
    stub: StubS3, open_world: OpenWorld, caplog: pytest.LogCaptureFixture, how: Callable[..., None]
) -> None:
    world = open_world(stub.endpoint)
    tokens = prompt(1)
    world.store(tokens)
    forget_and_ask(world, tokens)
    stub.treat("GET", "/blocks/", how)
    served = world.serve(tokens)
    assert (served.num_tokens, served.cause) == (0, f"{NAME}:unavailable")
    world.settle()
    assert world.count("load_failures", tier=NAME, cause="unavailable") > 0
    check_named(caplog, "arrived incomplete|connection was lost")
    stub.behave()
    world.serve_until(lambda served: served.num_tokens == len(tokens), tokens)


SPOILERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda value: value[:700], "truncated header"),
    "a little truncated": (lambda value: value[:-7], "truncated value"),
    "empty": (lambda value: b"", "truncated header"),
    "another schema": (lambda value: value[:8] + b"\xff\xff" + value[10:], "schema 65535"),
    "another layout": (lambda value: foreign(), "foreign layout"),
    "another size": (lambda value: value + b"more" * 99, "longer than a block"),
    "something else": (lambda value: b"<html>" + value[6:], "not a block"),
}


def check_spoilt(bucket: Bucket, world: RemoteWorld, caplog: pytest.LogCaptureFixture, how: str) -> None:
    """Objects that change behind the tier's back are misses, and are stored anew or removed."""
    spoil, hint = SPOILERS[how]
    tokens = prompt(1)
    world.store(tokens)
    keys = world.sequence(tokens).keys()
    good = {key: bucket.read(key) for key in keys}
    forget_and_ask(world, tokens)
    for key, value in good.items():
        assert value is not None
        bucket.write(key, spoil(value))
    served = world.serve(tokens)
    assert (served.num_tokens, served.cause) == (0, f"{NAME}:corrupt")
    world.settle()
    assert world.count("load_failures", tier=NAME, cause="corrupt") == len(good)
    check_named(caplog, hint)
    assert all(bucket.read(key) in (good[key], None) for key in keys)
    world.serve_until(lambda served: served.num_tokens == len(tokens), tokens)


@pytest.mark.parametrize("how", SPOILERS)
def test_objects_that_are_not_what_was_stored(
    stack: ExitStack, moto: MotoServer, open_world: OpenWorld, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    bucket = bucket_at(stack, moto.endpoint).create()
    check_spoilt(bucket, open_world(moto.endpoint, bucket.name), caplog, how)


# ---- real servers --------------------------------------------------------------------------------


def check_no_bucket(bucket: Bucket, world: RemoteWorld, caplog: pytest.LogCaptureFixture) -> None:
    """A bucket that is not there yet, and is made while requests come in."""
    check_survived(world, caplog, "lookup_failures", "invalid", r"create it, or mend options\.bucket")
    bucket.create()
    check_mended(world)


def test_no_bucket(
    stack: ExitStack, moto: MotoServer, open_world: OpenWorld, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = bucket_at(stack, moto.endpoint)
    check_no_bucket(bucket, open_world(moto.endpoint, bucket.name), caplog)


OpenOnCeph = Callable[..., RemoteWorld]


@pytest.fixture
def on_ceph(ceph: Gateway, open_world: OpenWorld) -> OpenOnCeph:
    keys = {"access_key_id": ceph.access, "secret_access_key": ceph.secret}
    return partial(open_world, ceph.endpoint, **keys)


@pytest.fixture
def ceph_bucket(ceph: Gateway, stack: ExitStack) -> Bucket:
    return bucket_at(stack, ceph.endpoint, (ceph.access, ceph.secret))


@pytest.mark.slow
def test_no_bucket_on_ceph(
    ceph_bucket: Bucket, on_ceph: OpenOnCeph, caplog: pytest.LogCaptureFixture
) -> None:
    check_no_bucket(ceph_bucket, on_ceph(ceph_bucket.name), caplog)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["secret_access_key", "access_key_id"])
def test_wrong_keys_on_ceph(
    ceph_bucket: Bucket, on_ceph: OpenOnCeph, caplog: pytest.LogCaptureFixture, option: str
) -> None:
    world = on_ceph(ceph_bucket.create().name, **{option: "much-too-secret"})
    check_survived(world, caplog, "lookup_failures", "denied", rf"mend options\.{option}")
    assert "much-too-secret" not in caplog.text


@pytest.mark.slow
def test_no_permission_on_ceph(
    ceph_bucket: Bucket, on_ceph: OpenOnCeph, caplog: pytest.LogCaptureFixture
) -> None:
    world = on_ceph(ceph_bucket.create().name)
    denial = {"Effect": "Deny", "Principal": "*", "Action": ["s3:ListBucket", "s3:GetObject", "s3:PutObject"]}
    place = f"arn:aws:s3:::{ceph_bucket.name}"
    policy = {"Version": "2012-10-17", "Statement": [denial | {"Resource": [place, f"{place}/*"]}]}
    ceph_bucket.client.put_bucket_policy(Bucket=ceph_bucket.name, Policy=json.dumps(policy))
    check_survived(world, caplog, "lookup_failures", "denied", "these keys may not do this: allow s3:")
    ceph_bucket.client.delete_bucket_policy(Bucket=ceph_bucket.name)
    check_mended(world)


@pytest.mark.slow
def test_clock_skew_on_ceph(
    ceph_bucket: Bucket,
    on_ceph: OpenOnCeph,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that is late; one that is early does not disturb this gateway."""
    world = on_ceph(ceph_bucket.create().name)
    with monkeypatch.context() as here:
        here.setattr(signing, "utc_now", lambda: time.gmtime(time.time() - 7200))
        check_survived(world, caplog, "lookup_failures", "denied", "clock differs too much")
        world.settle()
    check_mended(world)


@pytest.mark.slow
@pytest.mark.parametrize("how", SPOILERS)
def test_objects_that_are_not_what_was_stored_on_ceph(
    ceph_bucket: Bucket, on_ceph: OpenOnCeph, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    check_spoilt(ceph_bucket, on_ceph(ceph_bucket.create().name), caplog, how)
