"""What a server's log says of transfers: each kind of line, read into plain values.

Other lines pass unread, and so do those of ours that have another form: a log is cut, mixed and
coloured on its way.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MARK = "[FlexKV] "
WAYS = {"load": "H2D", "store": "D2H", "prefetch": "PREFETCH"}

_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_RID = rf"(?P<rid>{_QUOTED}|.*?)"
_INT, _REAL = r"\d{1,18}", r"[\d.]{1,18}"
_TRANSFER = re.compile(
    rf"(?P<way>H2D|D2H|PREFETCH|LAYERWISE) transfer request: {_INT} finished "
    rf"transfer data size: (?P<gb>{_REAL}) GB "
    rf"transfer time: (?P<seconds>{_REAL}) s transfer bandwidth: {_REAL} GB/s "
    rf"rid={_RID} blocks=(?P<blocks>{_INT}) tokens=(?P<tokens>{_INT})(?: from=(?P<places>\S*))?"
    r"(?: choice=(?P<choice>\S+))?"
)
_RECEIPT = re.compile(
    rf"(?P<kind>load|store|prefetch) request={_RID} status=(?P<status>\w+) tokens=(?P<tokens>{_INT}) "
    rf"blocks=(?P<blocks>{_INT}) bytes=(?P<bytes>{_INT}) "
    rf"staging=(?P<staging>{_REAL})ms copy=(?P<copy>{_REAL})ms total={_REAL}ms bandwidth={_REAL}GB/s"
    r"(?: from (?P<places>.*?))?(?: choice=(?P<choice>\S+))?(?: cause=(?P<cause>.*))?$"
)
_LOOKUP = re.compile(
    rf"lookup rid={_RID} prompt=(?P<prompt>{_INT}) device=(?P<device>{_INT}) promised=(?P<promised>{_INT}) "
    r"from=(?P<places>.*?) why=(?P<why>.*)$"
)
_CHOICE = re.compile(r"(?P<action>\w+):(?P<tier>[^\s(]+)\((?P<facts>[^\s()]*)\)")
_COUNTERS = re.compile(r"counters: (?P<counters>.+)$")
_PLACE = re.compile(r"([^\s,:=]+)[:=](\d{1,18})")  # host:64,disk:85 of transfers; host=64 disk=85 of receipts
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Transfer:
    """One transfer that ended well.

    Attributes:
        way: ``H2D``, ``D2H`` or ``PREFETCH``.
        rid: The request.
        tokens: Tokens that were moved.
        blocks: Blocks that they lie in.
        num_bytes: Their KV bytes; to a thousand where only the short line was logged.
        seconds: Time of the copy, or of the staging where there is none.
        by_tier: Where the tokens came from, if the line tells it.
    """

    way: str
    rid: str
    tokens: int
    blocks: int
    num_bytes: int
    seconds: float
    by_tier: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Promise:
    """What a lookup promised a request, and why not more."""

    rid: str
    prompt: int
    device: int
    promised: int
    by_tier: Mapping[str, int]
    why: str


@dataclass(frozen=True)
class Failure:
    """One job that did not end well."""

    kind: str
    rid: str
    status: str
    cause: str
    by_tier: Mapping[str, int]


@dataclass(frozen=True)
class Choice:
    """What was weighed for a request, as the log has it: numbers are texts with their unit."""

    rid: str
    action: str
    tier: str
    facts: Mapping[str, str]


@dataclass
class ServerLog:
    """All that was found, in the log's order.

    Attributes:
        transfers: Those that ended well.
        promises: For each request the largest promise, the last one of equal ones.
        failures: Jobs that failed or were cancelled.
        choices: What was weighed between loading and computing, by request and action; the last of each.
        counters: The last line of counters; empty if there was none.
        num_lines: Lines that were read, of any kind.
    """

    transfers: list[Transfer] = field(default_factory=list)
    promises: dict[str, Promise] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    choices: dict[tuple[str, str], Choice] = field(default_factory=dict)
    counters: str = ""
    num_lines: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing in it is of the chain."""
        return not (self.transfers or self.promises or self.failures or self.choices or self.counters)


