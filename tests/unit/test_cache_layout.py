"""Layers of equal retention share a group, whose blocks have their own size; memory is divided by what sequences need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cache.division import divide_memory
from common.cache.retention import KEEP_ALL, Retention
from common.cache.spec import LayerCache, attention_layout, gqa_layout


def layer(window: int = 0, chunk: int = 0, *, heads: int = 2) -> LayerCache:
    return LayerCache(num_kv_heads=heads, head_dim=8, dtype_bytes=2, retention=Retention(window, chunk))


def test_layers_of_one_kind_lie_as_they_always_did() -> None:
    """The digest is part of every fingerprint: KV of earlier versions stays readable."""
    assert gqa_layout(30, 3, 64, 4, 16).digest() == "a5e72363571e6f09"
    assert attention_layout([layer()] * 3, 16) == gqa_layout(3, 2, 8, 2, 16)


def test_groups_have_blocks_of_their_own_size() -> None:
    layout = attention_layout([layer(128), layer(heads=4), layer(128), layer(128)], 16)
    assert [group.name for group in layout.groups] == ["kv", "window128"]
    assert [[member.layer for member in group.members] for group in layout.groups] == [[1], [0, 2, 3]]
    assert [group.block_bytes for group in layout.groups] == [16 * 2 * 4 * 8 * 2, 3 * 16 * 2 * 2 * 8 * 2]
    assert [group.retention for group in layout.groups] == [KEEP_ALL, Retention(window=128)]
    sized = layout.sized(10, "f", 4)
    assert sized.memory_bytes == 10 * layout.groups[0].block_bytes + 4 * layout.groups[1].block_bytes
    assert sized.longest_sequence == 3 * 16, "the window group is too small to keep a window for a longer one"
    assert layout.sized(10, "f", 11).longest_sequence == 9 * 16
    assert layout.digest() != attention_layout([layer(64), layer(heads=4), layer(64), layer(64)], 16).digest()


def test_the_group_that_keeps_most_comes_first() -> None:
    layout = attention_layout([layer(8), layer(chunk=64), layer(), layer(32)], 4)
    assert [group.retention for group in layout.groups] == [
        KEEP_ALL,
        Retention(chunk=64),
        Retention(window=32),
        Retention(window=8),
    ]


@pytest.mark.parametrize("kinds", [(0, 128), (0, 128, 4096), (128, 512)])
@given(memory=st.integers(0, 1 << 28), num_sequences=st.integers(1, 64), max_context=st.integers(1, 1 << 17))
def test_memory_is_divided_and_not_exceeded(kinds: tuple[int, ...], memory: int, num_sequences: int, max_context: int) -> None:
    groups = attention_layout([layer(window) for window in kinds], 16).groups
    counts = divide_memory(groups, memory, max_context=max_context, num_sequences=num_sequences, step_tokens=256)
    used = sum(group.block_bytes * count for group, count in zip(groups, counts, strict=True))
    assert memory - sum(group.block_bytes for group in groups) < used <= memory
    assert min(counts) >= 0


def test_windows_get_what_running_sequences_need_and_the_rest_is_for_prefixes() -> None:
    groups = attention_layout([layer(), *[layer(128)] * 3], 16).groups
    full, window = divide_memory(groups, 1 << 26, max_context=2048, num_sequences=64, step_tokens=256)
    assert window == 64 * 10 + 16
    assert full > 64 * 128, "more than the sequences themselves need"
    short_full, short_window = divide_memory(groups, 1 << 22, max_context=1 << 17, num_sequences=64, step_tokens=256)
    assert short_full * 16 > 2048, "one long sequence, or 64 short ones"
    assert short_window <= window


def test_one_group_gets_everything() -> None:
    (group,) = gqa_layout(3, 2, 8, 2, 16).groups
    assert divide_memory([group], 7 * group.block_bytes + 1, max_context=100, num_sequences=9, step_tokens=9) == [7]
