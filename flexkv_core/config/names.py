"""Names into paths: what ``FLEXKV_TIER_DISK_WRITE`` or ``tiers.disk.write`` stand for.

The rule: a field's variable is ``FLEXKV_`` and its path in capitals, with ``_`` between
(``engine.load_wait_s`` -> ``FLEXKV_ENGINE_LOAD_WAIT_S``).  A tier is named instead of counted:
``FLEXKV_TIER_<NAME>_<FIELD>``, ``FLEXKV_TIER_<NAME>_OPTIONS_<OPTION>``, ``-`` in names as ``_``.
``FLEXKV_TIERS`` takes a whole list of tiers as YAML or JSON.  ``version`` belongs to the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..errors import ConfigError
from ..models import ChainConfig, TierConfig
from .draft import Draft, Given
from .report import nearest, suggestion
from .schema import EACH, Leaf, Path, describe_type, is_list, leaves
from .seed import SEED_KEYS
from .text import parse_yaml

PREFIX = "FLEXKV_"
TIER_PREFIX = "FLEXKV_TIER_"
TIERS_VARIABLE = "FLEXKV_TIERS"
PATH_VARIABLE = "FLEXKV_CONFIG_PATH"

DriverModel = Callable[[Any], type[BaseModel] | None]
"""A driver's name -> its options' model, or None where there is no such driver."""


def chain_leaves() -> list[Leaf]:
    """The fields above the tiers that have a twin, in order."""
    own = (leaf for leaf in leaves(ChainConfig) if EACH not in leaf.path)
    return [leaf for leaf in own if leaf.path != ("version",)]


def tier_leaves() -> list[Leaf]:
    """The fields of a tier that have a twin; options are the driver's."""
    return [leaf for leaf in leaves(TierConfig) if leaf.path not in (("name",), ("options",))]


def variable_of(path: Sequence[str]) -> str:
    """``("engine", "layerwise")`` -> ``FLEXKV_ENGINE_LAYERWISE``."""
    return PREFIX + _capitals(path)


def _capitals(path: Sequence[str]) -> str:
    return "_".join(path).upper().replace("-", "_")


def known_names() -> list[str]:
    """Every variable that does not depend on the tiers."""
    twins = [variable_of(leaf.path) for leaf in chain_leaves()]
    seed = [key.variable for key in SEED_KEYS.values()]
    return sorted({*twins, *seed, TIERS_VARIABLE, PATH_VARIABLE})


@dataclass
class Resolver:
    """Puts values that are named into a draft whose tiers are known.

    Attributes:
        draft: Where they go.
        driver_model: How to find a driver's options.
    """

    draft: Draft
    driver_model: DriverModel

    def tiers(self) -> list[tuple[int, str]]:
        """Position and name of every tier that has one."""
        entries = self.draft.tree.get("tiers")
        if not isinstance(entries, list):
            return []
        return [
            (index, entry["name"])
            for index, entry in enumerate(entries)
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        ]

    def put_variable(self, given: Given) -> None:
        """Set what a variable names, or tell that it names nothing."""
        name = given.name
        if name.startswith(TIER_PREFIX):
            self._put_in_tier(name.removeprefix(TIER_PREFIX), given)
            return
        for leaf in chain_leaves():
            if variable_of(leaf.path) == name:
                self._put(leaf.path, leaf.field, given)
                return
        # Compared without what all of them begin with: it alone would make any two names alike.
        known = {other.removeprefix(PREFIX).lower(): other for other in known_names()}
        close = nearest(name.removeprefix(PREFIX).lower(), known)
        hint = f", did you mean {known[close]}?" if close else ""
        self.draft.report.fault(f"{name}: unknown variable{hint}", "environment")

    def put_flag(self, given: Given) -> None:
        """Set what a dotted path names (``engine.layerwise``, ``tiers.disk.write``)."""
        parts = given.name.split(".")
        if parts[0] == "tiers" and len(parts) > 2:
            self._put_in_tier(_capitals(parts[1:]), given)
            return
        for leaf in chain_leaves():
            if list(leaf.path) == parts:
                self._put(leaf.path, leaf.field, given)
                return
        known = [".".join(leaf.path) for leaf in chain_leaves()] + list(SEED_KEYS)
        self.draft.report.fault(f"{given.name}: unknown field{suggestion(given.name, known)}", "flag")

    def _put_in_tier(self, rest: str, given: Given) -> None:
        tiers = self.tiers()
        fits = [(index, name) for index, name in tiers if rest.startswith(_capitals([name]) + "_")]
        if not fits:
            names = ", ".join(name for _, name in tiers) or "none with a name"
            self._unknown(given, f"names no tier; the chain has {names}")
            return
        longest = max(len(name) for _, name in fits)
        fits = [(index, name) for index, name in fits if len(name) == longest]
        if len(fits) > 1:
            self._unknown(given, "fits more than one tier")
            return
        index, name = fits[0]
        wanted = rest.removeprefix(_capitals([name]) + "_")
        known = {_capitals(leaf.path): leaf for leaf in [*tier_leaves(), *self._options(index)]}
        if wanted in known:
            leaf = known[wanted]
            self._put(("tiers", index, *leaf.path), leaf.field, given)
        elif wanted.startswith("OPTIONS_") and not self._options(index):
            path: Path = ("tiers", index, "options", wanted.removeprefix("OPTIONS_").lower())
            self.draft.put(path, given)  # no such driver, or one that takes anything
        else:
            self._unknown(given, f"tier {name} has no such field{suggestion(wanted, known)}")

    def _options(self, index: int) -> list[Leaf]:
        model = self.driver_model(self.draft.tree["tiers"][index].get("driver"))
        return list(leaves(model, ("options",))) if model is not None else []

    def _put(self, path: Path, field: FieldInfo, given: Given) -> None:
        try:
            value = from_text(given.value, field, given.name)
        except ConfigError as exc:
            for line in exc.findings:
                self.draft.report.fault(line, str(given.origin))
            return
        self.draft.put(path, Given(given.name, value, given.origin))

    def _unknown(self, given: Given, line: str) -> None:
        self.draft.report.fault(f"{given.name}: {line}", given.origin.rank.name.lower())


def from_text(value: Any, field: FieldInfo, source: str) -> Any:
    """A variable's text as a field wants it: lists split at ``;`` or written as YAML, ``none`` as None.

    Raises:
        ConfigError: text that begins as YAML and is none.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    words = describe_type(field.annotation, tuple(field.metadata))
    takes_many = is_list(field.annotation) or any(is_list(part) for part in get_args(field.annotation))
    if text[:1] in ("[", "{") and (takes_many or words in ("mapping", "anything")):
        return parse_yaml(text, source, [])
    if text.lower() in ("none", "null") and type(None) in get_args(field.annotation):
        return None
    if takes_many and (";" in text or is_list(field.annotation)):
        return [entry.strip() for entry in text.split(";") if entry.strip()]
    return value
