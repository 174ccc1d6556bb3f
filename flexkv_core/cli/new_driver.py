"""``flexkv new-driver NAME``: an empty folder becomes a driver package that passes the conformance kit.

What it writes keeps blocks in files, so that its tests pass at once; then replace the file calls in
``tier.py`` by your store's.
"""

from __future__ import annotations

import argparse
import re
from importlib.resources import files
from pathlib import Path

from ..errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
_SKELETON = {
    "pyproject.toml": "pyproject.toml.txt",
    "chain.yaml": "chain.yaml.txt",
    "flexkv_driver_@name@/__init__.py": "init.py.txt",
    "flexkv_driver_@name@/config.py": "config.py.txt",
    "flexkv_driver_@name@/tier.py": "tier.py.txt",
    "flexkv_driver_@name@/py.typed": "",
    "tests/test_@name@.py": "test.py.txt",
}
"""File of the new package -> template beside this module."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this verb to the command line."""
    parser = subparsers.add_parser("new-driver", help="write the skeleton of a driver", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="what chains will write: a-z, 0-9 and _")
    parser.add_argument(
        "--into", type=Path, metavar="DIR", help="the package's folder (default flexkv-driver-NAME)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the package and say what to do next."""
    folder = args.into or Path(f"flexkv-driver-{args.name.replace('_', '-')}")
    for path in write_skeleton(args.name, folder):
        print(f"wrote {path}")
    print(f"next: cd {folder} && pip install -e '.[test]' && pytest && flexkv check chain.yaml")
    return 0


def write_skeleton(name: str, folder: Path) -> list[Path]:
    """Write the package of driver ``name`` into ``folder``, which must be absent or empty.

    Raises:
        ConfigError: the name is none, an installed distribution offers it, or something is there already.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError("NAME", [f"{name}: must be of a-z, 0-9 and _, and begin with a letter"])
    _refuse_offered(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(str(folder), ["is there already and not empty"])
    written = []
    for target, template in _SKELETON.items():
        path = folder / _filled(target, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (files(__package__) / "_skeleton" / template).read_text() if template else ""
        path.write_text(_filled(text, name), encoding="utf-8")
        written.append(path)
    return written


def _refuse_offered(name: str) -> None:
    """Two offers of one name stop every chain that uses it, so the second one is not begun."""
    from ..drivers import installed_drivers

    offers = installed_drivers().get(name, [])
    if offers:
        who = " and ".join(offer.provider for offer in offers)
        raise ConfigError("NAME", [f"{name}: is offered by {who} already; take another name"])


def _filled(text: str, name: str) -> str:
    from ..drivers import DRIVER_API

    words = {
        "@name@": name,
        "@dashed@": name.replace("_", "-"),
        "@Name@": "".join(part.capitalize() for part in name.split("_")),
        "@api@": str(DRIVER_API),
    }
    for word, value in words.items():
        text = text.replace(word, value)
    return text
