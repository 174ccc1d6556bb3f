"""Two real SGLang servers over one bucket: on Ceph's gateway, or, where that is not installed, on moto's."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.engines.sglang.sharing import (
    Pair,
    SharedStore,
    check_tenants_do_not_share,
    check_what_one_stored_the_other_serves,
    check_writers_of_one_block_do_no_harm,
    two_servers,
)
from tests.support.ceph_rgw import missing_programs
from tests.support.s3_client import KEYS, Bucket, make_client
from tests.support.server import StartServer

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


@pytest.fixture(scope="module")
def pair(
    store: SharedStore,
    start_server: StartServer,
    tiny_llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    with two_servers(store, start_server, tiny_llama, tmp_path_factory.mktemp("chain")) as running:
        yield running


def test_what_one_stored_the_other_serves(pair: Pair) -> None:
    check_what_one_stored_the_other_serves(pair)


def test_tenants_do_not_share(pair: Pair) -> None:
    check_tenants_do_not_share(pair)


def test_writers_of_one_block_do_no_harm(pair: Pair) -> None:
    check_writers_of_one_block_do_no_harm(pair)
