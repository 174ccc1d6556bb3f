"""Two real SGLang servers over one bucket: on Ceph's gateway, or, where that is not installed, on moto's."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.engines.sglang.sharing import SharedStore, SharingTests
from tests.support.ceph_rgw import missing_programs
from tests.support.s3_client import KEYS, Bucket, make_client

pytestmark = pytest.mark.server

OPTIONS = (
    '{{bucket: {bucket}, endpoint_url: "{endpoint}", access_key_id: "{key_id}", '
    'secret_access_key: "{secret}", index_ttl_s: 50ms}}'
)


@pytest.fixture(scope="module")
def store(request: pytest.FixtureRequest) -> Iterator[SharedStore]:
    if missing_programs():
        endpoint, keys = request.getfixturevalue("moto").endpoint, KEYS
    else:
        gateway = request.getfixturevalue("ceph")
        endpoint, keys = gateway.endpoint, (gateway.access, gateway.secret)
    with closing(make_client(endpoint, keys)) as client:
        bucket = Bucket(endpoint, f"shared-{uuid.uuid4().hex}", client, keys).create()
        options = OPTIONS.format(bucket=bucket.name, endpoint=endpoint, key_id=keys[0], secret=keys[1])
        yield SharedStore("s3", options, lambda: len(bucket.names("/blocks/")))


class TestBucket(SharingTests):
    pass
