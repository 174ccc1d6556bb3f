"""Two real SGLang servers over one bucket, on moto's server and (slow) on Ceph's gateway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
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
from tests.support.ceph_rgw import ceph_gateway
from tests.support.s3_client import KEYS, Bucket, make_client
from tests.support.s3_moto import MotoServer
from tests.support.server import StartServer

pytestmark = pytest.mark.server

OPTIONS = (
    '{{bucket: {bucket}, endpoint_url: "{endpoint}", access_key_id: "{key_id}", '
    'secret_access_key: "{secret}", index_ttl_s: 50ms}}'
)


@pytest.fixture(scope="module", params=["moto", pytest.param("ceph", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest) -> Iterator[SharedStore]:
    with ExitStack() as stack:
        if request.param == "moto":
            endpoint, keys = stack.enter_context(closing(MotoServer())).endpoint, KEYS
        else:
            gateway = stack.enter_context(ceph_gateway())
            endpoint, keys = gateway.endpoint, (gateway.access, gateway.secret)
        client = stack.enter_context(closing(make_client(endpoint, keys)))
        bucket = Bucket(endpoint, "shared-blocks", client, keys).create()
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
