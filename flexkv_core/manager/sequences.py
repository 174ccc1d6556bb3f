"""Sequences: token ids under the identity of an engine's bytes and a request's own scope.

Threads: the manager's owner.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from ..keys import BlockChain, Namespace, encode_tokens
from ..layout import BlockLayout

_ROOTS_KEPT = 4096


@dataclass(frozen=True)
class Scope:
    """What separates one request's blocks from another's, beyond its tokens.

    Attributes:
        adapter: LoRA adapter.
        adapter_digest: Digest of the adapter's content, or its load count.
        extra_key: The engine's own separation key.
        cache_salt: A tenant's salt.
    """

    adapter: str = ""
    adapter_digest: str = ""
    extra_key: str = ""
    cache_salt: str = ""


NO_SCOPE = Scope()
Tokens = Any
"""Token ids: a list, ``array('q')``, a 1-D int64 array or CPU tensor, or what ``KVManager.sequence`` made."""


class ScopedChain(BlockChain):
    """A block chain that knows under which scope it was made.

    Attributes:
        scope: The scope.
    """

    __slots__ = ("scope",)

    def __init__(self, root: bytes, block_tokens: int, tokens: bytes, scope: Scope) -> None:
        """As ``BlockChain``; ``root`` is that of ``scope``."""
        super().__init__(root, block_tokens, tokens)
        self.scope = scope


class Sequences:
    """Makes block chains.

    Attributes:
        namespace: The identity of the engine's blocks now.
    """

    def __init__(self, namespace: Namespace, layout: BlockLayout) -> None:
        """Fill layout and block size of ``namespace`` in from ``layout``."""
        self.namespace = replace(namespace, layout=layout.fingerprint.hex(), block_tokens=layout.block_tokens)
        self._block_tokens = layout.block_tokens
        self._roots: OrderedDict[Scope, bytes] = OrderedDict()

    def of(self, tokens: Tokens, scope: Scope) -> BlockChain:
        """Token ids under a scope.

        A sequence that was made before the weights changed gets the keys of the new ones, in place.

        Raises:
            ValueError: a sequence was made under another scope, or for blocks of another size.
        """
        root = self._root(scope)
        if not isinstance(tokens, BlockChain):
            return ScopedChain(root, self._block_tokens, encode_tokens(tokens), scope)
        kept: BlockChain = tokens
        if tokens.block_tokens != self._block_tokens:
            raise ValueError(
                f"a sequence of blocks of {tokens.block_tokens} tokens, not {self._block_tokens}"
            )
        if tokens.root != root:
            if not isinstance(tokens, ScopedChain) or tokens.scope != scope:
                raise ValueError(
                    "the sequence was made under another scope than this call's: give both the same"
                )
            kept.move(root)
        return kept

    def change_weights(self, version: str | None) -> str:
        """Give blocks another identity from now on.

        Args:
            version: The new version of the weights; None for a random one.

        Returns:
            The version.
        """
        if not version:
            version = f"{self.namespace.weights_version.split('+')[0]}+{secrets.token_hex(8)}"
        self.namespace = replace(self.namespace, weights_version=version)
        self._roots.clear()
        return version

    def _root(self, scope: Scope) -> bytes:
        root = self._roots.get(scope)
        if root is None:
            root = self.namespace.for_request(
                adapter=scope.adapter,
                adapter_digest=scope.adapter_digest,
                extra_key=scope.extra_key,
                cache_salt=scope.cache_salt,
            ).digest()
            self._roots[scope] = root
            if len(self._roots) > _ROOTS_KEPT:
                self._roots.popitem(last=False)
        return root
