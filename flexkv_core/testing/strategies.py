"""hypothesis strategies: layouts, token sequences that share prefixes, batches of values.

Small on purpose: short blocks and few distinct tokens make sequences meet often.
"""

from __future__ import annotations

from hypothesis import strategies as st

from flexkv_core.keys import Namespace
from flexkv_core.layout import BlockLayout, kv_layout

from .values import Value, make_value

MIN_TOKEN, MAX_TOKEN = -(1 << 63), (1 << 63) - 1


def token_ids() -> st.SearchStrategy[int]:
    """Mostly a handful of small ids; sometimes any that fit into 64 signed bits."""
    return st.one_of(st.integers(0, 3), st.integers(0, 3), st.integers(MIN_TOKEN, MAX_TOKEN))


def token_lists(*, min_size: int = 0, max_size: int = 70) -> st.SearchStrategy[list[int]]:
    """One sequence of tokens."""
    return st.lists(token_ids(), min_size=min_size, max_size=max_size)


@st.composite
def prompts(draw: st.DrawFn, *, max_prompts: int = 6, max_tokens: int = 40) -> list[list[int]]:
    """Sequences of which later ones often go on from a cut of an earlier one."""
    made: list[list[int]] = []
    for _ in range(draw(st.integers(1, max_prompts))):
        head: list[int] = []
        goes_on = draw(st.booleans())
        if made and goes_on:
            whole = draw(st.sampled_from(made))
            head = whole[: draw(st.integers(0, len(whole)))]
        made.append(head + draw(token_lists(max_size=max(0, max_tokens - len(head)))))
    return made


@st.composite
def layouts(draw: st.DrawFn, *, max_layers: int = 3, max_pages: int = 4) -> BlockLayout:
    """Layouts with K and V rows of any (small) lengths, or one latent row, and any page size."""
    rows = st.integers(1, 9).map(lambda units: units * 8)
    page = draw(st.sampled_from([1, 2, 4]))
    return kv_layout(
        num_layers=draw(st.integers(1, max_layers)),
        row_bytes=draw(st.one_of(st.tuples(rows), st.tuples(rows, rows))),
        block_tokens=page * draw(st.integers(1, max_pages)),
        page_tokens=page,
    )


@st.composite
def batches(draw: st.DrawFn, layout: BlockLayout, *, max_size: int = 8) -> list[Value]:
    """Values with distinct keys, of any fill, each payload seeded anew."""
    fills = token_lists(min_size=1, max_size=layout.block_tokens)
    blocks = draw(st.lists(fills, max_size=max_size, unique_by=tuple))
    return [make_value(layout, tokens, draw(st.integers(0, 3))) for tokens in blocks]


def namespaces() -> st.SearchStrategy[Namespace]:
    """Namespaces whose fields are short texts that could run into each other."""
    text = st.text(alphabet="ab:\0/", max_size=3)
    return st.builds(
        Namespace,
        model=text,
        revision=text,
        adapter=text,
        adapter_digest=text,
        extra_key=text,
        cache_salt=text,
    )
