"""The driver's signatures against botocore's, of the same moment."""

import datetime

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from flexkv_driver_s3 import signing
from flexkv_driver_s3.errors import SKEW_S

NOW = datetime.datetime(2026, 11, 30, 2, 3, 4)
REQUESTS = [
    ("GET", f"flexkv/{'00' * 32}/blocks/ab/{'ab' * 32}", ""),
    ("PUT", f"flexkv/{'00' * 32}/journal/1-a-1", ""),
    ("GET", "", "list-type=2&max-keys=1000&prefix=a%2Fb.c%2F&start-after=a%2Fb~%20%3D"),
    ("POST", "", "delete="),
    ("POST", "x", "uploads="),
    ("PUT", "x", "partNumber=12&uploadId=2~Q%2Ba%2Fb%3D%3D"),
]


@pytest.fixture
def at_one_moment(monkeypatch):
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_args, **_kwargs: NOW)
    monkeypatch.setattr(signing, "utc_now", NOW.timetuple)


@pytest.mark.usefixtures("at_one_moment")
@pytest.mark.parametrize("token", [None, "short", "a/b+c== d"])
@pytest.mark.parametrize(
    "base_url",
    [
        "http://127.0.0.1:17480/bucket",
        "http://store.example:80/bucket",
        "https://bucket.s3.eu-west-1.amazonaws.com",
        "https://Store.example:9000/bucket",
        "https://store.example:443/bucket",
        "http://[::1]:9000/bucket",
    ],
)
def test_signatures_are_botocores(base_url, token):
    credentials = Credentials("AKIA/+ID", "se/cr+et", token)
    signer = signing.Signer(credentials, "eu-west-1", base_url)
    theirs = botocore.auth.S3SigV4QueryAuth(credentials, "s3", "eu-west-1", expires=SKEW_S)
    path = "/bucket" if base_url.endswith("/bucket") else ""
    for method, name, query in REQUESTS:
        request = AWSRequest(method, f"{base_url}/{name}" + (f"?{query}" if query else ""))
        theirs.add_auth(request)
        target = signer.sign(method, f"{path}/{name}", query)
        assert parts_of(target) == parts_of("/" + request.url.split("/", 3)[3]), (method, name, query)


@pytest.mark.usefixtures("at_one_moment")
def test_renewed_keys_and_a_new_day_are_signed_with(monkeypatch):
    credentials = Credentials("id", "old")
    signer = signing.Signer(credentials, "us-east-1", "http://127.0.0.1:1/bucket")
    first = signer.sign("GET", "/bucket/x")
    assert signer.sign("GET", "/bucket/x") == first
    credentials.secret_key = "new"
    assert signer.sign("GET", "/bucket/x") != first
    credentials.secret_key = "old"
    assert signer.sign("GET", "/bucket/x") == first
    later = NOW + datetime.timedelta(days=1)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_args, **_kwargs: later)
    monkeypatch.setattr(signing, "utc_now", later.timetuple)
    request = AWSRequest("GET", "http://127.0.0.1:1/bucket/x")
    botocore.auth.S3SigV4QueryAuth(credentials, "s3", "us-east-1", expires=SKEW_S).add_auth(request)
    assert parts_of(signer.sign("GET", "/bucket/x")) == parts_of("/" + request.url.split("/", 3)[3])


def parts_of(target):
    """A signed target: its path, and its parameters in any order."""
    path, _, query = target.partition("?")
    return path, sorted(query.split("&"))
