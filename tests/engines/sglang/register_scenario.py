"""Loads SGLang's plug-ins as a server does, and prints what came of it: ``register_scenario.py CASE``."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from types import SimpleNamespace

from transformers.models.auto import configuration_auto

_register = configuration_auto.CONFIG_MAPPING.register
configuration_auto.CONFIG_MAPPING.register = lambda key, value, exist_ok=False: _register(
    key, value, exist_ok=True
)

from sglang.srt.mem_cache import registry
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from flexkv_sglang import compat, register, seam

lines: list[str] = []


class Keep(logging.Handler):
    def emit(self, record):
        lines.append(f"{record.levelname} {record.getMessage()}")


logging.getLogger("flexkv_sglang").addHandler(Keep())
logging.getLogger("flexkv_sglang").setLevel(logging.INFO)


def resolve(**fields):
    """Construct and resolve arguments as the launcher does; what became of both switches, or the error."""
    try:
        args = ServerArgs(model_path="dummy", device="cpu", **fields)
        if hasattr(args, "resolve_once"):
            args.resolve_once()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return [args.enable_flexkv, args.radix_cache_backend]


def case_normal():
    load_plugins()
    register.register()  # a second time
    HookRegistry.apply_hooks()
    out = {
        "backends": registry.registered_radix_cache_backends(),
        "factory": registry.get_radix_cache_factory("flexkv") is register.build_cache,
        "neither": resolve(),
        "other": resolve(radix_cache_backend="other"),
        "named": resolve(radix_cache_backend="flexkv"),
        "switched": resolve(enable_flexkv=True),
        "conflict": resolve(enable_flexkv=True, enable_lmcache=True, tp_size=2),
        "two backends": resolve(enable_flexkv=True, radix_cache_backend="other"),
        "no file": resolve(enable_flexkv=True, flexkv_config_file="/nowhere.yaml"),
    }
    import sglang.srt.mem_cache.storage.flexkv as built_in

    out["built in is routed"] = getattr(built_in._flexkv_factory, "__wrapped__", None) is not None
    calls = []
    register.options.check_context = lambda ctx: (
        calls.append(ctx) or (_ for _ in ()).throw(KeyError("reached"))
    )
    for name, factory in (
        ("flexkv", registry.get_radix_cache_factory("flexkv")),
        ("old", built_in._flexkv_factory),
    ):
        with contextlib.suppress(KeyError):
            factory(SimpleNamespace(name=name))
    out["reached"] = [ctx.name for ctx in calls]
    return out


def case_twice():
    load_plugins()
    return {
        "both": resolve(enable_flexkv=True, radix_cache_backend="flexkv"),
        "again": resolve(enable_flexkv=True, radix_cache_backend="flexkv"),
    }


def case_file(path):
    load_plugins()
    return {"named": resolve(radix_cache_backend="flexkv", flexkv_config_file=path)}


def case_built_in_first():
    import sglang.srt.mem_cache.storage.flexkv  # noqa: F401 - registers its own factory

    load_plugins()
    return {"factory": registry.get_radix_cache_factory("flexkv") is register.build_cache}


def case_broken(*argv):
    seam.require_supported = None
    compat.register_backend = lambda *_: (_ for _ in ()).throw(RuntimeError("registry is gone"))
    sys.argv = ["launch", *argv]
    load_plugins()
    try:
        register.build_cache(None)
    except Exception as exc:
        return {"factory": f"{type(exc).__name__}: {exc}"}
    return {}


def case_unsupported():
    load_plugins()
    compat.seam.cache_clear()
    real = seam.require_supported
    compat.require_supported = lambda: real(seam.Surface(SimpleRoot()))
    return {"named": resolve(radix_cache_backend="flexkv"), "neither": resolve()}


class SimpleRoot(type(seam.installed_root())):
    """The installed root, whose version is another."""

    def __new__(cls):
        return super().__new__(cls, seam.installed_root())

    def __truediv__(self, name):
        path = type(seam.installed_root())(str(self)) / name
        return type(seam.installed_root())("/dev/null/none") if name == "_version.py" else path


if __name__ == "__main__":
    result = globals()[f"case_{sys.argv[1]}"](*sys.argv[2:])
    print(json.dumps({**result, "log": lines}))
