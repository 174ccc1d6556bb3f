"""One table: what botocore, the socket and the server say -> our errors, with the mend.

A line names what happened and what to do about it; it never holds a secret (the message of a
signature error is not repeated, since servers put the signed text into it).
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, replace

from botocore import exceptions as boto

from flexkv_core import (
    Status,
    TierAccessError,
    TierError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
    UnsupportedOperationError,
)

from .refusals import NotS3Error, RefusedError, ShortBodyError, TooLongError

SKEW_S = 900
"""Clocks may differ by so much, says S3; a signed request is good for as long."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What a failure means.

    Attributes:
        status: For one key's outcome.
        error: For a call that failed as a whole.
        line: What happened and how to mend it.
        is_general: Whether other keys would fail in the same way now.
    """

    status: Status
    error: type[TierError]
    line: str
    is_general: bool = True


def _denied(line: str) -> Fault:
    return Fault(Status.DENIED, TierAccessError, line)


def _wrong(line: str) -> Fault:
    return Fault(Status.INVALID, TierError, line)


def _away(line: str, *, is_general: bool = True) -> Fault:
    return Fault(Status.UNAVAILABLE, TierUnavailableError, line, is_general)


_LATE = Fault(Status.TIMEOUT, TierTimeoutError, "no answer in time")
_FULL = Fault(Status.NO_SPACE, TierFullError, "the store is full or over its quota")
_REGION = _wrong("the bucket is in another region: set options.region")
_CLOCK = _denied("this machine's clock differs too much from the server's: synchronise it (NTP)")
_SECRET = _denied("the signature does not match: mend options.secret_access_key (or a proxy alters requests)")
_KEY_ID = _denied("the access key is not known there: mend options.access_key_id")
_TOKEN = _denied("the session token is expired or wrong: renew the temporary keys")
_RIGHTS = _denied(
    "these keys may not do this: allow s3:ListBucket, GetObject, PutObject and DeleteObject on the "
    "bucket and prefix"
)
_BUSY = _away("the store is overloaded or under repair")

BY_CODE: dict[str, Fault] = {
    "NoSuchBucket": _wrong("the bucket does not exist: create it, or mend options.bucket"),
    "InvalidBucketName": _wrong("that is no bucket name: mend options.bucket"),
    "AccessDenied": _RIGHTS,
    "AllAccessDisabled": _RIGHTS,
    "AccountProblem": _RIGHTS,
    "SignatureDoesNotMatch": _SECRET,
    "InvalidAccessKeyId": _KEY_ID,
    "ExpiredToken": _TOKEN,
    "InvalidToken": _TOKEN,
    "TokenRefreshRequired": _TOKEN,
    "RequestTimeTooSkewed": _CLOCK,
    "RequestExpired": _CLOCK,
    "PermanentRedirect": _REGION,
    "TemporaryRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "AuthorizationQueryParametersError": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "SlowDown": _BUSY,
    "Throttling": _BUSY,
    "TooManyRequests": _BUSY,
    "RequestLimitExceeded": _BUSY,
    "ServiceUnavailable": _BUSY,
    "InternalError": _BUSY,
    "RequestTimeout": _away("the server waited in vain for the request's bytes", is_general=False),
    "IncompleteBody": _away("the server got only some of the request's bytes", is_general=False),
    "NoSuchUpload": _away("the upload in parts was given up meanwhile", is_general=False),
    "QuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    "InsufficientStorage": _FULL,
    "EntityTooLarge": Fault(
        Status.INVALID, TierError, "the value is too long for this store", is_general=False
    ),
    "NotImplemented": Fault(
        Status.UNSUPPORTED, UnsupportedOperationError, "the store does not know this request"
    ),
}

BY_STATUS: dict[int, Fault] = {
    301: _REGION,
    307: _REGION,
    400: _wrong("the server takes the request for malformed: check http or https, region and addressing"),
    401: _denied("the server does not accept these keys"),
    403: _RIGHTS,
    404: _wrong("there is no such bucket or no S3 service at this address: check endpoint and bucket"),
    405: _wrong("the server does not allow this request: check options.endpoint_url and addressing"),
    408: _LATE,
    409: _away("another request changes the same object", is_general=False),
    413: Fault(
        Status.INVALID,
        TierError,
        "the value is too long for this server (or for a proxy's limit for bodies)",
        is_general=False,
    ),
    429: _BUSY,
    501: BY_CODE["NotImplemented"],
    507: _FULL,
}

BY_TYPE: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], Fault], ...] = (
    (
        socket.gaierror,
        _away("the endpoint's name does not resolve: check options.endpoint_url and DNS"),
    ),
    (
        ssl.SSLCertVerificationError,
        _denied("the server's certificate is not trusted: set options.ca_file, or mend the host name"),
    ),
    ((FileNotFoundError, PermissionError), _wrong("options.ca_file cannot be read")),
    (
        (ssl.SSLEOFError, ssl.SSLZeroReturnError),
        _away("the server ended the TLS connection", is_general=False),
    ),
    (ssl.SSLError, _away("TLS failed: does the server speak https on this port?")),
    (boto.NoCredentialsError, _denied("no keys found: set options.access_key_id and secret_access_key")),
    (boto.PartialCredentialsError, _denied("the keys found are incomplete")),
    (boto.CredentialRetrievalError, _denied("the keys could not be fetched")),
    (boto.ProfileNotFound, _denied("there is no such profile: mend options.profile")),
    (boto.ConnectTimeoutError, replace(_LATE, line="no connection in time: is the endpoint reachable?")),
    (boto.ReadTimeoutError, _LATE),
    (TimeoutError, _LATE),
    (ConnectionRefusedError, _away("nobody listens at the endpoint: check its address and port")),
    (NotS3Error, _away("the endpoint does not answer as an S3 service does")),
    (TooLongError, Fault(Status.CORRUPT, TierError, "the object is longer than a block", is_general=False)),
    (ShortBodyError, _away("the object arrived incomplete", is_general=False)),
    (
        http.client.RemoteDisconnected,
        _away("the server closed the connection without an answer: does it expect https?", is_general=False),
    ),
    (ConnectionError, _away("the connection was lost", is_general=False)),
    (
        http.client.HTTPException,
        _away("the answer is no HTTP: does the server expect https?", is_general=False),
    ),
    (boto.SSLError, _away("TLS failed: does the server speak https on this port?")),
    (boto.ConnectionClosedError, _away("the server closed the connection: does it expect https?")),
    (boto.EndpointConnectionError, _away("the endpoint cannot be reached")),
    (boto.HTTPClientError, _away("the endpoint cannot be reached")),
    (OSError, _away("the endpoint cannot be reached")),
    (boto.ParamValidationError, _wrong("botocore refuses the settings")),
    (boto.BotoCoreError, _away("the endpoint does not answer as an S3 service does")),
)

EXPECTED: tuple[type[Exception], ...] = (
    RefusedError,
    NotS3Error,
    TooLongError,
    ShortBodyError,
    OSError,
    http.client.HTTPException,
    boto.ClientError,
    boto.BotoCoreError,
)
"""What the library and the wire raise; anything else is a bug and is not translated."""

_TELLING = (ConnectionError, NotS3Error, ShortBodyError, TooLongError, http.client.HTTPException, OSError)


def fault_of(exc: BaseException) -> Fault:
    """The most specific row of the table for an exception of ``EXPECTED``."""
    if isinstance(exc, boto.ClientError):
        return _answer_fault(_as_refusal(exc))
    if isinstance(exc, RefusedError):
        return _answer_fault(exc)
    chain = list(_chain(exc))
    for kind, fault in BY_TYPE:
        for link in chain:
            if isinstance(link, kind):
                return replace(fault, line=_with_detail(fault.line, link))
    raise AssertionError(f"not in EXPECTED: {exc!r}")


def is_missing(exc: BaseException) -> bool:
    """Whether the server said that the object (not the bucket) is not there."""
    refusal = _as_refusal(exc) if isinstance(exc, boto.ClientError) else exc
    return (
        isinstance(refusal, RefusedError)
        and refusal.status == 404
        and refusal.code in {"", "NoSuchKey", "404", "NotFound"}
    )


def _answer_fault(refusal: RefusedError) -> Fault:
    fault = BY_CODE.get(refusal.code) or BY_STATUS.get(refusal.status)
    if fault is None:
        fault = _BUSY if refusal.status >= 500 else _wrong("the server refuses the request")
    if fault is _RIGHTS and _is_a_matter_of_clocks(refusal):
        fault = _CLOCK
    line = fault.line
    if fault is _REGION and refusal.region:
        line = f"{line} to {refusal.region}"
    elif refusal.elsewhere and not refusal.code:
        line = f"the endpoint sends requests elsewhere: set options.endpoint_url to {refusal.elsewhere}"
    return replace(fault, line=f"{line} ({refusal.status} {refusal.code or 'without a code'})")


def _is_a_matter_of_clocks(refusal: RefusedError) -> bool:
    """Whether an "access denied" means the signature's time.  Ceph's gateway says no more than that."""
    message = refusal.message.lower()
    return "expired" in message or "not yet valid" in message or refusal.skew_s >= SKEW_S


def _as_refusal(exc: boto.ClientError) -> RefusedError:
    error = exc.response.get("Error", {})
    meta = exc.response.get("ResponseMetadata", {})
    headers = meta.get("HTTPHeaders", {})
    region = error.get("Region") or headers.get("x-amz-bucket-region", "")
    code = str(error.get("Code", ""))
    status, message = int(meta.get("HTTPStatusCode", 0)), str(error.get("Message", ""))
    return RefusedError(status, code, message, region=str(region))


def _chain(exc: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[object] = [exc]
    while todo:
        link = todo.pop(0)
        if isinstance(link, BaseException) and id(link) not in seen:
            seen.add(id(link))
            yield link
            # botocore and urllib3 keep what they wrap as an attribute, an argument or the context.
            wrapped = getattr(link, "kwargs", None)
            inner = wrapped.get("error") if isinstance(wrapped, dict) else None
            todo += [link.__cause__, link.__context__, inner, getattr(link, "reason", None), *link.args]


def _with_detail(line: str, link: BaseException) -> str:
    if isinstance(link, _TELLING) and not isinstance(link, (ssl.SSLCertVerificationError, TimeoutError)):
        text = str(link) or type(link).__name__
        return f"{line} ({text[:160]})"
    if isinstance(link, ssl.SSLCertVerificationError):
        return f"{line} ({link.verify_message})"
    return line
