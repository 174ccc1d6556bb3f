"""``load_config``: flags, environment, file and defaults into one chain, or into one report."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from ..drivers import DriverSpec
from ..errors import ConfigError
from ..models import ChainConfig, TierConfig
from .draft import Draft, Given, Origin, Rank
from .effective import EffectiveConfig, ResolvedTier, Value
from .environment import read_environment
from .flat import build_tiers, change_tiers, put_fields, read_keys
from .names import PATH_VARIABLE, Resolver
from .options import Drivers, Substitution, check_options, is_reference, referenced_names
from .report import Report, lines_of, mask_urls, suggestion, where
from .rules import chain_faults, chain_notices, duplicate_names
from .schema import SECRET, Path, dotted, field_text
from .seed import SEED_KEYS, TIER_KEYS
from .text import SourceFile, parse_yaml, read_file


def load_config(
    file: str | os.PathLike[str] | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> EffectiveConfig:
    """Read a configuration from everywhere it may come from.

    Which file: ``file``, else ``FLEXKV_CONFIG_PATH``, else none.  Each value: flag, else environment,
    else file, else default.  A chain file has ``tiers``; a file without is FlexKV's flat one.

    Args:
        file: Path of a ``.yaml``, ``.yml`` or ``.json`` file.
        flags: Values by dotted path (``engine.prefetch``, ``tiers.disk.write``) or flat key
            (``cpu_cache_gb``).
        environ: Instead of the process's environment, which is read now and never again.

    Raises:
        ConfigError: with every finding of every source at once; no value is quoted in it.
    Threads: any; no state is kept.
    """
    environ = dict(os.environ if environ is None else environ)
    report = Report("configuration")
    chosen = _choose_file(file, environ, report)
    if chosen is not None:
        report.file = chosen
    try:
        source = read_file(chosen) if chosen is not None else None
    except ConfigError as exc:
        for line in exc.findings:
            report.fault(line)
        report.raise_if_any()
        raise
    return _Loading(report, source, environ, dict(flags or {})).run()


def _choose_file(
    file: str | os.PathLike[str] | None, environ: Mapping[str, str], report: Report
) -> str | None:
    wanted, variable = (os.fspath(file) if file else None), environ.get(PATH_VARIABLE) or None
    if wanted and variable and os.path.realpath(wanted) != os.path.realpath(variable):
        report.notice(f"environment {PATH_VARIABLE} ({variable}) loses to the file given as a flag")
    return wanted or variable


class _Loading:
    """One run of ``load_config``."""

    def __init__(
        self, report: Report, source: SourceFile | None, environ: dict[str, str], flags: dict[str, Any]
    ) -> None:
        self._report = report
        self._source = source
        self._environ = environ
        self._flags = flags
        self._drivers = Drivers()
        self._draft = Draft(report)
        self._substitution = Substitution(environ, self._draft)
        self._tiers_origin: Origin | None = None

    def run(self) -> EffectiveConfig:
        keys = self._read_file()
        self._use_list_of_flags()
        tree_names = referenced_names(self._draft.tree)
        seen = read_environment(self._environ, tree_names, self._report)
        self._use_tiers_variable(seen.tiers)
        flags = [Given(name, value, Origin(Rank.FLAG, name)) for name, value in self._flags.items()]
        keys += seen.keys + [flag for flag in flags if flag.name in SEED_KEYS]
        twins = [flag for flag in flags if flag.name not in SEED_KEYS]
        self._use_keys(read_keys(keys, self._report))
        resolver = Resolver(self._draft, self._drivers.model)
        for given in seen.twins:
            resolver.put_variable(given)
        for given in twins:
            resolver.put_flag(given)
        return self._finish()

    def _read_file(self) -> list[Given]:
        """Take the file's tree; the flat keys in it come back."""
        if self._source is None:
            return []
        tree, origin = self._source.tree, Origin(Rank.FILE, self._source.path)
        self._draft.base = origin
        if "tiers" in tree or "version" in tree:
            for name in sorted(set(tree) & (set(SEED_KEYS) - set(ChainConfig.model_fields))):
                self._report.fault(f"{name}: belongs to the flat format; this file lists tiers")
            self._draft.tree = {
                name: value for name, value in tree.items() if name not in SEED_KEYS or name in _FIELDS
            }
            if "tiers" in tree:
                self._tiers_origin = origin
            return []
        keys = [Given(name, value, origin) for name, value in tree.items() if name in SEED_KEYS]
        self._draft.tree = {name: value for name, value in tree.items() if name in _FIELDS - set(SEED_KEYS)}
        for name in sorted(set(tree) - set(SEED_KEYS) - _FIELDS):
            self._report.fault(f"{name}: unknown field{suggestion(name, [*SEED_KEYS, *_FIELDS])}")
        return keys

    def _use_list_of_flags(self) -> None:
        if "tiers" in self._flags:
            self._take_tiers(Given("tiers", self._flags.pop("tiers"), Origin(Rank.FLAG, "tiers")))

    def _use_tiers_variable(self, given: Given | None) -> None:
        if given is None:
            return
        if self._tiers_origin is not None and self._tiers_origin.rank is Rank.FLAG:
            self._report.notice(f"{given.origin} loses to {self._tiers_origin} for tiers")
            return
        self._take_tiers(given)

    def _take_tiers(self, given: Given) -> None:
        value, duplicates = given.value, []  # type: Any, list[str]
        try:
            value = parse_yaml(value, given.name, duplicates) if isinstance(value, str) else value
        except ConfigError as exc:
            duplicates += exc.findings
        for line in duplicates:
            self._report.fault(f"{given.name}: {line}", given.origin.rank.name.lower())
        if duplicates:
            return
        if self._tiers_origin is not None:
            self._report.notice(f"{self._tiers_origin} loses to {given.origin} for tiers")
        value = list(value) if isinstance(value, tuple) else value
        self._draft.tree["tiers"] = copy.deepcopy(value)  # a caller's own list is left alone
        self._draft.origins["tiers",] = self._tiers_origin = given.origin

    def _use_keys(self, keys: dict[str, Given]) -> None:
        if self._tiers_origin is not None:
            change_tiers(keys, self._draft, self._tiers_origin)
        elif "version" not in self._draft.tree or any(name in keys for name in TIER_KEYS):
            build_tiers(keys, self._draft)
        put_fields(keys, self._draft)

    def _finish(self) -> EffectiveConfig:
        self._draft.tree = self._substitution.fill(self._draft.tree, ())
        chain = self._validate_chain()
        resolved = self._validate_options()
        if chain is not None:
            declared = [entry[0].capabilities if entry is not None else None for entry in resolved]
            for path, line in chain_faults(chain, declared):
                self._draft.fault(path, line)
            for path, line in chain_notices(chain, declared):
                self._report.notice(where(path, line))
        self._report.raise_if_any()
        if chain is None:
            raise AssertionError("a chain that is not valid has findings")
        return self._effective(chain, [entry for entry in resolved if entry is not None])

    def _validate_chain(self) -> ChainConfig | None:
        tree = self._draft.tree
        try:
            return ChainConfig.model_validate(tree)
        except ValidationError as exc:
            for path, line in lines_of(exc, ChainConfig, tree).items():
                self._draft.fault(path, line)
        entries = tree.get("tiers")
        names = [
            entry["name"]
            for entry in (entries if isinstance(entries, list) else [])
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        ]
        if duplicate_names(names):  # the model looks at this only where nothing else is wrong
            self._report.fault(f"tier names must be distinct, twice: {', '.join(duplicate_names(names))}")
        return None

    def _validate_options(self) -> list[tuple[DriverSpec, str, BaseModel] | None]:
        entries = self._draft.tree.get("tiers")
        count = len(entries) if isinstance(entries, list) else 0
        return [
            check_options(self._draft, i, self._drivers, self._substitution.secrets) for i in range(count)
        ]

    def _effective(
        self, chain: ChainConfig, resolved: list[tuple[DriverSpec, str, BaseModel]]
    ) -> EffectiveConfig:
        tiers = [
            ResolvedTier(config.model_copy(update={"options": _contents(options)}), spec, provider, options)
            for config, (spec, provider, options) in zip(chain.tiers, resolved, strict=True)
        ]
        whole = chain.model_copy(update={"tiers": tuple(tier.config for tier in tiers)})
        return EffectiveConfig(
            chain=whole,
            tiers=tuple(tiers),
            file=self._source.path if self._source else None,
            sha256=self._source.sha256 if self._source else "",
            values=tuple(self._values(whole, tiers)),
            notices=tuple(self._report.notices),
        )

    def _values(self, chain: ChainConfig, tiers: list[ResolvedTier]) -> Iterator[Value]:
        for path, text in _walk(chain, ()):
            yield self._value(path, text)
        for index, tier in enumerate(tiers):
            for path, text in _walk(tier.config, ("tiers", index)):
                yield self._value(path, text)
            for path, text in _walk(tier.options, ("tiers", index, "options")):
                yield self._value(path, text)

    def _value(self, path: Path, text: str) -> Value:
        templates = self._substitution.templates
        if path in templates and (text != SECRET or is_reference(templates[path])):
            text = templates[path]
        elif any(place[: len(path)] == path for place in templates):
            text = SECRET
        return Value(dotted(path), mask_urls(text), self._draft.origin(path))


_FIELDS = set(ChainConfig.model_fields)


def _walk(model: BaseModel, prefix: Path) -> Iterator[tuple[Path, str]]:
    """Every value, as text, of a model but its tiers and options, nested models included."""
    for name, field in type(model).model_fields.items():
        if (isinstance(model, ChainConfig) and name == "tiers") or (
            isinstance(model, TierConfig) and name == "options"
        ):
            continue
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _walk(value, (*prefix, name))
        else:
            yield (*prefix, name), field_text(field, value)


def _contents(options: BaseModel) -> dict[str, Any]:
    """A model's values under the names that it accepts."""
    return {field.alias or name: getattr(options, name) for name, field in type(options).model_fields.items()}
