"""Servers and networks that misbehave: each a named outcome, in bounded time, and then it works again."""

from __future__ import annotations

import socket
import time
from contextlib import closing

import pytest

from flexkv_core import (
    BufferState,
    Status,
    TierAccessError,
    TierTimeoutError,
    TierUnavailableError,
)
from tests.support.s3_stub import StubS3, cut_after, end_after, refuse
from tests.support.s3_tls import server_tls
from tests.support.s3_values import buffers, statuses, tried, values
from tests.support.waiting import wait_until


def trickle(handler):
    """One byte every few milliseconds, for half an hour: no silence is ever long."""
    handler.body()
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    try:
        for _ in range(100_000):
            handler.wfile.write(b"x")
            handler.wfile.flush()
            time.sleep(0.02)
    except OSError:
        handler.close_connection = True


@pytest.mark.parametrize("how", [cut_after(30_000), end_after(30_000), cut_after(0), end_after(99_999)])
def test_body_that_breaks_off_fails_one_key_only(stub, open_tier, how):
    tier = open_tier()
    keys, data = values(4)
    tier.store(keys, data)
    stub.treat("GET", keys[1].hex(), how)
    into = buffers(4)
    outcomes = tier.load(keys, into)
    assert statuses(outcomes) == [Status.OK, Status.UNAVAILABLE, Status.OK, Status.OK]
    assert outcomes[1].reason
    assert outcomes[1].buffer is BufferState.UNCERTAIN
    assert [bytes(into[i][:100_000]) == data[i] for i in (0, 2, 3)] == [True] * 3
    stub.behave()
    assert statuses(tier.load(keys, into)) == [Status.OK] * 4


def test_every_connection_that_breaks_ends_the_call(stub, open_tier):
    tier = open_tier(requests_per_call=1)
    keys, data = values(40)
    tier.store(keys, data)
    before = stub.count("GET", "/blocks/")
    stub.treat("GET", "/blocks/", end_after(10))
    outcomes = tier.load(keys, buffers(40))
    assert set(statuses(outcomes)) == {Status.UNAVAILABLE}
    assert "not tried" in outcomes[-1].reason
    assert stub.count("GET", "/blocks/") - before <= 4


def test_server_that_trickles_is_bounded_by_the_request_timeout(stub, open_tier):
    keys, data = values(6)
    open_tier().store(keys, data)
    hasty = open_tier(request_timeout_s=0.6, requests_per_call=2, probe="none")
    stub.treat("GET", "/blocks/", trickle)
    assert set(tried(lambda: hasty.load(keys, buffers(6)))) == {Status.TIMEOUT}
    stub.behave()
    wait_until(lambda: tried(lambda: hasty.load(keys, buffers(6))) == [Status.OK] * 6)


def test_listing_that_trickles_is_bounded_too(stub, open_tier):
    hasty = open_tier(request_timeout_s=0.6, probe="none")
    stub.treat("GET", "list-type", trickle)
    with pytest.raises(TierTimeoutError):
        hasty.lookup([bytes(32)])
    stub.behave()
    wait_until(lambda: tried(lambda: hasty.lookup([bytes(32)])) == [Status.MISS])


def test_deletion_that_trickles_is_bounded_too(stub, open_tier):
    keys, data = values(3, 100)
    hasty = open_tier(request_timeout_s=0.6, probe="none")
    wait_until(lambda: tried(lambda: hasty.store(keys, data)) == [Status.OK] * 3)
    stub.treat("POST", "delete", trickle)
    with pytest.raises(TierTimeoutError):
        hasty.evict(keys)
    stub.behave()
    wait_until(lambda: set(tried(lambda: hasty.evict(keys))) <= {Status.OK, Status.MISS})
    assert not [name for name in stub.objects if "/blocks/" in name]


def test_deletion_that_fails_for_some(stub, open_tier):
    def halfway(handler):
        handler.body()
        handler.answer(
            200,
            "<DeleteResult xmlns='urn:s3'>"
            f"<Error><Key>{first}</Key><Code>InternalError</Code><Message>sorry</Message></Error>"
            f"<Error><Key>{second}</Key><Code>NoSuchKey</Code></Error></DeleteResult>".encode(),
        )

    tier = open_tier()
    keys, data = values(3, 100)
    tier.store(keys, data)
    first, second = (next(name for name in stub.objects if key.hex() in name) for key in keys[:2])
    stub.treat("POST", "delete", halfway)
    assert statuses(tier.evict(keys)) == [Status.UNAVAILABLE, Status.MISS, Status.OK]
    assert statuses(tier.lookup(keys)) == [Status.OK, Status.MISS, Status.MISS]


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_black_hole(stub, open_tier, scheme):
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(1)
        with pytest.raises(TierTimeoutError, match="no answer in time|no connection"):
            open_tier(
                endpoint_url=f"{scheme}://127.0.0.1:{hole.getsockname()[1]}",
                connect_timeout_s=0.3,
                read_timeout_s=0.3,
            )


