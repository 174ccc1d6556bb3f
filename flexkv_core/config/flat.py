"""The flat keys into a chain: sizes into tiers, switches into fields, and a word on all others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .draft import DEFAULT, Draft, Given, Origin, Rank
from .report import Report
from .schema import Path
from .seed import EVERY_TIER_KEYS, FIELD_KEYS, SEED_KEYS, TIER_KEYS, Fate, SeedKey

HOST, DISK = "host", "disk"
"""Names of the tiers that ``cpu_cache_gb`` and ``ssd_cache_gb`` make."""

DEFAULT_CPU_GB = 16.0
"""As FlexKV: what a host without any configuration gives."""

DEFAULT_SSD_DIRS = ["./ssd_cache"]

_DRIVER_OF = {
    "cpu_cache_gb": "cpu",
    "use_hugepage_cpu_buffer": "cpu",
    "ssd_cache_gb": "ssd",
    "ssd_cache_dir": "ssd",
}


def read_keys(given: Iterable[Given], report: Report) -> dict[str, Given]:
    """Type every flat key, let the highest source win, and tell the fate of those that set nothing.

    A key that is null is not given.
    """
    winners: dict[str, Given] = {}
    for entry in sorted(given, key=lambda entry: -entry.origin.rank):
        if entry.value is None:
            continue
        if entry.name in winners:
            report.notice(f"{entry.origin} loses to {winners[entry.name].origin} for {entry.name}")
            continue
        winners[entry.name] = entry
    read = {name: _read(SEED_KEYS[name], entry, report) for name, entry in winners.items()}
    return {name: entry for name, entry in read.items() if entry is not None}


def _read(key: SeedKey, entry: Given, report: Report) -> Given | None:
    """The entry with a typed value, if it sets something."""
    label = _label(key, entry.origin)
    try:
        value = key.read(entry.value)
    except ValueError as exc:
        report.fault(f"{label}: {exc}", source_of(entry.origin))
        return None
    if key.fate is Fate.NO_EFFECT:
        report.notice(f"{entry.origin}: {key.name} has no effect: {key.text}")
    elif key.fate is Fate.KEPT_TO:
        plain = value.strip().lower() if isinstance(value, str) else value
        if plain not in key.served:
            report.fault(f"{label}: refused: {key.text}", source_of(entry.origin))
    return Given(entry.name, value, entry.origin) if key.fate is Fate.SETS else None


def _label(key: SeedKey, origin: Origin) -> str:
    return key.variable if origin.rank is Rank.ENVIRONMENT else key.name


def source_of(origin: Origin) -> str:
    """What stands before a finding about a value of this origin."""
    return origin.name if origin.rank is Rank.FILE else origin.rank.name.lower()


def build_tiers(keys: dict[str, Given], draft: Draft) -> None:
    """Make the tiers that the flat keys describe: a host tier, and an ssd tier if it has a size."""
    report = draft.report
    cpu, ssd = _size(keys, "cpu_cache_gb", report), _size(keys, "ssd_cache_gb", report)
    cpu_gb = cpu.value if cpu is not None else DEFAULT_CPU_GB
    draft.tree["tiers"] = [{"name": HOST, "driver": "cpu", "options": {}}]
    _made(draft, 0, "cpu_cache_gb", cpu)
    _put_options(draft, 0, cpu or Given("", DEFAULT_CPU_GB, DEFAULT), keys.get("use_hugepage_cpu_buffer"))
    folders = keys.get("ssd_cache_dir")
    if ssd is None or ssd.value == 0:
        if folders is not None:
            report.notice(f"{folders.origin}: ssd_cache_dir has no effect: ssd_cache_gb is 0")
        return
    if ssd.value <= cpu_gb:
        label = _label(SEED_KEYS["ssd_cache_gb"], ssd.origin)
        line = f"{label}: must be more than cpu_cache_gb ({cpu_gb:g}), or 0 for no ssd tier"
        report.fault(line, source_of(ssd.origin))
    draft.tree["tiers"].append({"name": DISK, "driver": "ssd", "options": {}})
    _made(draft, 1, "ssd_cache_gb", ssd)
    _put_folders(draft, 1, folders or Given("", DEFAULT_SSD_DIRS, DEFAULT))
    _put_options(draft, 1, ssd, None)


def _made(draft: Draft, index: int, key: str, given: Given | None) -> None:
    origin = given.origin if given is not None and given.name == key else DEFAULT
    for field in ("name", "driver"):
        draft.origins["tiers", index, field] = origin
    draft.origins["tiers", index, "options"] = DEFAULT


def _size(keys: dict[str, Given], name: str, report: Report) -> Given | None:
    given = keys.get(name)
    if given is None:
        return None
    may_be_zero = name == "ssd_cache_gb"
    is_size = given.value < 1 << 30 and (given.value > 0 or (may_be_zero and given.value == 0))
    if not is_size:  # also NaN
        words = "must be 0 or more" if may_be_zero else "must be more than 0"
        report.fault(f"{_label(SEED_KEYS[name], given.origin)}: {words}, in GiB", source_of(given.origin))
        return None
    return given


def _put_options(draft: Draft, index: int, size: Given, huge: Given | None) -> None:
    path: Path = ("tiers", index, "options")
    draft.put((*path, "capacity"), Given(size.name, round(size.value * (1 << 30)), size.origin))
    if huge is not None:
        draft.put((*path, "huge_pages"), huge)


def _put_folders(draft: Draft, index: int, folders: Given) -> None:
    if not folders.value:
        label = _label(SEED_KEYS["ssd_cache_dir"], folders.origin)
        draft.report.fault(f"{label}: names no directory", source_of(folders.origin))
        folders = Given("", DEFAULT_SSD_DIRS, DEFAULT)  # one finding is enough
    value: Any = folders.value[0] if len(folders.value) == 1 else list(folders.value)
    draft.put(("tiers", index, "options", "path"), Given(folders.name, value, folders.origin))


def change_tiers(keys: dict[str, Given], draft: Draft, tiers: Origin) -> None:
    """Let flat keys of a higher source change the tiers that a chain file lists.

    Args:
        keys: Flat keys by name.
        draft: With its tiers.
        tiers: Where the list of tiers came from.
    """
    for name in TIER_KEYS:
        given = keys.get(name)
        if given is None:
            continue
        label, source = _label(SEED_KEYS[name], given.origin), source_of(given.origin)
        if given.origin.rank < tiers.rank:
            draft.report.notice(f"{given.origin} loses to {tiers} for {name}")
        elif given.origin.rank is tiers.rank:
            draft.report.fault(f"{label}: the list of tiers already says it; take one of the two", source)
        else:
            _change(name, given, draft, f"{label}: ", source)


def _change(name: str, given: Given, draft: Draft, label: str, source: str) -> None:
    driver = _DRIVER_OF[name]
    entries = draft.tree.get("tiers")
    fits = [
        index
        for index, entry in enumerate(entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and entry.get("driver") == driver
    ]
    if len(fits) != 1:
        count = "no tier" if not fits else f"{len(fits)} tiers"
        draft.report.fault(f"{label}the chain has {count} of driver {driver}; the chain file decides", source)
        return
    options: Path = ("tiers", fits[0], "options")
    if name == "ssd_cache_dir":
        _put_folders(draft, fits[0], given)
    elif name == "use_hugepage_cpu_buffer":
        draft.put((*options, "huge_pages"), given)
    elif name == "ssd_cache_gb" and given.value == 0:
        draft.report.fault(f"{label}0 does not take a tier out of a chain; the chain file decides", source)
    elif _size({name: given}, name, draft.report) is not None:
        _put_options(draft, fits[0], given, None)


def put_fields(keys: dict[str, Given], draft: Draft) -> None:
    """Set the fields that flat keys name: those of the chain, and those of every tier."""
    for name, path in FIELD_KEYS.items():
        if name in keys:
            draft.put(path, keys[name])
    entries = draft.tree.get("tiers")
    for name, field in EVERY_TIER_KEYS.items():
        for index in range(len(entries) if isinstance(entries, list) else 0):
            if name in keys:
                draft.put(("tiers", index, "eviction", field), keys[name], general=True)
