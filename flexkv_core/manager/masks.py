"""Masks: one bool for each token of a sequence, as engines give and get them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Mask = np.ndarray[Any, Any]
    """1-D, bool, one entry for each token."""


def mask_of(num_tokens: int, ranges: Sequence[tuple[int, int]]) -> Mask:
    """A mask of ``num_tokens``, True in each of ``ranges``, ``[start, stop)``."""
    import numpy as np  # not at import: this package stays light

    mask = np.zeros(num_tokens, dtype=bool)
    for start, stop in ranges:
        mask[start:stop] = True
    return mask


def leading_true(mask: Any, num_tokens: int) -> int:
    """How many tokens at the front are to be stored; the mask must be True, then False.

    Raises:
        ValueError: it is not, or it is of another length.
    """
    if mask is None:
        return num_tokens
    try:
        return leading_false([not flag for flag in mask], num_tokens)
    except ValueError as exc:
        raise ValueError("the mask of a store must be True per token to store, then False") from exc


def leading_false(mask: Any, num_tokens: int) -> int:
    """How many tokens at the front the engine has; the mask must be False, then True.

    Raises:
        ValueError: it is not, or it is of another length.
    """
    if mask is None:
        return 0
    flags = [bool(flag) for flag in mask]
    if len(flags) != num_tokens:
        raise ValueError(f"a mask of {len(flags)} for {num_tokens} tokens")
    start = flags.index(True) if True in flags else num_tokens
    if not all(flags[start:]):
        raise ValueError("the mask of a load must be False for what is there, then True")
    return start
