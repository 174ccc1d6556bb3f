"""The tiers in order: lookup, load, store, prefetch, poll.

* What to do: ``plan``, ``speed``, ``choice`` and ``weighing`` (load or recompute), ``receipts`` (what was
  done).
* Tiers at work: ``calls``, ``lane`` and ``executor`` (queues and threads), ``links`` (a tier with its
  policies), ``key_sets``, ``fitting`` (whether tiers fit together), ``host`` (host slots), ``capacity``
  (making room), ``parts`` (what the following share), ``jobs``.
* Moving: ``lookup`` and ``probes`` (questions to shared tiers), ``loads``, ``fills``, ``fill_batch`` and
  ``prefetched`` (from below into host slots), ``stores``, ``cascade`` and ``passing`` (host slots to below),
  ``warm_up`` (what is there at start).
* ``chain``: all of it behind one interface.
"""

from .chain import TierChain

__all__ = ["TierChain"]
