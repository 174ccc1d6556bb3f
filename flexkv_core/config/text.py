"""Files into plain trees: YAML and JSON read alike, duplicate keys found, nothing executed.

A tree is made of dictionaries with text keys, lists, texts, numbers, booleans and None.  Messages
name lines and never quote them: a line may hold a secret.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json")
_QUOTED = re.compile(r"'.*'|\".*\"")  # to the last sign: there may be more in what is quoted
_MOST_BYTES = 1 << 20
_MOST_NODES = 20_000
_MOST_DEPTH = 24


@dataclass(frozen=True)
class SourceFile:
    """One configuration file as it was read.

    Attributes:
        path: As the user wrote it.
        sha256: Of its bytes, in hexadecimal.
        tree: Its content.
    """

    path: str
    sha256: str
    tree: dict[str, Any]


def read_file(path: str) -> SourceFile:
    """Read a ``.yaml``, ``.yml`` or ``.json`` file whose top is a mapping.

    Raises:
        ConfigError: it cannot be read, or is no such text; all duplicate keys are named at once.
    """
    suffix = Path(path).suffix.lower()
    if os.path.isdir(path):  # which takes what may not be looked at for none; reading it tells why
        raise ConfigError(path, ["is a directory; name the file in it"])
    if suffix not in SUFFIXES:
        raise ConfigError(
            path, [f"the file's name ends in {suffix or 'nothing'}; expected {', '.join(SUFFIXES)}"]
        )
    data = _read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise ConfigError(path, [f"byte {exc.start} is not UTF-8 text"]) from None
    duplicates: list[str] = []
    tree = parse_json(text, path, duplicates) if suffix == ".json" else parse_yaml(text, path, duplicates)
    if duplicates:
        raise ConfigError(path, duplicates)
    if tree is None:
        raise ConfigError(path, ["the file is empty; the shortest one says `cpu_cache_gb: 16`"])
    if not isinstance(tree, dict):
        raise ConfigError(path, [f"expected a mapping at the top, got {kind_of(tree)}"])
    return SourceFile(path, sha256(data).hexdigest(), tree)


def _read_bytes(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as exc:
        raise ConfigError(path, [f"cannot be read: {exc.strerror or type(exc).__name__}"]) from None
    except ValueError:  # a NUL in the path
        raise ConfigError(path, ["is no file's name"]) from None
    if len(data) > _MOST_BYTES:
        raise ConfigError(path, [f"is longer than {_MOST_BYTES} bytes: no configuration"])
    return data


def parse_yaml(text: str, source: str, duplicates: list[str]) -> Any:
    """One YAML document as a plain tree; duplicate keys are added to ``duplicates``.

    Raises:
        ConfigError: the text is not YAML, or not of a configuration's size.
    """
    try:
        return _plain(_load(text, duplicates), source)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = exc.problem or exc.context or ""
        if not problem.startswith("expected"):  # which names signs and tokens only
            problem = _QUOTED.sub(_hidden, problem)
        if mark and text[mark.index : mark.index + 1] == "\t":
            problem = "a tab: indent with spaces"
        raise ConfigError(source, [f"{where}not YAML: {problem}"]) from None
    except yaml.YAMLError:
        raise ConfigError(source, ["not YAML: a character that it does not allow"]) from None
    except (ValueError, OverflowError, LookupError, AttributeError):  # as !!int, !!bool and !!timestamp fail
        raise ConfigError(source, ["not YAML: a value that cannot be what its tag or form says"]) from None
    except RecursionError:
        raise ConfigError(source, ["nested too deep"]) from None


def _hidden(quoted: re.Match[str]) -> str:
    """What PyYAML quotes may be a secret that begins with ! or *; a single sign is none."""
    return quoted[0] if len(quoted[0]) <= len("'@'") else "'...'"


def _load(text: str, duplicates: list[str]) -> Any:
    loader = _Loader(text, duplicates)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def parse_json(text: str, source: str, duplicates: list[str]) -> Any:
    """One JSON value as a plain tree; duplicate keys are added to ``duplicates``.

    Raises:
        ConfigError: the text is not JSON, or not of a configuration's size.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                duplicates.append(f"{key}: given twice in one mapping")
            found[key] = value
        return found

    if not text.strip():
        return None
    try:
        return _plain(json.loads(text, object_pairs_hook=pairs), source)
    except json.JSONDecodeError as exc:
        raise ConfigError(source, [f"line {exc.lineno}, column {exc.colno}: not JSON: {exc.msg}"]) from None
    except ValueError:
        raise ConfigError(source, ["not JSON: a number that cannot be"]) from None
    except RecursionError:
        raise ConfigError(source, ["nested too deep"]) from None


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, which also notices a key that is given twice."""

    def __init__(self, text: str, duplicates: list[str]) -> None:
        super().__init__(text)
        self._duplicates = duplicates

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # Before merge keys (<<) are folded in: overriding what was merged is what they are for.
        # A mapping that is built twice (through an alias) complains once.
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = f"line {key.start_mark.line + 1}: {key.value}: given twice in one mapping"
                if key.value in seen and line not in self._duplicates:
                    self._duplicates.append(line)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _plain(value: Any, source: str) -> Any:
    """Copy a tree, every alias expanded, with texts for keys, and refuse what is no configuration."""
    budget = [_MOST_NODES]

    def copy(item: Any, depth: int) -> Any:
        budget[0] -= 1
        if budget[0] < 0 or depth > _MOST_DEPTH:
            raise ConfigError(source, ["nested too deep, or more than a configuration holds"])
        if isinstance(item, dict):
            return {_key(key, source): copy(entry, depth + 1) for key, entry in item.items()}
        if isinstance(item, list):
            return [copy(entry, depth + 1) for entry in item]
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        raise ConfigError(source, [f"expected texts, numbers, lists and mappings, found {kind_of(item)}"])

    return copy(value, 0)


def _key(key: Any, source: str) -> str:
    if isinstance(key, str):
        return key
    raise ConfigError(source, [f"a key must be text, found {kind_of(key)}: put it in quotes"])


def kind_of(value: object) -> str:
    """What a value is, in words, without the value."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    names = {str: "text", int: "a number", float: "a number", list: "a list", tuple: "a list"}
    return names.get(type(value), "a mapping" if isinstance(value, dict) else f"a {type(value).__name__}")
