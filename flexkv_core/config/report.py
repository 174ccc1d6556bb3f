"""Findings: every fault of a configuration, collected and told at once, without a value in it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError
from ..models import TIER_NAME_PATTERN, TierConfig
from .schema import Path, choices, describe_type, dotted, field_at, field_names, model_at
from .text import kind_of

_USERINFO = re.compile(r"(://)[^/\s@]*@")
_LIMITS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_PATTERNS = {
    TIER_NAME_PATTERN: "must be of a-z, 0-9, - and _, begin with a letter, and have at most 32 of them",
}

_HINTS = {
    "tokens_per_block": "block_tokens",
    "enable_cpu": "cpu_cache_gb",
    "enable_ssd": "ssd_cache_gb",
    "num_cpu_blocks": "cpu_cache_gb",
    "num_ssd_blocks": "ssd_cache_gb",
    "swa_multi_layer": "swa_multi_group",
}
"""Names that guides of FlexKV show, or that its code uses inside, and what they are here."""


_NEEDLESS = {
    "wrap": "every tier is wrapped already (deadline, retries, breaker, checksum): leave it out",
}
"""What people write of a tier, and why it is no field."""


def suggestion(name: str, names: Iterable[str]) -> str:
    """``, did you mean timeout_s?`` or nothing."""
    close = nearest(name, names)
    return f", did you mean {close}?" if close else ""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Which of ``names`` is probably meant by one that is none of them."""
    known = sorted(set(names))
    hint = _HINTS.get(name.lower())
    close = [hint] if hint in known else difflib.get_close_matches(name, known, n=1)
    return close[0] if close else None


def mask_urls(text: str) -> str:
    """``redis://user:password@host`` -> ``redis://****@host``."""
    return _USERINFO.sub(r"\1****@", text)


@dataclass
class Report:
    """What is wrong, and what is only worth saying.

    Attributes:
        file: The default source of a finding.
        faults: (source, line), in the order in which they were found.
        notices: One line each: values that lost, variables without effect.
    """

    file: str
    faults: list[tuple[str, str]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def fault(self, line: str, source: str = "") -> None:
        """Add a finding, once."""
        entry = (source or self.file, line)
        if entry not in self.faults:
            self.faults.append(entry)

    def notice(self, line: str) -> None:
        """Add something that the user should see and that stops nothing."""
        if line not in self.notices:
            self.notices.append(line)

    def raise_if_any(self) -> None:
        """Raise ConfigError with all findings, if there are any."""
        if self.faults:
            raise ConfigError(
                self.file,
                [line for _, line in self.faults],
                [source for source, _ in self.faults],
            )


def lines_of(
    error: ValidationError, model: type[BaseModel], tree: Any, secrets: Iterable[str] = ()
) -> dict[Path, str]:
    """A pydantic error as one line for each place in ``tree``, in words and without values.

    Args:
        error: What validating ``tree`` against ``model`` raised.
        model: The model at the top.
        tree: What was validated; only the kinds of its values are looked at.
        secrets: Texts that must not appear, whoever wrote the message.
    """
    lines: dict[Path, str] = {}
    for entry in error.errors(include_input=False, include_url=False):
        path = _place(entry["loc"], model, entry["type"])
        if entry["type"] == "too_short" and _value_at(path, tree):
            continue  # it has entries, none of which is good, and each of them has its line
        text = _words(entry, path, model, tree)
        if text is None:  # the words of whoever wrote the validator: he may have put the value in
            text = str(entry["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
            for secret in secrets:
                text = text.replace(secret, "****")
        if path in lines and lines[path] != text:  # the branches of a union disagree
            text = _expected(path, model, tree)
        lines[path] = mask_urls(text)
    return lines


def _place(loc: tuple[str | int, ...], model: type[BaseModel], kind: str) -> Path:
    """``loc`` without what pydantic adds to it for the branches of a union."""
    path: Path = ()
    for part in loc:
        if isinstance(part, int) or field_at(model, (*path, part)) is not None:
            path = (*path, part)
        elif kind == "extra_forbidden" and part == loc[-1]:
            return (*path, part)
        elif part in _aliases(model_at(model, path)):
            path = (*path, part)
        else:
            break
    return path


def _aliases(model: type[BaseModel] | None) -> set[str]:
    return field_names(model) if model is not None else set()


def _words(entry: Mapping[str, Any], path: Path, model: type[BaseModel], tree: Any) -> str | None:
    kind = entry["type"]
    if kind == "extra_forbidden":
        return unknown(str(path[-1]), model_at(model, path[:-1]))
    if kind == "missing":
        return f"required: expected {_type_at(path, model)}"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"must be {words} {entry['ctx'][name]}"
    if kind == "too_short":
        return f"must have at least {entry['ctx']['min_length']} entry"
    if kind == "string_pattern_mismatch":
        pattern = entry["ctx"]["pattern"]
        return _PATTERNS.get(pattern, f"must match {pattern}")
    if kind in ("value_error", "assertion_error"):
        return None
    if kind.endswith(("_type", "_parsing", "_error", "_from_float")) or kind == "enum":
        return _expected(path, model, tree)
    return None


def unknown(name: str, model: type[BaseModel] | None) -> str:
    """The line for a name that a model does not have."""
    if model is TierConfig and name in _NEEDLESS:
        return f"unknown field: {_NEEDLESS[name]}"
    return f"unknown field{suggestion(name, field_names(model) if model is not None else ())}"


def _type_at(path: Path, model: type[BaseModel]) -> str:
    found = field_at(model, path)
    if found is None:
        return "mapping"
    if path and isinstance(path[-1], int):  # an entry of a list
        return "mapping" if model_at(model, path) is not None else "another kind of entry"
    return describe_type(found.annotation, tuple(found.metadata))


def _expected(path: Path, model: type[BaseModel], tree: Any) -> str:
    expected = f"expected {_type_at(path, model)}"
    try:
        value = _value_at(path, tree)
    except (KeyError, IndexError, TypeError):
        return expected
    found = field_at(model, path)
    words = [word for word in choices(found.annotation) if kind_of(word) == kind_of(value)] if found else []
    if words:  # of the right kind, and none of them
        return f"{expected}{suggestion(str(value).lower(), map(str, words))}"
    return f"{expected}, got {kind_of(value)}"


def _value_at(path: Path, tree: Any) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def where(path: Path, line: str) -> str:
    """``tiers[2].options.timeut_s: unknown field``; the path is left out where it is the top."""
    return f"{dotted(path)}: {line}" if path else line
