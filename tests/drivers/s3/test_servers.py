"""Real servers, which check signatures and know their own error codes: moto's, and (slow) Ceph's."""

from __future__ import annotations

import random
import uuid
from contextlib import closing

import pytest

from flexkv_core import Status, TierAccessError, TierError
from tests.support.s3_client import Bucket, make_client

VALUE_BYTES = 12 << 20


def round_trip(bucket):
    """Store, find, load, and evict values of all sizes, the largest in parts, and through two tiers."""
    options = {"multipart_above": "6MiB", "multipart_part": "5MiB", "prefix": "a/b/"}
    chance = random.Random(7)
    sizes = [0, 1, 4097, 1 << 20, 6 << 20, (11 << 20) + 3]
    keys = [chance.randbytes(32) for _ in sizes]
    values = [memoryview(chance.randbytes(size)) for size in sizes]
    with bucket.tier(VALUE_BYTES, **options) as tier, bucket.tier(VALUE_BYTES, **options) as other:
        assert {row.status for row in tier.store(keys, values)} == {Status.OK}
        assert [row.num_bytes for row in other.lookup(keys)] == sizes
        into = [memoryview(bytearray(VALUE_BYTES)) for _ in keys]
        outcomes = other.load(keys, into)
        assert [row.num_bytes for row in outcomes] == sizes
        assert all(view[:size] == value for view, size, value in zip(into, sizes, values, strict=True))
        assert {row.status for row in other.evict(keys)} == {Status.OK}
        assert other._get_service()._has_bulk_delete, "the server refused the deletion of several at once"
        assert {row.status for row in tier.lookup(keys)} == {Status.MISS}
        assert {row.status for row in tier.load(keys, into)} == {Status.MISS}
        tier.check_health()
    assert bucket.names("/blocks/") == []


def test_moto(moto):
    with closing(make_client(moto.endpoint)) as client:
        bucket = Bucket(moto.endpoint, uuid.uuid4().hex, client).create()
        round_trip(bucket)
        with pytest.raises(TierError, match=r"options\.bucket"):
            Bucket(moto.endpoint, "no-such-bucket", client).tier()


@pytest.mark.slow
def test_ceph(ceph):
    keys = (ceph.access, ceph.secret)
    with closing(make_client(ceph.endpoint, keys)) as client:
        bucket = Bucket(ceph.endpoint, uuid.uuid4().hex, client, keys).create()
        round_trip(bucket)
        with pytest.raises(TierError, match=r"options\.bucket"):
            Bucket(ceph.endpoint, "no-such-bucket", client, keys).tier()
        with pytest.raises(TierAccessError, match=r"options\.secret_access_key"):
            bucket.tier(secret_access_key="wrong")
        with pytest.raises(TierAccessError, match=r"options\.access_key_id"):
            bucket.tier(access_key_id="nobody")
