"""A tier round a tier: what every driver gets without writing it.

From outside to inside: ``meter`` counts, ``breaker`` answers for a tier that is down, ``retry``
tries again, ``verify`` seals what leaves and checks what comes back, ``codec`` compresses and encrypts,
``limit`` keeps to the configured rates, ``guard`` turns whatever a driver raises or returns into outcomes.
``wrap`` puts them together; each is tested once.
"""

from .stack import wrap

__all__ = ["wrap"]
