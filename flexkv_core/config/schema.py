"""The models seen as a table: every field with its path, its type in words and its default.

The environment's names, the error messages and the reference page are all read from here, so they
cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ..units import exact_bytes, parse_bytes, parse_kv_dtype, parse_seconds

Path = tuple[str | int, ...]
"""Where a value stands: ``("tiers", 2, "options", "timeout_s")``."""

SECRET = "****"
"""What is shown instead of a secret."""

EACH = "*"
"""In the path of a ``Leaf``: any entry of the list that stands before it."""

_WORDS: dict[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Any: "anything",
    SecretStr: "secret text",
    SecretBytes: "secret text",
    type(None): "null",
}
_READERS = {
    "parse_bytes": "size such as 8GiB",
    "parse_seconds": "duration such as 250ms",
    "parse_kv_dtype": "name of a KV element type",
}


@dataclass(frozen=True)
class Leaf:
    """One field that holds a value.

    Attributes:
        path: Its path, with ``EACH`` for the entries of a list.
        field: pydantic's description of it.
    """

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def expected(self) -> str:
        """Its type in words."""
        return describe_type(self.field.annotation, tuple(self.field.metadata))

    @property
    def default(self) -> str:
        """Its default in words, or ``required``."""
        return default_text(self.field)


def dotted(path: Path) -> str:
    """``tiers[2].options.timeout_s``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def describe_type(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """A type as a person would name it: ``whole number``, ``list of text``, ``one of lru, lfu``."""
    for item in metadata:
        reader = getattr(getattr(item, "func", None), "__name__", "")
        if reader in _READERS:
            return _READERS[reader]
    origin = get_origin(annotation)
    if origin is Annotated:
        words = describe_type(get_args(annotation)[0], annotation.__metadata__)
        least = next((item.ge for part in annotation.__metadata__ for item in _limits(part)), None)
        return f"{words} of at least {least}" if least and words == _WORDS[int] else words
    if origin in (Union, UnionType):
        kinds = [describe_type(part) for part in get_args(annotation)]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if origin is Literal:
        return _one_of(get_args(annotation))
    if origin in (list, tuple, set, frozenset):
        entry = describe_type(get_args(annotation)[0])
        return f"list of {'mappings' if entry == 'mapping' else entry}"
    if origin is dict or annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _one_of([member.value for member in annotation])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return _WORDS.get(annotation, "text")


def _limits(part: Any) -> list[Any]:
    """The lower limits in one part of what ``Annotated`` says."""
    return [item for item in getattr(part, "metadata", [part]) if getattr(item, "ge", None) is not None]


def choices(annotation: Any) -> list[Any]:
    """The values that a field names one by one; none where it takes any of its kind."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [member.value for member in annotation]
    return [value for part in get_args(annotation) for value in choices(part)]


def _one_of(values: Any) -> str:
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"one of {', '.join(words)}"


def default_text(field: FieldInfo) -> str:
    """A field's default as a person would write it, or ``required``."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined:
        return "none"
    return field_text(field, value)


def field_text(field: FieldInfo, value: object) -> str:
    """A field's value for people: sizes with their unit, secrets as ``****``."""
    if isinstance(value, int) and _READERS["parse_bytes"] == describe_type(
        field.annotation, tuple(field.metadata)
    ):
        return exact_bytes(value)
    return value_text(value)


def value_text(value: object) -> str:
    """One value for people; secrets as ``****``."""
    if isinstance(value, (SecretStr, SecretBytes)):
        return SECRET
    if isinstance(value, Enum):
        return str(value.value)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(value_text(entry) for entry in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {value_text(entry)}" for key, entry in value.items()) + "}"
    return str(value)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside ``M``, ``M | None``, ``list[M]`` or ``tuple[M, ...]``, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        found = model_in(part)
        if found is not None:
            return found
    return None


def is_list(annotation: Any) -> bool:
    """Whether the field holds several entries."""
    return get_origin(annotation) in (list, tuple)


def leaves(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Every field of ``model`` that is no model itself, in order, nested ones included."""
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        inner = model_in(field.annotation)
        if inner is None:
            yield Leaf(path, field)
        else:
            yield from leaves(inner, (*path, EACH) if is_list(field.annotation) else path)


def field_at(model: type[BaseModel], path: Path) -> FieldInfo | None:
    """The field at ``path`` (list positions allowed), or None where there is none."""
    field: FieldInfo | None = None
    inner: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int):
            continue
        if inner is None or part not in inner.model_fields:
            return None
        field = inner.model_fields[part]
        inner = model_in(field.annotation)
    return field


def model_at(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The model whose fields stand at ``path``, or None."""
    if not path:
        return model
    field = field_at(model, path)
    return model_in(field.annotation) if field is not None else None


def field_names(model: type[BaseModel]) -> set[str]:
    """All names that ``model`` accepts, aliases included."""
    aliases = {field.alias for field in model.model_fields.values() if field.alias}
    return set(model.model_fields) | aliases


READERS = (parse_bytes, parse_seconds, parse_kv_dtype)
"""The functions behind ``_READERS``; a test compares the two."""
