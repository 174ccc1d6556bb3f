"""Which block is in which tier, in which state, pinned by whom, and who leaves first.

``stretch`` (blocks in a row), ``places`` (one tier's blocks), ``policy`` and ``eviction`` (who leaves first),
``match`` (the longest prefix), ``index`` (all tiers).  Pure bookkeeping: no I/O, no clock, no threads.
"""

from .index import BlockIndex

__all__ = ["BlockIndex"]
