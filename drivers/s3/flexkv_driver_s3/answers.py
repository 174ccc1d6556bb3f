"""What S3 answers in XML, read with nothing more than is needed."""

from __future__ import annotations

from xml.etree import ElementTree

from .refusals import NotS3Error, RefusedError


def read_listing(answer: bytes) -> tuple[list[tuple[str, int]], bool]:
    """A page of a listing: names with lengths, and whether there are more.

    Raises:
        NotS3Error: that is no listing.
    """
    try:
        root = ElementTree.fromstring(answer.strip())
        rows = [
            (str(row.findtext("{*}Key")), int(row.findtext("{*}Size") or 0))
            for row in root.iterfind("{*}Contents")
        ]
    except (ElementTree.ParseError, ValueError) as exc:
        raise NotS3Error("the answer is no listing") from exc
    if not root.tag.endswith("ListBucketResult"):
        raise NotS3Error(f"the answer is a {root.tag}, not a listing")
    return rows, root.findtext("{*}IsTruncated") == "true"


def read_deletion(answer: bytes) -> dict[str, BaseException]:
    """The names that were not deleted, each with why.

    Raises:
        RefusedError: the answer is an error.
        NotS3Error: it is no answer to a deletion.
    """
    root = _root(answer)
    if not root.tag.endswith("DeleteResult"):
        raise NotS3Error(f"the answer is a {root.tag}, not the end of a deletion")
    failures: dict[str, BaseException] = {}
    for row in root.iterfind("{*}Error"):
        code, message = row.findtext("{*}Code") or "", row.findtext("{*}Message") or ""
        failures[str(row.findtext("{*}Key"))] = RefusedError(
            404 if code == "NoSuchKey" else 200, code, message
        )
    return failures


def read_text(answer: bytes, tag: str) -> str:
    """The text of a child of an answer's root.

    Raises:
        RefusedError: the answer is an error.
        NotS3Error: there is no such child.
    """
    root = _root(answer)
    text = root.findtext(f"{{*}}{tag}")
    if text is None:
        raise NotS3Error(f"the answer has no {tag}")
    return text


def _root(answer: bytes) -> ElementTree.Element:
    try:
        root = ElementTree.fromstring(answer.strip())  # spaces keep a long completion's connection alive
    except ElementTree.ParseError as exc:
        raise NotS3Error("the answer is no XML") from exc
    if root.tag == "Error":
        raise RefusedError(200, root.findtext("Code") or "", root.findtext("Message") or "")
    return root
