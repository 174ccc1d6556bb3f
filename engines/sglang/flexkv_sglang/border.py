"""The border to the engine: a fault of ours ends the cache, not SGLang's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from flexkv_core import EngineError

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Fallible(Protocol):
    """A cache that can be switched off.

    Attributes:
        fails_open: Whether a fault of ours switches the cache off instead of being raised (in tests).
        is_broken: Whether that has happened.
    """

    fails_open: bool
    is_broken: bool

    def switch_off(self, where: str, fault: Exception) -> None:
        """From now on nothing is promised or stored."""


def guarded(default: Any) -> Callable[[_Method], _Method]:
    """A method that gives ``default`` once it, or another one, has failed: from then on the engine computes.

    ``EngineError`` passes: it says that going on would give wrong answers.
    """

    def guard(method: _Method) -> _Method:
        @wraps(method)
        def call(self: Fallible, *args: Any, **kwargs: Any) -> Any:
            if self.is_broken:
                return default
            return attempt(self, lambda: method(self, *args, **kwargs), lambda: default, method.__name__)

        return cast("_Method", call)

    return guard


def attempt(cache: Fallible, action: Callable[[], Any], otherwise: Callable[[], Any], where: str) -> Any:
    """What ``action`` gives, also if the cache is off; if it fails, switch it off and give ``otherwise``."""
    try:
        return action()
    except EngineError:
        raise
    except Exception as exc:  # the border to the engine: nothing of ours may end its scheduler
        if not cache.fails_open:
            raise
        cache.switch_off(where, exc)
        return otherwise()
