"""What stands between the tier and its store: gateways, proxies and balancers with answers of their own."""

from __future__ import annotations

import gzip
import random
import socket
import threading
import time
from contextlib import closing

import pytest

from flexkv_core import Status, TierError, TierUnavailableError
from flexkv_driver_s3.names import names_of
from tests.support.s3_stub import StubS3, refuse
from tests.support.s3_values import buffers, statuses, tried, values
from tests.support.waiting import DEADLINE_S, wait_until


def page(status: int, body: bytes = b"<html>404 page not found</html>"):
    """Answer as a gateway does whose store is not there at the moment."""

    def how(handler):
        handler.body()
        handler.answer(status, body, Content_Type="text/html")

    return how


def test_a_gateways_404_is_no_miss_and_nothing_is_forgotten(stub, open_tier):
    tier = open_tier(index_ttl_s=3600)
    keys, data = values(3)
    tier.store(keys, data)
    stub.treat("GET", "/blocks/", page(404))
    with pytest.raises(TierUnavailableError, match="does not answer as an S3 service"):
        tier.load(keys, buffers(3))
    stub.behave()
    assert statuses(tier.lookup(keys)) == [Status.OK] * 3
    assert statuses(tier.load(keys, buffers(3))) == [Status.OK] * 3


@pytest.mark.parametrize(
    ("status", "kind"), [(200, "text/html; charset=utf-8"), (200, "Text/HTML"), (206, "binary/octet-stream")]
)
def test_what_is_no_whole_object_is_not_taken_for_a_damaged_one(stub, open_tier, status, kind):
    """The core would remove the good one that lies behind the gateway."""

    def instead(handler):
        handler.body()
        handler.answer(status, b"<html>please log in</html>", Content_Type=kind)

    tier = open_tier()
    keys, data = values(3)
    tier.store(keys, data)
    stub.treat("GET", "/blocks/", instead)
    with pytest.raises(TierUnavailableError, match="does not answer as an S3 service"):
        tier.load(keys, buffers(3))
    stub.behave()
    assert statuses(tier.load(keys, buffers(3))) == [Status.OK] * 3


def test_a_proxys_limit_for_bodies_is_named(stub, open_tier):
    tier = open_tier()
    keys, data = values(2)
    stub.treat("PUT", keys[0].hex(), page(413, b"<html>413 Request Entity Too Large</html>"))
    outcomes = tier.store(keys, data)
    assert statuses(outcomes) == [Status.INVALID, Status.OK]
    assert "a proxy's limit for bodies" in outcomes[0].reason


@pytest.mark.parametrize("body", [b"", b"<Error><Code>NoSuchKey</Code></Error>"])
def test_a_stores_404_is_a_miss(stub, open_tier, body):
    tier = open_tier()
    keys, data = values(2)
    tier.store(keys, data)
    stub.treat("GET", keys[0].hex(), page(404, body))
    assert statuses(tier.load(keys, buffers(2))) == [Status.MISS, Status.OK]


def test_a_body_that_only_the_connections_end_ends_is_not_believed(stub, open_tier):
    """It would be taken for a short value, which the core takes for a damaged one, and removes."""

    def without_length(handler):
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write((handler.value() or b"")[:500])
        handler.close_connection = True

    tier = open_tier()
    keys, data = values(2, 2000)
    tier.store(keys, data)
    stub.treat("GET", keys[0].hex(), without_length)
    with pytest.raises(TierUnavailableError, match="without a length"):
        tier.load(keys[:1], buffers(1))
    stub.behave()
    assert statuses(tier.load(keys, buffers(2))) == [Status.OK] * 2


