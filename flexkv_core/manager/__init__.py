"""All that an engine sees: the task API over a chain.

``opening`` (a chain from its configuration), ``sequences`` (token ids and their keys), ``masks``, ``tasks``
(one end for each), ``manager``.
"""

from .manager import NO_TASK, KVManager, KVResponse, KVResponseStatus, Progress, Scope, Tokens

__all__ = ["NO_TASK", "KVManager", "KVResponse", "KVResponseStatus", "Progress", "Scope", "Tokens"]
