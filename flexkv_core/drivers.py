"""Drivers: how a package offers tiers, and how they are found.

A driver is a module named by an entry point of the group ``flexkv.drivers``; its hook
``flexkv_driver`` returns one ``DriverSpec``.  Entry points are kept as names: a driver is
imported when a chain asks for it, and a broken one that no chain names disturbs nobody.

Observers are the second kind of plug-in (group ``flexkv.observers``): they are told, once a
batch and never once a block, what was stored, loaded and evicted and how tiers fare.

Threads: discovery belongs to one thread (start-up); observers are called by the engine's thread.
"""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

import pluggy
from pydantic import BaseModel

from .errors import DriverApiError, DriverConflictError, DriverLoadError, DriverNotFoundError
from .keys import BlockKey
from .tier import Tier, TierCapabilities, TierContext

DRIVER_API = (1, 0)
"""Version of what ``tier`` and this module promise to drivers: (major, minor)."""

SUPPORTED_MAJORS = (1,)
DRIVER_GROUP = "flexkv.drivers"
OBSERVER_GROUP = "flexkv.observers"
PROJECT = "flexkv"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DriverSpec:
    """What a driver's hook returns.

    Attributes:
        name: The name that chains write; equal to the entry point's.
        api: ``DRIVER_API`` that the driver was written for.
        config: pydantic model of the driver's options; its method ``needs``, if it has one, tells
            ``flexkv doctor`` what a tier will take (see ``models.Needs``).
        open: ``module:function``; called as ``function(options, context)`` and returns a ``Tier``.
            Named, not given, so that the driver's library is imported only when a tier is opened.
        capabilities: What its tiers can do with default options, for ``flexkv drivers`` and tables; what an
            opened tier says of itself is what counts.  Optional.
    """

    name: str
    api: tuple[int, int]
    config: type[BaseModel]
    open: str
    capabilities: TierCapabilities | None = None


class DriverHooks:
    """The hooks that plug-ins implement."""

    @hookspec(firstresult=True)
    def flexkv_driver(self) -> DriverSpec:
        """The driver that this module offers.  No work, no imports beyond pydantic."""
        raise NotImplementedError


class ObserverHooks:
    """What observers may implement.  Each takes as many of the arguments as it wants.

    Called by the engine's thread: return quickly.  An exception is logged once and silences the
    observer; it never reaches the engine.
    """

    @hookspec
    def flexkv_blocks_stored(self, tier: str, keys: Sequence[BlockKey], num_bytes: int) -> None:
        """Blocks became readable in ``tier``."""

    @hookspec
    def flexkv_blocks_loaded(self, tier: str, keys: Sequence[BlockKey], num_bytes: int) -> None:
        """Blocks of ``tier`` were brought nearer to the device."""

    @hookspec
    def flexkv_blocks_evicted(self, tier: str, keys: Sequence[BlockKey]) -> None:
        """Blocks left ``tier``."""

    @hookspec
    def flexkv_tier_state_changed(self, tier: str, state: str, reason: str) -> None:
        """A tier became ``up``, ``down`` or ``probing``."""


@dataclass(frozen=True)
class InstalledDriver:
    """One entry point, imported or not.

    Attributes:
        name: Driver name.
        target: The module that the entry point names.
        provider: ``distribution version``.
    """

    name: str
    target: str
    provider: str


def _provider(entry: EntryPoint) -> str:
    dist = entry.dist
    return f"{dist.name} {dist.version}" if dist is not None else "an unknown distribution"


def installed_drivers(group: str = DRIVER_GROUP) -> dict[str, list[InstalledDriver]]:
    """Every offered name with its offers; the same target offered twice counts once."""
    found: dict[str, list[InstalledDriver]] = {}
    for entry in entry_points(group=group):
        offers = found.setdefault(entry.name, [])
        if all(offer.target != entry.value for offer in offers):
            offers.append(InstalledDriver(entry.name, entry.value, _provider(entry)))
    return dict(sorted(found.items()))


def find_driver(name: str) -> tuple[DriverSpec, InstalledDriver]:
    """Import the driver ``name`` and check what it says of itself.

    Raises:
        DriverNotFoundError, DriverConflictError, DriverLoadError, DriverApiError: each message names
            the distribution and version concerned.
    """
    installed = installed_drivers()
    offers = installed.get(name, [])
    if not offers:
        close = difflib.get_close_matches(name, installed, n=1)
        hint = f", did you mean {close[0]}?" if close else "."
        names = ", ".join(installed) or "none"
        raise DriverNotFoundError(
            f"no driver named {name!r} is installed{hint} Installed: {names}", driver=name
        )
    if len(offers) > 1:
        who = " and ".join(f"{offer.provider} ({offer.target})" for offer in offers)
        raise DriverConflictError(
            f"driver {name!r} is offered by {who}: uninstall one of them", driver=name, provider=who
        )
    offer = offers[0]
    spec = _ask(offer)
    _check_spec(spec, offer)
    return spec, offer


