"""An SGLang source tree as names: its classes, functions and attributes, parsed and never imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path


@dataclass
class Names:
    """What a class, or a module outside of its classes, defines.

    Attributes:
        methods: Parameters of each function, without ``self``; ``**`` for any further ones.
        returns: Their return annotations, as text.
        fields: Annotated names of the body, in order.
        attributes: Other names: assigned in the body, or to ``self`` in a method.
    """

    methods: dict[str, list[str]] = field(default_factory=dict)
    returns: dict[str, str] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        """Whether ``name`` is defined, as whatever."""
        return name in self.methods or name in self.fields or name in self.attributes


class Surface:
    """The classes and functions of an SGLang source tree, parsed when asked for."""

    def __init__(self, root: Path) -> None:
        """``root`` is the folder of the package ``sglang``."""
        self.root = root
        self._files: dict[str, dict[str, Names]] = {}

    @cached_property
    def version(self) -> str:
        """The version that the package states, or ``unknown``."""
        path = self.root / "_version.py"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        found = re.search(r"^__version__\s*=.*?['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        return found.group(1) if found else "unknown"

    def text(self, file: str) -> str:
        """Source of ``file`` below ``srt``; empty if there is none."""
        path = self.root / "srt" / file
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def of(self, file: str, name: str) -> Names:
        """Class ``name`` of ``file``; what stands outside of classes belongs to class ``""``."""
        return self._parsed(file).get(name, Names())

    def owners(self, file: str) -> list[str]:
        """The classes of ``file``, and ``""``."""
        return list(self._parsed(file))

    def _parsed(self, file: str) -> dict[str, Names]:
        if file not in self._files:
            self._files[file] = dict(_classes(ast.parse(self.text(file))))
        return self._files[file]


def _classes(tree: ast.Module) -> Iterator[tuple[str, Names]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, _names_of(node.body)
    yield "", _names_of(tree.body)


def _names_of(body: Sequence[ast.stmt]) -> Names:
    found = Names()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            _add_method(found, node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.fields.append(node.target.id)
        elif isinstance(node, ast.ClassDef):
            found.attributes.add(node.name)
        elif isinstance(node, ast.Assign):
            found.attributes.update(t.id for t in node.targets if isinstance(t, ast.Name))
    return found


def _add_method(found: Names, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    args = node.args
    names = [a.arg for a in [*args.posonlyargs, *args.args, *args.kwonlyargs] if a.arg not in ("self", "cls")]
    if args.kwarg:
        names.append("**")
    found.methods[node.name] = names
    found.returns[node.name] = ast.unparse(node.returns) if node.returns else ""
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
            and inner.value.id == "self"
        ):
            found.attributes.add(inner.attr)