def read_log(lines: Iterable[str]) -> ServerLog:
    """Read a whole log, line by line."""
    reader = _Reader()
    for line in lines:
        reader.read(line)
    return reader.log


class _Reader:
    """Sorts lines.  At DEBUG a finished job has two: its receipt, then the short line."""

    def __init__(self) -> None:
        self.log = ServerLog()
        self._single: dict[tuple[str, str, int, int], list[Transfer]] = {}  # receipts without short line

    def read(self, line: str) -> None:
        self.log.num_lines += 1
        _, mark, text = line.partition(MARK)
        if not mark:
            return
        text = _COLOUR.sub("", text).rstrip()
        for pattern, take in (
            (_TRANSFER, self._transfer),
            (_RECEIPT, self._receipt),
            (_LOOKUP, self._lookup),
            (_COUNTERS, self._counters),
        ):
            found = pattern.match(text)
            if found:
                take(found)
                return

    def _transfer(self, found: re.Match[str]) -> None:
        way = "H2D" if found["way"] == "LAYERWISE" else found["way"]  # another way to wait, not to go
        rid, by_tier = _plain(found["rid"]), _places(found["places"])
        tokens, blocks = int(found["tokens"]), int(found["blocks"])
        self._choice(rid, found["choice"])
        receipts = self._single.get((way, rid, tokens, blocks))
        if receipts:
            receipt = receipts.pop(0)  # counted already, and with more digits
            receipt.by_tier = receipt.by_tier or by_tier
            return
        num_bytes, seconds = round(_number(found["gb"]) * 1e9), _number(found["seconds"])
        self.log.transfers.append(Transfer(way, rid, tokens, blocks, num_bytes, seconds, by_tier))

    def _receipt(self, found: re.Match[str]) -> None:
        kind, rid, by_tier = found["kind"], _plain(found["rid"]), _places(found["places"])
        self._choice(rid, found["choice"])
        if found["status"] == "recompute":
            return
        if found["status"] != "ok":
            cause = found["cause"] or "unknown"
            self.log.failures.append(Failure(kind, rid, found["status"], cause, by_tier))
            return
        seconds = (_number(found["copy"]) or _number(found["staging"])) / 1e3
        tokens, blocks = int(found["tokens"]), int(found["blocks"])
        transfer = Transfer(WAYS[kind], rid, tokens, blocks, int(found["bytes"]), seconds, by_tier)
        self.log.transfers.append(transfer)
        self._single.setdefault((transfer.way, rid, tokens, blocks), []).append(transfer)

    def _choice(self, rid: str, text: str | None) -> None:
        found = _CHOICE.fullmatch(text or "")
        if found:
            facts = dict(fact.split("=", 1) for fact in found["facts"].split(",") if "=" in fact)
            choice = Choice(rid, found["action"], found["tier"], facts)
            self.log.choices[rid, choice.action] = choice

    def _lookup(self, found: re.Match[str]) -> None:
        rid, promised = _plain(found["rid"]), int(found["promised"])
        before = self.log.promises.get(rid)
        if before is None or promised >= before.promised:
            prompt, device = int(found["prompt"]), int(found["device"])
            places, why = _places(found["places"]), _plain(found["why"])
            self.log.promises[rid] = Promise(rid, prompt, device, promised, places, why)

    def _counters(self, found: re.Match[str]) -> None:
        self.log.counters = found["counters"]


def _plain(text: str) -> str:
    """A text as it was before ``repr`` quoted it; what is not quoted stays as it is."""
    if re.fullmatch(_QUOTED, text):
        try:
            return str(ast.literal_eval(text))
        except (SyntaxError, ValueError):
            return text
    return text


def _places(text: str | None) -> dict[str, int]:
    return {tier: int(tokens) for tier, tokens in _PLACE.findall(text or "")}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # 1.2.3: cut or mixed
        return 0.0
