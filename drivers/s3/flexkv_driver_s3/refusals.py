"""What an answer other than success says, and the exceptions for it."""

from __future__ import annotations

import http.client
import re
from datetime import datetime
from email.utils import parsedate_to_datetime

ERROR_BODY_BYTES = 64 << 10
_SIGNED_AT = re.compile(r"[?&]X-Amz-Date=(\d{8}T\d{6}Z)")
_TAG = re.compile(rb"<(Code|Message|Region)>([^<]{0,500})</")


class RefusedError(Exception):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        code: S3's error code, or an empty string.
        message: S3's message.
        region: The bucket's region where the server named it.
        skew_s: By how much the server's clock differs from the one that the request was signed by.
    """

    def __init__(self, status: int, code: str, message: str, region: str = "", skew_s: float = 0.0) -> None:
        self.status = status
        self.code = code
        self.message = message
        self.region = region
        self.skew_s = skew_s
        super().__init__(f"{status} {code} {message}".strip())


class NotS3Error(Exception):
    """An answer that no S3 service gives."""


class TooLongError(Exception):
    """The object is longer than the buffer."""


class ShortBodyError(Exception):
    """The connection ended before the body did."""


def refusal(response: http.client.HTTPResponse, body: bytes, target: str) -> RefusedError:
    """What the server's error means: its words, and what its headers tell beside them.

    Args:
        response: The answer's status and headers.
        body: The front of its body.
        target: The signed request's path and query.
    """
    found = {name.decode(): text.decode(errors="replace") for name, text in _TAG.findall(body)}
    region = found.get("Region") or str(response.headers.get("x-amz-bucket-region", ""))
    skew_s = _skew_s(target, str(response.headers.get("Date", "")))
    return RefusedError(response.status, found.get("Code", ""), found.get("Message", ""), region, skew_s)


def _skew_s(target: str, date: str) -> float:
    """Seconds between a signature's time and an answer's; 0 where one of them is not told."""
    signed = _SIGNED_AT.search(target)
    try:
        answered = parsedate_to_datetime(date)
    except ValueError:
        return 0.0
    if signed is None or answered.tzinfo is None:
        return 0.0
    at = datetime.strptime(f"{signed[1]}+0000", "%Y%m%dT%H%M%SZ%z")
    return abs((answered - at).total_seconds())
