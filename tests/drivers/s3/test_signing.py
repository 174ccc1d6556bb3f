"""The driver's signatures against botocore's, of the same moment."""

import time

import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from flexkv_driver_s3 import signing
from flexkv_driver_s3.errors import SKEW_S

REQUESTS = [
    ("GET", f"flexkv/{'00' * 32}/blocks/ab/{'ab' * 32}", ""),
    ("PUT", f"flexkv/{'00' * 32}/journal/1-a-1", ""),
    ("GET", "", "list-type=2&max-keys=1000&prefix=a%2Fb.c%2F&start-after=a%2Fb~%20%3D"),
    ("POST", "", "delete="),
    ("POST", "x", "uploads="),
    ("PUT", "x", "partNumber=12&uploadId=2~Q%2Ba%2Fb%3D%3D"),
]
BASE_URLS = [
    "http://127.0.0.1:17480/bucket",
    "http://store.example:80/bucket",
    "https://bucket.s3.eu-west-1.amazonaws.com",
    "https://store.example:9000/bucket",
    "https://store.example:443/bucket",
    "http://[::1]:9000/bucket",
]


@pytest.mark.parametrize("token", [None, "short", "a/b+c== d"])
@pytest.mark.parametrize("base_url", BASE_URLS)
def test_signatures_are_botocores(monkeypatch, base_url, token):
    credentials = Credentials("AKIA/+ID", "se/cr+et", token)
    signer = signing.Signer(credentials, "eu-west-1", base_url)
    for method, name, query in REQUESTS:
        check(monkeypatch, credentials, signer, base_url, method, name, query)


def test_renewed_keys_and_a_new_day_are_signed_with(monkeypatch):
    credentials = Credentials("id", "old")
    signer = signing.Signer(credentials, "eu-west-1", BASE_URLS[0])
    check(monkeypatch, credentials, signer, BASE_URLS[0], *REQUESTS[0])
    credentials.secret_key = "new"
    check(monkeypatch, credentials, signer, BASE_URLS[0], *REQUESTS[0])
    yesterday = time.gmtime(time.time() - 86400)
    monkeypatch.setattr(signing, "utc_now", lambda: yesterday)
    signer.sign("GET", "/bucket/x")
    check(monkeypatch, credentials, signer, BASE_URLS[0], *REQUESTS[0])


def check(monkeypatch, credentials, signer, base_url, method, name, query):
    """Let botocore sign a request, and then ``signer`` at the moment that botocore wrote down."""
    request = AWSRequest(method, f"{base_url}/{name}" + (f"?{query}" if query else ""))
    S3SigV4QueryAuth(credentials, "s3", "eu-west-1", expires=SKEW_S).add_auth(request)
    wanted = parts_of("/" + request.url.split("/", 3)[3])
    (stamp,) = [pair for pair in wanted[1] if pair.startswith("X-Amz-Date=")]
    moment = time.strptime(stamp, "X-Amz-Date=%Y%m%dT%H%M%SZ")
    monkeypatch.setattr(signing, "utc_now", lambda: moment)
    path = "/" + base_url.split("/", 3)[3] if base_url.count("/") > 2 else ""
    assert parts_of(signer.sign(method, f"{path}/{name}", query)) == wanted, (method, name, query)


def parts_of(target):
    """A signed target: its path, and its parameters in any order."""
    path, _, query = target.partition("?")
    return path, sorted(query.split("&"))


def test_the_zone_of_an_address_is_not_signed():
    """``http.client`` does not send it."""
    signed = [signing._host_header(f"http://[fe80::1{zone}]:9000/bucket") for zone in ("", "%lo", "%25eth0")]
    assert signed == ["[fe80::1]:9000"] * 3
