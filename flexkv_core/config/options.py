"""Drivers' options: ``${NAME}`` filled in, then checked by each driver's own model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError

from ..drivers import DriverSpec, find_driver
from ..errors import DriverError
from .draft import Draft, Rank
from .names import PREFIX
from .report import Report, lines_of, unknown, where
from .schema import Path, dotted, model_in

_REFERENCE = re.compile(r"\$(\$)?\{([^{}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_SECRET_BYTES = 65_536


@dataclass
class Drivers:
    """Drivers asked for once each; what is wrong with one is told once for each tier of it."""

    _found: dict[str, tuple[DriverSpec, str] | DriverError] = field(default_factory=dict)

    def find(self, name: str) -> tuple[DriverSpec, str]:
        """The driver and ``distribution version``.  Raises DriverError."""
        if name not in self._found:
            try:
                spec, offer = find_driver(name)
                self._found[name] = (spec, offer.provider)
            except DriverError as exc:
                self._found[name] = exc
        found = self._found[name]
        if isinstance(found, DriverError):
            raise found
        return found

    def model(self, name: Any) -> type[BaseModel] | None:
        """The driver's options' model, or None where there is no usable driver of this name."""
        try:
            spec, _ = self.find(name) if isinstance(name, str) else (None, "")
        except DriverError:
            return None
        config = getattr(spec, "config", None)
        return config if isinstance(config, type) and issubclass(config, BaseModel) else None


@dataclass
class Substitution:
    """Fills ``${NAME}`` and ``${file:PATH}`` into options, and remembers what to hide.

    Attributes:
        environ: Where names are looked up.
        report: Where missing names are told.
        secrets: Every text that was filled in.
        templates: Path -> the text before filling in, which is what people are shown.
    """

    environ: Mapping[str, str] = field(repr=False)
    report: Report
    secrets: set[str] = field(default_factory=set, repr=False)
    templates: dict[Path, str] = field(default_factory=dict)

    def fill(self, value: Any, path: Path, source: str) -> Any:
        """A copy of ``value`` with every reference in its texts filled in."""
        if isinstance(value, dict):
            return {key: self.fill(entry, (*path, key), source) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.fill(entry, (*path, index), source) for index, entry in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        self.templates[path] = value

        def one(match: re.Match[str]) -> str:
            if match[1]:  # $${NAME} stands for itself
                return match[0][1:]
            text = self._look_up(match[2].strip(), path, source)
            if text:
                self.secrets.add(text)
            return text

        return _REFERENCE.sub(one, value)

    def _look_up(self, name: str, path: Path, source: str) -> str:
        if name.startswith("file:"):
            return self._read(name.removeprefix("file:"), path, source)
        if not _NAME.fullmatch(name):
            self.report.fault(where(path, "${...} must hold a variable's name or file:PATH"), source)
            return ""
        if name not in self.environ:
            self.report.fault(where(path, f"${{{name}}}: the environment has no {name}"), source)
            return ""
        return self.environ[name]

    def _read(self, name: str, path: Path, source: str) -> str:
        try:
            with FilePath(name).open("rb") as file:
                return file.read(_MOST_SECRET_BYTES).decode().rstrip("\r\n")
        except (OSError, ValueError) as exc:
            reason = getattr(exc, "strerror", None) or "is no text"
            self.report.fault(where(path, f"${{file:{name}}}: {reason}"), source)
            return ""


def referenced_names(value: Any) -> set[str]:
    """Every ``NAME`` that stands as ``${NAME}`` somewhere in ``value``."""
    if isinstance(value, dict):
        return {name for entry in value.values() for name in referenced_names(entry)}
    if isinstance(value, list):
        return {name for entry in value for name in referenced_names(entry)}
    if not isinstance(value, str):
        return set()
    return {match[2].strip() for match in _REFERENCE.finditer(value) if not match[1]}


def is_reference(text: str) -> bool:
    """Whether ``text`` is one ``${NAME}`` and nothing else, so that it may be shown."""
    return _REFERENCE.fullmatch(text) is not None


def check_options(
    draft: Draft, index: int, drivers: Drivers, substitution: Substitution
) -> tuple[DriverSpec, str, BaseModel] | None:
    """Validate the options of one tier; faults go to the report.

    Args:
        draft: With the tier at ``tiers[index]``.
        index: Position of the tier.
        drivers: Where drivers are found.
        substitution: Fills in variables.

    Returns:
        The driver, its provider and the validated options, or None where anything was wrong.
    """
    tier = draft.tree["tiers"][index]
    if not isinstance(tier, dict) or not isinstance(tier.get("driver"), str):
        return None
    place: Path = ("tiers", index)
    try:
        spec, provider = drivers.find(tier["driver"])
    except DriverError as exc:
        draft.report.fault(where((*place, "driver"), str(exc)), _source(draft, (*place, "driver")))
        return None
    model = drivers.model(tier["driver"])
    if model is None:
        line = f"driver {spec.name} of {provider} has no pydantic model of its options"
        draft.report.fault(where((*place, "driver"), line), _source(draft, (*place, "driver")))
        return None
    options = tier.get("options", {})
    if not isinstance(options, dict):
        return None  # the chain's own model tells it
    path: Path = (*place, "options")
    filled = substitution.fill(options, path, _source(draft, path))
    validated = _validate(model, filled, path, draft, substitution)
    return None if validated is None else (spec, provider, validated)


def _validate(
    model: type[BaseModel], filled: dict[str, Any], path: Path, draft: Draft, substitution: Substitution
) -> BaseModel | None:
    hidden = substitution.secrets | set(_secret_texts(model, filled))
    ignored = dict(_ignored(model, filled, ()))
    lines = dict(ignored)
    validated = None
    try:
        validated = model.model_validate(filled)
    except ValidationError as exc:
        lines.update(lines_of(exc, model, filled, sorted(hidden, key=len, reverse=True)))
    except Exception as exc:  # noqa: BLE001 - validators of a foreign driver may raise anything
        lines[()] = f"the driver's model of its options failed: {type(exc).__name__}"
    for inner, line in lines.items():
        place = (*path, *inner)
        draft.report.fault(_named(draft, place, line), _source(draft, place))
    return None if lines else validated


def _named(draft: Draft, place: Path, line: str) -> str:
    origin = draft.origin(place)
    if origin.rank is Rank.ENVIRONMENT and origin.name.startswith(PREFIX):
        return f"{origin.name} ({dotted(place)}): {line}"
    return where(place, line)


def _source(draft: Draft, path: Path) -> str:
    origin = draft.origin(path)
    if origin.rank is Rank.DEFAULT:
        return draft.report.file
    return origin.name if origin.rank is Rank.FILE else origin.rank.name.lower()


def _ignored(model: type[BaseModel], tree: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Names that a foreign model would drop without a word, as pydantic does unless told otherwise."""
    if not isinstance(tree, dict):
        return
    for name, value in tree.items():
        known = model.model_fields.get(name)
        if known is not None:
            inner = model_in(known.annotation)
            if inner is not None:
                yield from _ignored(inner, value, (*path, name))
        elif model.model_config.get("extra", "ignore") == "ignore":
            aliases = {entry.alias for entry in model.model_fields.values()}
            if name not in aliases:
                yield (*path, name), unknown(name, model)


def _secret_texts(model: type[BaseModel], tree: Any) -> Iterator[str]:
    """What stands in fields that are declared secret."""
    if not isinstance(tree, dict):
        return
    for name, info in model.model_fields.items():
        value, inner = tree.get(name), model_in(info.annotation)
        if inner is not None:
            yield from _secret_texts(inner, value)
        elif isinstance(value, str) and value and _is_secret(info.annotation):
            yield value


def _is_secret(annotation: Any) -> bool:
    if annotation in (SecretStr, SecretBytes):
        return True
    return any(_is_secret(part) for part in getattr(annotation, "__args__", ()))
