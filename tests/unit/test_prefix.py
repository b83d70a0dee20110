"""Equal hash means equal tokens from the first on, equal model and equal tenant."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.cache.prefix import HASH_BYTES, hash_chain, short_hash, short_hashes
from common.cache.spec import CacheLayout, Component, GroupSpec, Member, gqa_layout

TOKENS = list(range(100, 150))


def chain(
    tokens: list[int] = TOKENS, block_tokens: int = 16, *, fingerprint: str = "m", salt: bytes = b"", parent: bytes = b""
):
    return hash_chain(tokens, block_tokens, fingerprint=fingerprint, salt=salt, parent=parent)


def test_only_full_blocks_have_a_hash():
    assert [len(chain(TOKENS[:n])) for n in (0, 15, 16, 17, 32)] == [0, 0, 1, 1, 2]
    assert {len(block_hash) for block_hash in chain()} == {HASH_BYTES}


def test_hashes_are_the_same_in_every_process():
    assert chain([1, 2, 3, 4], 2)[1].hex() == "3b6c28e6bb752cf67ec4c0fa20bab8e3"


def test_a_later_token_changes_no_earlier_hash():
    changed = [*TOKENS[:40], 7, *TOKENS[41:]]
    assert chain(changed)[:2] == chain()[:2]
    assert chain(changed)[2] != chain()[2]


def test_an_early_token_changes_every_later_hash():
    assert not set(chain([7, *TOKENS[1:]])) & set(chain())


def test_equal_blocks_at_different_places_differ():
    assert len(set(chain([5] * 64))) == 4


def test_model_tenant_and_block_size_are_part_of_the_address():
    everything = [*chain(), *chain(fingerprint="n"), *chain(salt=b"t"), *chain(block_tokens=8)]
    assert len(set(everything)) == len(everything)
    assert chain(fingerprint="ab", salt=b"c") != chain(fingerprint="a", salt=b"bc")


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=70), cut=st.integers(0, 4), block_tokens=st.integers(1, 20))
def test_a_chain_can_be_continued(tokens: list[int], cut: int, block_tokens: int):
    whole = chain(tokens, block_tokens)
    head = whole[:cut]
    parent = head[-1] if head else b""
    assert whole == head + chain(tokens[len(head) * block_tokens :], block_tokens, parent=parent)


def test_short_hashes_of_many_are_those_of_each():
    hashes = hash_chain(list(range(64)), 4, fingerprint="m", salt=b"t")
    nothing = bytes(HASH_BYTES)
    assert short_hashes([*hashes, nothing]) == [*map(short_hash, hashes), 1] and short_hashes([]) == []


def test_a_gqa_block_holds_k_and_v_of_all_layers():
    layout = gqa_layout(30, 3, 64, 4, 16)
    assert (layout.block_tokens, layout.block_bytes) == (16, 30 * 2 * 16 * 3 * 64 * 4)
    (group,) = layout.groups
    assert group.offset_bytes(1, "kv") == 2 * 16 * 3 * 64 * 4
    assert layout.sized(7, "f").num_blocks == 7
    assert layout.digest() == layout.sized(7, "f").digest() != gqa_layout(30, 3, 64, 2, 16).digest()


def test_groups_of_different_grain_have_blocks_of_their_own():
    latent = Component(name="latent", kind="paged", entry_bytes=100, layout="bf16")
    compressed = Component(name="ckv", kind="paged", entry_bytes=10, layout="bf16", tokens_per_entry=4)
    state = Component(name="delta", kind="state", entry_bytes=5000, layout="fp32", rollback="snapshot")
    groups = (
        GroupSpec(name="a", members=(Member(0, latent), Member(0, compressed)), block_tokens=16),
        GroupSpec(name="b", members=(Member(1, state),), block_tokens=24),
    )
    layout = CacheLayout(groups=groups)
    assert [group.block_bytes for group in groups] == [16 * 100 + 4 * 10, 5000]
    assert (layout.block_bytes, layout.block_tokens) == (16 * 100 + 4 * 10, 48)
    assert groups[0].offset_bytes(0, "ckv") == 1600
