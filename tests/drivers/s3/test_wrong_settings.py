"""Wrong settings fail when the tier is opened, in one line that says what to mend, and without secrets."""

from __future__ import annotations

import http.server
import threading
import time

import pytest
from pydantic import ValidationError

from flexkv_core import FlexKVError, TierAccessError, TierError, TierUnavailableError
from flexkv_driver_s3 import signing
from flexkv_driver_s3.config import S3Config
from tests.support.redis_server import closed_port
from tests.support.s3_stub import StubS3, refuse
from tests.support.s3_tls import server_tls
from tests.support.waiting import DEADLINE_S

ANSWERS = [
    (404, "NoSuchBucket", TierError, "create it, or mend options.bucket"),
    (403, "AccessDenied", TierAccessError, "allow s3:ListBucket"),
    (403, "SignatureDoesNotMatch", TierAccessError, "options.secret_access_key"),
    (403, "InvalidAccessKeyId", TierAccessError, "options.access_key_id"),
    (403, "RequestTimeTooSkewed", TierAccessError, "clock"),
    (400, "ExpiredToken", TierAccessError, "session token"),
    (301, "PermanentRedirect", TierError, "another region"),
    (400, "AuthorizationHeaderMalformed", TierError, "another region"),
    (503, "SlowDown", TierUnavailableError, "overloaded"),
    (500, "", TierUnavailableError, "overloaded"),
    (418, "Teapot", TierError, "refuses"),
]


@pytest.mark.parametrize(("status", "code", "error", "words"), ANSWERS)
def test_what_the_server_says(stub, open_tier, status, code, error, words):
    stub.treat("GET", "list-type", refuse(status, code))
    with pytest.raises(error, match=words) as caught:
        open_tier()
    assert_one_line(caught.value)
    assert caught.value.operation == "open"
    assert caught.value.tier == "far"


def test_region_is_named_where_the_server_names_it(stub, open_tier):
    stub.treat("GET", "list-type", refuse(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-west-3"}))
    with pytest.raises(TierError, match="set options.region to eu-west-3"):
        open_tier()


def test_signed_request_that_the_server_finds_expired_is_a_matter_of_clocks(stub, open_tier):
    stub.treat("GET", "list-type", refuse(403, "AccessDenied", "Request has expired"))
    with pytest.raises(TierAccessError, match="clock"):
        open_tier()


@pytest.mark.parametrize(("hours", "words"), [(0, "allow s3:ListBucket"), (-2, "clock"), (2, "clock")])
def test_signed_at_another_time_and_denied_without_a_word_is_a_matter_of_clocks(
    stub, open_tier, monkeypatch, hours, words
):
    monkeypatch.setattr(signing, "utc_now", lambda: time.gmtime(time.time() + hours * 3600))
    stub.treat("GET", "list-type", refuse(403, "AccessDenied"))
    with pytest.raises(TierAccessError, match=words):
        open_tier()


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_keys_that_may_only_read(stub, open_tier, method):
    stub.treat(method, "/", refuse(403, "AccessDenied"))
    with pytest.raises(TierAccessError, match="PutObject"):
        open_tier()
    stub.behave()
    stub.treat("PUT", "/", refuse(403, "AccessDenied"))
    assert open_tier(probe="read").check_health() is None


ENDPOINTS = [
    ("http://127.0.0.1:{closed}", "nobody listens"),
    ("http://no-such-host.invalid", "does not resolve"),
    ("https://127.0.0.1:{port}", "does the server speak https"),
]


@pytest.mark.parametrize(("endpoint", "words"), ENDPOINTS)
def test_wrong_endpoints(stub, open_tier, endpoint, words):
    with closed_port() as closed, pytest.raises(TierUnavailableError, match=words) as caught:
        open_tier(endpoint_url=endpoint.format(port=stub.port, closed=closed))
    assert_one_line(caught.value)


def test_plain_http_to_a_tls_port(open_tier, tmp_path):
    server = StubS3(server_tls(tmp_path))
    try:
        with pytest.raises(TierUnavailableError, match="expect https"):
            open_tier(endpoint_url=server.endpoint.replace("https", "http"))
    finally:
        server.close()


def test_tls_with_an_authority_of_ones_own(open_tier, tmp_path):
    server = StubS3(server_tls(tmp_path))
    try:
        with pytest.raises(TierAccessError, match=r"options\.ca_file"):
            open_tier(endpoint_url=server.endpoint)
        tier = open_tier(endpoint_url=server.endpoint, ca_file=tmp_path / "ca.pem")
        keys, value = [bytes(32), bytes([1]) * 32], memoryview(bytes(range(256)) * 4000)
        assert all(row.is_ok for row in tier.store(keys, [value, value]))
        into = [memoryview(bytearray(1 << 20)) for _ in keys]
        assert all(row.is_ok for row in tier.load(keys, into))
        assert into[1][: len(value)] == value
        assert all(row.is_ok for row in tier.evict(keys))
        with pytest.raises(TierError, match="ca_file cannot be read"):
            open_tier(endpoint_url=server.endpoint, ca_file=tmp_path / "none.pem")
        open_tier(endpoint_url=server.endpoint, verify=False).check_health()
    finally:
        server.close()


def test_server_that_is_no_s3(open_tier):
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html><p>Welcome</html>")

        def log_message(self, *_args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        with pytest.raises(TierUnavailableError, match="does not answer as an S3 service"):
            open_tier(endpoint_url=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join(DEADLINE_S)


def test_no_keys_anywhere(open_tier, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(TierAccessError, match="set options.access_key_id"):
        open_tier(access_key_id=None, secret_access_key=None)
    with pytest.raises(TierAccessError, match=r"options\.profile"):
        open_tier(access_key_id=None, secret_access_key=None, profile="nobody")


def test_no_probe_opens_without_the_store_and_finds_it_later(stub, open_tier):
    stub.treat("GET", "list-type", refuse(503, "SlowDown"))
    tier = open_tier(probe="none")
    with pytest.raises(TierUnavailableError):
        tier.lookup([bytes(32)])
    with pytest.raises(TierUnavailableError):
        tier.check_health()
    stub.behave()
    tier.check_health()


FAULTY = [
    {"bucket": "a b"},
    {"endpoint_url": "127.0.0.1:9000"},
    {"endpoint_url": "http://host/path"},
    {"endpoint_url": "ftp://host"},
    {"endpoint_url": "http://host:99999"},
    {"endpoint_url": "http://host:port"},
    {"endpoint_url": "http://a..b"},
    {"endpoint_url": f"http://{'a' * 64}.org"},
    {"endpoint_url": "http://[::1"},
    {"access_key_id": "lonely"},
    {"session_token": "lonely"},
    {"prefix": "a?b"},
    {"prefix": "../up"},
    {"shard_chars": 5},
    {"multipart_part": "1MiB"},
    {"timeout": 3},
]


@pytest.mark.parametrize("options", FAULTY)
def test_options_that_cannot_be(options):
    with pytest.raises(ValidationError):
        S3Config(**{"bucket": "bucket", **options})


def test_secrets_stay_secret():
    config = S3Config(bucket="bucket", access_key_id="key-id", secret_access_key="hush")
    assert "hush" not in f"{config!r} {config} {config.model_dump_json()}"
    with pytest.raises(ValidationError) as caught:
        S3Config(bucket="bucket", secret_access_key="hush")
    assert "hush" not in str(caught.value)


def assert_one_line(error: FlexKVError) -> None:
    text = str(error)
    assert "\n" not in text
    assert "much-too-secret" not in text
    assert "Signature=" not in text