def test_an_early_hint_does_not_shift_the_answers(stub, open_tier):
    def hint(handler):
        handler.wfile.write(b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n")
        handler.wfile.flush()
        time.sleep(0.2)
        handler._get(b"")

    tier = open_tier(requests_per_call=1)
    keys, data = values(2)
    tier.store(keys, data)
    stub.treat("GET", keys[0].hex(), hint)
    with pytest.raises(TierUnavailableError, match="status 103"):
        tier.load(keys[:1], buffers(1))
    into = buffers(1)
    assert statuses(tier.load(keys[1:], into)) == [Status.OK]
    assert into[0][:100_000] == data[1], "another key's bytes"


def test_a_proxy_that_compresses_what_it_was_not_asked_to(stub, open_tier):
    def squeeze(handler):
        handler.answer(200, gzip.compress(handler.value() or b""), Content_Encoding="gzip")

    tier = open_tier()
    keys, data = values(1, 2000)
    tier.store(keys, data)
    stub.treat("GET", "/blocks/", squeeze)
    with pytest.raises(TierUnavailableError, match="proxy .*gzip"):
        tier.load(keys, buffers(1))
    stub.behave()
    assert statuses(tier.load(keys, buffers(1))) == [Status.OK]


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_to_https_is_named(stub, open_tier, status):
    def elsewhere(handler):
        handler.answer(status, b"<html>moved</html>", Location=f"https://store.example:9000{handler.path}")

    stub.treat("GET", "/", elsewhere)
    with pytest.raises(TierError, match="set options.endpoint_url to https://store.example:9000 ") as caught:
        open_tier()
    assert "Signature" not in str(caught.value)


def test_a_redirect_of_s3_itself_is_a_matter_of_regions(stub, open_tier):
    place = {"Location": "https://bucket.s3.eu-west-3.amazonaws.com/", "x-amz-bucket-region": "eu-west-3"}
    stub.treat("GET", "list-type", refuse(307, "TemporaryRedirect", **place))
    with pytest.raises(TierError, match=r"set options\.region to eu-west-3"):
        open_tier()


def test_a_listing_that_begins_anew_is_not_followed_for_ever(stub, open_tier):
    """Some servers do not know ``start-after``, or list in no order."""

    def from_the_front(handler):
        handler.query.pop("start-after", None)
        handler._list()

    names, chance = names_of("flexkv", bytes(16), 2), random.Random(3)
    stub.objects.update({names.block(chance.randbytes(32)): b"x" for _ in range(1500)})
    stub.treat("GET", "list-type", from_the_front)
    with pytest.raises(TierUnavailableError, match="listing"):
        open_tier()
    assert stub.count("GET", "list-type") < 6


def test_connections_that_a_balancer_has_forgotten_cost_one_time_out(stub, open_tier):
    keys, data = values(4)
    open_tier().store(keys, data)
    hasty = open_tier(requests_per_call=4, read_timeout_s=0.4, probe="none")
    together = threading.Barrier(4)

    def at_once(handler):
        together.wait(DEADLINE_S)
        handler._get(b"")

    stub.treat("GET", "/blocks/", at_once, times=4)
    wait_until(lambda: tried(lambda: hasty.load(keys, buffers(4))) == [Status.OK] * 4)
    old, end, forgotten = set(stub._connections), threading.Event(), []

    def forgets(handler):
        if handler.connection in old:
            forgotten.append(handler.path)
            end.wait(DEADLINE_S)
            handler.close_connection = True
        else:
            handler._get(b"")

    stub.treat("GET", "/blocks/", forgets)
    try:
        assert tried(lambda: hasty.load(keys[:1], buffers(1))) == [Status.TIMEOUT]
        for key in keys:
            wait_until(lambda key=key: tried(lambda: hasty.load([key], buffers(1))) == [Status.OK])
    finally:
        end.set()
    assert len(forgotten) == 1


@pytest.mark.parametrize("code", ["OperationAborted", "ConditionalRequestConflict", ""])
def test_two_writers_of_one_object_are_no_fault_of_the_others(stub, open_tier, code):
    tier = open_tier(requests_per_call=1)
    keys, data = values(3)
    stub.treat("PUT", keys[0].hex(), refuse(409, code))
    assert statuses(tier.store(keys, data)) == [Status.UNAVAILABLE, Status.OK, Status.OK]


def test_an_upload_that_a_lifecycle_rule_gave_up_fails_alone(stub, open_tier):
    tier = open_tier(value_bytes=16 << 20, multipart_above="5MiB", multipart_part="5MiB")
    keys, data = values(2, 6 << 20)
    data[1] = data[1][:1000]
    stub.treat("PUT", "partNumber=2", refuse(404, "NoSuchUpload"))
    assert statuses(tier.store(keys, data)) == [Status.UNAVAILABLE, Status.OK]


def test_an_answer_that_begins_with_the_spaces_that_kept_it_alive(stub, open_tier):
    def slowly(handler):
        with handler.stub.lock:
            parts = handler.stub.uploads.pop(handler.query["uploadId"])
            handler.stub.objects[handler.name] = b"".join(parts[number] for number in sorted(parts))
        handler.answer(
            200,
            b"   \n<?xml version='1.0'?><CompleteMultipartUploadResult><ETag>x</ETag>"
            b"</CompleteMultipartUploadResult>",
        )

    tier = open_tier(value_bytes=16 << 20, multipart_above="5MiB", multipart_part="5MiB")
    keys, data = values(1, 6 << 20)

    def with_body(handler):
        handler.body()
        slowly(handler)

    stub.treat("POST", "uploadId", with_body)
    assert statuses(tier.store(keys, data)) == [Status.OK]


def test_an_address_of_version_6(open_tier):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        server = StubS3(host="::1")
    except OSError as exc:
        pytest.skip(f"no IPv6 here: {exc}")
    with closing(server):
        tier = open_tier(endpoint_url=server.endpoint)
        keys, data = values(2)
        assert statuses(tier.store(keys, data)) == [Status.OK] * 2
        assert statuses(tier.load(keys, buffers(2))) == [Status.OK] * 2
        assert statuses(tier.evict(keys)) == [Status.OK] * 2
        tier.close()


def test_deletion_one_by_one_ends_with_the_first_time_out(stub, open_tier):
    keys, data = values(12, 100)
    hasty = open_tier(read_timeout_s=0.3, probe="none")
    wait_until(lambda: tried(lambda: hasty.store(keys, data)) == [Status.OK] * 12)
    stub.treat("POST", "delete", refuse(501, "NotImplemented"))
    wait_until(lambda: set(tried(lambda: hasty.evict(keys[:2]))) <= {Status.OK, Status.MISS})
    end = threading.Event()
    stub.treat("DELETE", "/blocks/", lambda _handler: end.wait(DEADLINE_S))
    before = stub.count("DELETE", "/blocks/")
    try:
        assert statuses(hasty.evict(keys[2:])) == [Status.TIMEOUT] * 10
    finally:
        end.set()
    assert stub.count("DELETE", "/blocks/") <= before + 1
    stub.behave()
    wait_until(lambda: set(tried(lambda: hasty.evict(keys[2:]))) <= {Status.OK, Status.MISS})
    assert not [name for name in stub.objects if "/blocks/" in name]
