"""The function behind SGLang's plug-in entry point: registers ``flexkv`` and makes both switches one.

SGLang runs it in every process, before arguments are parsed.  An exception here would only be logged,
and show as "not registered" many seconds later; so a failure is kept and raised where flexkv is asked for.

``--radix-cache-backend flexkv`` and ``--enable-flexkv`` both end as both (HS-54): the name selects our
factory, the switch makes SGLang call the tick and check its own arguments.
"""

from __future__ import annotations

import logging
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from flexkv_core import EngineError
from flexkv_core.config import EffectiveConfig, load_config

from . import compat, options
from .options import BACKEND
from .pools import check_allocator

logger = logging.getLogger(__name__)

_BUILT_IN = "sglang.srt.mem_cache.storage.flexkv._flexkv_factory"


class _State:
    """What happened in this process so far."""

    failure: BaseException | None = None
    is_unified: bool = False
    replaced: Any = None


_state = _State()


def register() -> None:
    """Register the backend and the hook on arguments.  May be called twice.

    Raises:
        SystemExit: this cannot work and the command line asks for flexkv: the only exception that SGLang's
            plug-in loader lets through.
    """
    try:
        _state.replaced = compat.register_backend(BACKEND, build_cache)
        _hook_once()
    except Exception as exc:  # noqa: BLE001 - SGLang would swallow it; it is raised where flexkv is used
        _state.failure = exc
        logger.exception("[FlexKV] cannot be used")
        if is_asked_in(sys.argv):
            raise SystemExit(f"flexkv was asked for and cannot be used: {exc}") from exc
        return
    if _state.replaced not in (None, build_cache):
        logger.info(
            "[FlexKV] %s takes the backend %r over from %s", product(), BACKEND, _name(_state.replaced)
        )


def _hook_once() -> None:
    arguments = compat.arguments_entry()
    if not compat.has_hook(arguments, resolve_switches):
        compat.hook(arguments, resolve_switches, "before")
    if find_spec(_BUILT_IN.rpartition(".")[0]) and not compat.has_hook(_BUILT_IN, build_cache):
        compat.hook(_BUILT_IN, build_cache, "replace")


def is_asked_in(argv: list[str]) -> bool:
    """Whether a command line asks for flexkv, as far as can be told without parsing it."""
    if "--enable-flexkv" in argv or f"--radix-cache-backend={BACKEND}" in argv:
        return True
    return any(
        flag == "--radix-cache-backend" and value == BACKEND
        for flag, value in zip(argv, argv[1:], strict=False)
    )


def resolve_switches(args: Any, *_: Any, **__: Any) -> None:
    """Hook before SGLang resolves its arguments: check ours, then make both switches say the same.

    Raises:
        EngineError: SGLang's version or an option cannot be served.
        ConfigError: the chain cannot be used.
    """
    if getattr(args, "_resolution_finished", False) or not options.is_asked(args):
        return
    _raise_failure()
    compat.seam()
    options.check_arguments(args)
    read_config(args)
    if options.is_asked_twice(args) and not _state.is_unified:
        logger.warning(
            "[FlexKV] --enable-flexkv and --radix-cache-backend %s mean the same; one is enough", BACKEND
        )
    _state.is_unified = True
    args.enable_flexkv = True
    args.radix_cache_backend = BACKEND


def read_config(args: Any) -> EffectiveConfig:
    """The effective configuration; ``--flexkv-config-file`` wins over the environment (HS-56).

    Raises:
        ConfigError: with every finding.
    """
    config = load_config(getattr(args, "flexkv_config_file", None))
    for line in config.describe():
        logger.info("[FlexKV] %s", line)
    return config


def build_cache(ctx: Any) -> Any:
    """The backend's factory: SGLang calls it in each scheduler process.

    Args:
        ctx: SGLang's ``TreeCacheBuildContext``.

    Raises:
        EngineError, LayoutError: version, options, model or pool cannot be served.
        ConfigError: the chain cannot be used.
    """
    _raise_failure()
    seam = compat.seam()
    options.check_context(ctx)
    check_allocator(ctx.params.token_to_kv_pool_allocator)
    config = read_config(ctx.server_args)
    from . import scheduler_hooks  # they import SGLang's tree
    from .radix_cache import FlexKVRadixCache

    cache = FlexKVRadixCache(ctx, config)
    scheduler_hooks.install(cache, is_ticked=bool(getattr(ctx.server_args, "enable_flexkv", False)))
    logger.info("[FlexKV] backend %r: %s on %s", BACKEND, product(), seam.describe())
    return cache


def product() -> str:
    """This distribution and its version."""
    try:
        return f"flexkv-core {version('flexkv-core')}"
    except PackageNotFoundError:
        return "flexkv-core (not installed as a distribution)"


def _raise_failure() -> None:
    if _state.failure is not None:
        raise EngineError(f"flexkv cannot be used: {_state.failure}") from _state.failure


def _name(factory: Any) -> str:
    return f"{getattr(factory, '__module__', '?')}.{getattr(factory, '__qualname__', factory)}"
