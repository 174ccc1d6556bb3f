"""``${NAME}`` filled in, and drivers' options checked by each driver's own model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError

from ..drivers import DriverSpec, find_driver
from ..errors import DriverError
from .draft import Draft
from .report import lines_of, unknown
from .schema import Path, model_in

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
            return self.find(name)[0].config if isinstance(name, str) else None
        except DriverError:
            return None


@dataclass
class Substitution:
    """Fills ``${NAME}`` and ``${file:PATH}`` into texts, and remembers what to hide.

    Attributes:
        environ: Where names are looked up.
        draft: Where missing names are told.
        secrets: Every text that was filled in.
        templates: Path -> the text before filling in, which is what people are shown.
    """

    environ: Mapping[str, str] = field(repr=False)
    draft: Draft
    secrets: set[str] = field(default_factory=set, repr=False)
    templates: dict[Path, str] = field(default_factory=dict)

    def fill(self, value: Any, path: Path) -> Any:
        """A copy of ``value`` with every reference in its texts filled in."""
        if isinstance(value, dict):
            return {key: self.fill(entry, (*path, key)) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.fill(entry, (*path, index)) for index, entry in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        self.templates[path] = value

        def one(match: re.Match[str]) -> str:
            if match[1]:  # $${NAME} stands for itself
                return match[0][1:]
            text = self._look_up(match[2].strip(), path)
            if text:
                self.secrets.add(text)
            return text

        return _REFERENCE.sub(one, value)

    def _look_up(self, name: str, path: Path) -> str:
        if name.startswith("file:"):
            return self._read(name.removeprefix("file:"), path)
        if not _NAME.fullmatch(name):
            self.draft.fault(path, "${...} must hold a variable's name or file:PATH")
            return ""
        if name not in self.environ:
            self.draft.fault(path, f"${{{name}}}: the environment has no {name}")
            return ""
        return self.environ[name]

    def _read(self, name: str, path: Path) -> str:
        try:
            with FilePath(name).open("rb") as file:
                return file.read(_MOST_SECRET_BYTES).decode().rstrip("\r\n")
        except (OSError, ValueError) as exc:
            reason = getattr(exc, "strerror", None) or "is no text"
            self.draft.fault(path, f"${{file:{name}}}: {reason}")
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
    draft: Draft, index: int, drivers: Drivers, secrets: Set[str]
) -> tuple[DriverSpec, str, BaseModel] | None:
    """Validate the options of one tier; faults go to the report.

    Args:
        draft: With the tier at ``tiers[index]``.
        index: Position of the tier.
        drivers: Where drivers are found.
        secrets: Texts that no finding may hold.

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
        draft.fault((*place, "driver"), str(exc))
        return None
    options = tier.get("options", {})
    if not isinstance(options, dict):
        return None  # the chain's own model tells it
    validated = _validate(spec.config, options, (*place, "options"), draft, secrets)
    return None if validated is None else (spec, provider, validated)


def _validate(
    model: type[BaseModel], filled: dict[str, Any], path: Path, draft: Draft, secrets: Set[str]
) -> BaseModel | None:
    hidden = secrets | set(_secret_texts(model, filled))
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
        draft.fault((*path, *inner), line)
    return None if lines else validated


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