def test_object_longer_than_the_buffer_is_corrupt_and_not_read(stub, open_tier):
    tier = open_tier()
    keys, data = values(2)
    tier.store(keys, data)
    for name in list(stub.objects):
        if keys[0].hex() in name:
            stub.objects[name] = bytes((1 << 20) + 1)
    outcomes = tier.load(keys, buffers(2))
    assert statuses(outcomes) == [Status.CORRUPT, Status.OK]


def test_body_without_a_length(stub, open_tier):
    def chunked(handler):
        value = handler.value()
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for start in range(0, len(value), 7000):
            piece = value[start : start + 7000]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        handler.wfile.write(b"0\r\n\r\n")

    tier = open_tier()
    keys, data = values(2)
    tier.store(keys, data)
    stub.treat("GET", "/blocks/", chunked)
    into = buffers(1)
    assert tier.load(keys[:1], into)[0].num_bytes == 100_000
    assert into[0][:100_000] == data[0]
    assert statuses(tier.load(keys[1:], buffers(1, 99_999))) == [Status.CORRUPT]


def test_announced_length_that_is_too_long_times_out(stub, open_tier):
    def lies(handler):
        value = handler.value()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(value) + 5))
        handler.end_headers()
        handler.wfile.write(value)

    keys, data = values(1)
    open_tier().store(keys, data)
    hasty = open_tier(read_timeout_s=0.4, probe="none")
    stub.treat("GET", "/blocks/", lies)
    assert tried(lambda: hasty.load(keys, buffers(1))) == [Status.TIMEOUT]


def test_announced_length_that_is_too_short_leaves_nothing_for_the_next(stub, open_tier):
    def lies(handler):
        value = handler.value()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(value) - 5))
        handler.end_headers()
        handler.wfile.write(value)

    tier = open_tier(requests_per_call=1)
    keys, data = values(3)
    tier.store(keys, data)
    stub.treat("GET", keys[0].hex(), lies)
    into = buffers(3)
    outcomes = tier.load(keys, into)
    assert outcomes[0].num_bytes == 99_995, "a short value is the core's to reject, by its header"
    assert statuses(outcomes[1:]) == [Status.OK] * 2
    assert into[1][:100_000] == data[1]


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_answer_that_nobody_asked_for_is_not_the_next_ones(stub, open_tier, tmp_path, scheme):
    """Over TLS it lies in the library already, where the descriptor does not show it."""
    stray = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nSTALE"

    def chatters(handler):
        value = handler.value()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(value)}\r\n\r\n".encode()
        handler.wfile.write(head + value[:-16_000])
        handler.wfile.flush()
        handler.wfile.write(
            value[-16_000:] + stray
        )  # one record of TLS, too long for the reader's own buffer

    options = {}
    if scheme == "https":
        stub = StubS3(server_tls(tmp_path))
        options = {"endpoint_url": stub.endpoint, "ca_file": tmp_path / "ca.pem"}
    tier = open_tier(requests_per_call=1, **options)
    keys, data = values(3)
    tier.store(keys, data)
    stub.treat("GET", keys[0].hex(), chatters)
    into = buffers(3)
    assert [outcome.num_bytes for outcome in tier.load(keys, into)] == [len(data[0])] * 3
    assert [bytes(view[: len(data[0])]) for view in into] == [bytes(view) for view in data]
    tier.close()
    if scheme == "https":
        stub.close()


@pytest.mark.parametrize("body", [b"<html>no backend</html>", b"<Error><Code>NoSuchBucket</Code></Error>"])
def test_an_error_page_that_breaks_off_is_no_miss(stub, open_tier, body):
    """Half a page has no word of S3's, and neither has an answer that says no more than 404."""

    def breaks_off(handler):
        handler.send_response(404)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.close_connection = True

    tier = open_tier()
    keys, data = values(1)
    tier.store(keys, data)
    stub.treat("GET", keys[0].hex(), breaks_off)
    assert tried(lambda: tier.load(keys, buffers(1))) == [Status.UNAVAILABLE]
    assert statuses(tier.lookup(keys)) == [Status.OK], "it is not forgotten"


def test_overloaded_server_ends_the_call_and_is_asked_again_later(stub, open_tier):
    tier = open_tier(requests_per_call=1)
    keys, data = values(8)
    tier.store(keys, data)
    before = stub.count("GET", "/blocks/")
    stub.treat("GET", "/blocks/", refuse(503, "SlowDown"), times=1)
    with pytest.raises(TierUnavailableError, match="overloaded"):
        tier.load(keys, buffers(8))
    assert stub.count("GET", "/blocks/") == before + 1, "no retry here: that is the core's"
    assert statuses(tier.load(keys, buffers(8))) == [Status.OK] * 8