def _ask(offer: InstalledDriver) -> DriverSpec:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(DriverHooks)
    where = f"driver {offer.name!r} of {offer.provider}"
    try:
        module = importlib.import_module(offer.target)
    except Exception as exc:  # noqa: BLE001 - a foreign module may raise anything while it is imported
        raise DriverLoadError(
            f"{where} cannot be imported: {type(exc).__name__}: {exc}",
            driver=offer.name,
            provider=offer.provider,
        ) from exc
    try:
        # A fresh manager for each driver: whatever goes wrong here leaves nothing registered.
        manager.register(module, name=offer.name)
        manager.check_pending()
        spec = manager.hook.flexkv_driver()
    except Exception as exc:  # noqa: BLE001 - the hook is foreign code
        raise DriverLoadError(
            f"{where}: {type(exc).__name__}: {exc}", driver=offer.name, provider=offer.provider
        ) from exc
    if not isinstance(spec, DriverSpec):
        kind = "nothing" if spec is None else type(spec).__name__
        raise DriverLoadError(
            f"{where}: its hook flexkv_driver must return a DriverSpec, it returned {kind}",
            driver=offer.name,
            provider=offer.provider,
        )
    return spec


def _check_spec(spec: DriverSpec, offer: InstalledDriver) -> None:
    where = f"driver {offer.name!r} of {offer.provider}"
    fault = _fault_of(spec, offer)
    if fault:
        raise DriverLoadError(f"{where} {fault}", driver=offer.name, provider=offer.provider)
    major, minor = spec.api
    if major not in SUPPORTED_MAJORS or (major == DRIVER_API[0] and minor > DRIVER_API[1]):
        raise DriverApiError(
            f"{where} was written for driver interface {major}.{minor}; this flexkv-core offers "
            f"{DRIVER_API[0]}.{DRIVER_API[1]}: install a matching version of one of them",
            driver=offer.name,
            provider=offer.provider,
        )


def _fault_of(spec: DriverSpec, offer: InstalledDriver) -> str:
    if spec.name != offer.name:
        return f"calls itself {spec.name!r}; its entry point must have the same name"
    api: object = spec.api
    if not isinstance(api, tuple) or [type(part) for part in api] != [int, int]:
        return f"gives api={api!r}; it must be two numbers, as in {DRIVER_API}"
    if not (isinstance(spec.config, type) and issubclass(spec.config, BaseModel)):
        return f"gives config={spec.config!r}; it must be a pydantic model"
    if not (isinstance(spec.open, str) and all(spec.open.partition(":"))):
        return f"gives open={spec.open!r}; it must be 'module:function'"
    return ""


def open_tier(spec: DriverSpec, provider: str, options: BaseModel, context: TierContext) -> Tier:
    """Open a tier with validated options.

    Raises:
        DriverLoadError: the module or function that ``spec.open`` names cannot be had, or returns
            something that is no tier.
        TierError, HostMemoryError: what the driver itself says.
    """
    module_name, _, function_name = spec.open.partition(":")
    try:
        opener = cast(
            "Callable[[BaseModel, TierContext], Tier]",
            getattr(importlib.import_module(module_name), function_name),
        )
    except Exception as exc:  # noqa: BLE001 - a foreign module may raise anything while it is imported
        raise DriverLoadError(
            f"driver {spec.name!r} of {provider}: {spec.open} cannot be imported: "
            f"{type(exc).__name__}: {exc}",
            driver=spec.name,
            provider=provider,
        ) from exc
    tier = opener(options, context)
    if not isinstance(tier, Tier):
        raise DriverLoadError(
            f"driver {spec.name!r} of {provider}: {spec.open} returned {type(tier).__name__}, not a Tier",
            driver=spec.name,
            provider=provider,
        )
    return tier


class Observers:
    """All observers of one chain, called so that none can hurt serving."""

    def __init__(self, plugins: Iterable[object] = ()) -> None:
        """Register ``plugins`` (objects or modules with hook implementations)."""
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(ObserverHooks)
        self._is_empty = True
        for plugin in plugins:
            self.add(plugin)

    @classmethod
    def installed(cls) -> Observers:
        """Observers from the entry-point group ``flexkv.observers``; broken ones are logged."""
        observers = cls()
        for entry in entry_points(group=OBSERVER_GROUP):
            try:
                observers.add(entry.load())
            except Exception:  # noqa: BLE001 - a foreign observer never stops the start
                logger.exception("[FlexKV] observer %s of %s is left out", entry.name, _provider(entry))
        return observers

    def add(self, plugin: object) -> None:
        """Register one; raises pluggy's error for a misspelt hook or a wrong signature."""
        name = self._manager.register(plugin)
        try:
            self._manager.check_pending()
        except Exception:  # whatever pluggy finds: its name must be free again
            self._manager.unregister(name=name)
            raise
        self._is_empty = False

    def stored(self, tier: str, keys: Sequence[BlockKey], num_bytes: int) -> None:
        """Tell of blocks that became readable."""
        self._tell("flexkv_blocks_stored", tier=tier, keys=keys, num_bytes=num_bytes)

    def loaded(self, tier: str, keys: Sequence[BlockKey], num_bytes: int) -> None:
        """Tell of blocks that were brought nearer."""
        self._tell("flexkv_blocks_loaded", tier=tier, keys=keys, num_bytes=num_bytes)

    def evicted(self, tier: str, keys: Sequence[BlockKey]) -> None:
        """Tell of blocks that left."""
        self._tell("flexkv_blocks_evicted", tier=tier, keys=keys)

    def state_changed(self, tier: str, state: str, reason: str) -> None:
        """Tell how a tier fares."""
        self._tell("flexkv_tier_state_changed", tier=tier, state=state, reason=reason)

    def _tell(self, hook: str, **facts: Any) -> None:
        if self._is_empty:
            return
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            try:
                implementation.function(*(facts[name] for name in implementation.argnames))
            except Exception:  # noqa: BLE001 - an observer never hurts serving
                logger.exception(
                    "[FlexKV] observer %s failed in %s and is silenced", implementation.plugin_name, hook
                )
                self._manager.unregister(name=implementation.plugin_name)
