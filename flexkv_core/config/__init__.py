"""Configuration: every source into one frozen chain, each value with its origin.

The only reader of the environment, and only inside ``load_config``: nothing is read at import and
nothing is kept, so two managers in one process may differ.

``text`` reads files, ``seed`` and ``flat`` know FlexKV's own keys, ``names`` the variables of the
chain's fields, ``draft`` who beats whom, ``options`` the drivers' models, ``rules`` what cannot
work, ``report`` how it is told, and ``load`` runs them in turn.
"""

from .draft import Origin, Rank
from .effective import EffectiveConfig, ResolvedTier, Value
from .load import load_config

__all__ = ["EffectiveConfig", "Origin", "Rank", "ResolvedTier", "Value", "load_config"]