def test_overload_in_the_middle_keeps_what_was_read(stub, open_tier):
    tier = open_tier(requests_per_call=1)
    keys, data = values(5)
    tier.store(keys, data)
    stub.treat("GET", keys[2].hex(), refuse(503, "SlowDown"))
    outcomes = tier.load(keys, buffers(5))
    assert statuses(outcomes) == [Status.OK] * 2 + [Status.UNAVAILABLE] * 3


def test_refused_store_is_answered_before_the_body_was_read(stub, open_tier):
    def hasty(handler):
        handler.refuse(403, "AccessDenied")
        handler.wfile.flush()
        handler.close_connection = True

    tier = open_tier(value_bytes=32 << 20)
    keys, data = values(1, 24 << 20)
    stub.treat("PUT", "/blocks/", hasty)
    with pytest.raises((TierAccessError, TierUnavailableError)):
        tier.store(keys, data)


def test_connections_closed_by_the_server_while_idle_are_not_an_error(stub, open_tier):
    def last(handler):
        handler._get(b"")
        handler.close_connection = True  # without saying so

    tier = open_tier(requests_per_call=1)
    keys, data = values(6)
    tier.store(keys, data)
    stub.treat("GET", "/blocks/", last)
    for _ in range(3):
        assert statuses(tier.load(keys, buffers(6))) == [Status.OK] * 6


def test_server_without_checksums_or_multi_object_deletion(stub, open_tier):
    def picky(handler):
        body = handler.body()
        names = [name.lower() for name in handler.headers]
        if any("checksum" in name or "trailer" in name for name in names):
            handler.refuse(400, "InvalidRequest", "unknown checksum header")
        elif "aws-chunked" in handler.headers.get("Content-Encoding", ""):
            handler.refuse(501, "NotImplemented")
        else:
            getattr(handler, f"_{handler.command.lower()}")(body)

    for method in ("GET", "PUT", "POST", "DELETE"):
        stub.treat(method, "/", picky)
    tier = open_tier()
    keys, data = values(3)
    assert statuses(tier.store(keys, data)) == [Status.OK] * 3
    assert statuses(tier.load(keys, buffers(3))) == [Status.OK] * 3
    assert statuses(tier.evict(keys)) == [Status.OK] * 3
    assert not [name for name in stub.objects if "/blocks/" in name]


def test_journal_that_cannot_be_written_costs_no_store(stub, open_tier, caplog):
    tier = open_tier()
    keys, data = values(2)
    stub.treat("PUT", "/journal/", refuse(403, "AccessDenied"))
    assert statuses(tier.store(keys, data)) == [Status.OK] * 2
    assert "journal" in caplog.text
    assert statuses(tier.load(keys, buffers(2))) == [Status.OK] * 2


def test_error_in_the_middle_of_an_upload_in_parts_leaves_nothing(stub, open_tier):
    tier = open_tier(value_bytes=16 << 20, multipart_above="5MiB", multipart_part="5MiB")
    keys, data = values(1, 12 << 20)
    stub.treat("PUT", "partNumber=2", refuse(500, "InternalError"))
    assert statuses(tier.store(keys, data)) == [Status.UNAVAILABLE]
    assert not stub.uploads
    assert not [name for name in stub.objects if "/blocks/" in name]
    stub.behave()
    assert statuses(tier.store(keys, data)) == [Status.OK]
    into = buffers(1, 16 << 20)
    assert tier.load(keys, into)[0].num_bytes == 12 << 20
    assert into[0][: 12 << 20] == data[0]


def test_upload_in_parts_that_fails_with_status_200(stub, open_tier):
    tier = open_tier(value_bytes=16 << 20, multipart_above="5MiB", multipart_part="5MiB")
    keys, data = values(1, 6 << 20)

    def late(handler):
        handler.body()
        handler.answer(200, b"<Error><Code>InternalError</Code><Message>sorry</Message></Error>")

    stub.treat("POST", "uploadId", late)
    assert statuses(tier.store(keys, data)) == [Status.UNAVAILABLE]


def test_server_that_is_restarted(stub, open_tier):
    tier = open_tier()
    keys, data = values(2)
    tier.store(keys, data)
    stub.close()
    for call in (lambda: tier.store(keys, data), lambda: tier.load(keys, buffers(2)), tier.check_health):
        with pytest.raises(TierUnavailableError):
            call()
    with closing(StubS3(port=stub.port)) as again:
        again.objects.update(stub.objects)
        tier.check_health()
        assert statuses(tier.load(keys, buffers(2))) == [Status.OK] * 2
        tier.close()
