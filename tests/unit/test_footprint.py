"""What `penstock doctor --model` says of a model on a card."""

from __future__ import annotations

import msgspec
import pytest

from common.cache.spec import CacheLayout, Component, GroupSpec, Member, gqa_layout
from common.cli import doctor
from common.cli.footprint import ACHIEVED, CARDS, Footprint, describe_cards, describe_kv, footprint
from common.engine.load.precision import Precision
from common.models.config import config_from_json
from common.models.shapes import SHAPES
from common.models.weights.inventory import Inventory

H200 = CARDS[1]
BF16 = Precision(compute="bfloat16", weights="none", kv="bfloat16")


def llama_8b(precision: Precision = BF16) -> Footprint:
    inventory = Inventory(2 * 128_256 * 4096, 6_979_588_096)
    return footprint(
        config_from_json(SHAPES["llama-3.1-8b"]), precision, inventory, gqa_layout(32, 8, 128, precision.kv_bytes, 16)
    )


def test_a_decode_step_reads_every_weight_but_the_input_embedding() -> None:
    found = llama_8b()
    assert found.step_bytes == pytest.approx(15.0e9, rel=0.01)
    assert found.weight_bytes - found.step_bytes == 2 * 128_256 * 4096
    alone = ACHIEVED * 4.8e12 / (found.step_bytes + 1024 * 131_072)
    assert found.tokens_per_s(H200, 1) == pytest.approx(alone) == pytest.approx(279, abs=1)
    assert 31 * alone > found.tokens_per_s(H200, 32) > 20 * alone  # KV is read for each row, weights once


def test_fp8_halves_the_linears_and_the_kv() -> None:
    plain, fp8 = llama_8b(), llama_8b(Precision(compute="bfloat16", weights="fp8", kv="fp8"))
    assert plain.weight_bytes - fp8.weight_bytes == 6_979_588_096
    assert fp8.kv_bytes(1000) * 2 == plain.kv_bytes(1000) == 131_072_000


def test_what_does_not_fit_says_so_and_promises_no_speed() -> None:
    large = msgspec.structs.replace(llama_8b(), weight_bytes=140e9)
    lines = describe_cards(large).splitlines()
    assert [line.partition(":")[2][:13] == " does not fit" for line in lines[1:]] == [True, True, False]
    assert "at 256" not in lines[3]  # the B200 holds fewer beside them


def test_each_group_of_layers_is_counted_by_what_it_keeps() -> None:
    def component(window: int) -> Component:
        return Component(name="kv", kind="window" if window else "paged", entry_bytes=256, layout="kv", window=window)

    groups = [
        GroupSpec(name=name, members=tuple(Member(layer, component(window)) for layer in layers), block_tokens=16)
        for name, layers, window in (("full", (1, 3), 0), ("window", (0, 2, 4), 128))
    ]
    found = footprint(
        config_from_json(SHAPES["tiny"]), BF16, Inventory(100, 1000), CacheLayout(groups=tuple(groups), num_blocks=1)
    )
    assert found.kv_bytes(1000) == 2 * 256 * 1000 + 3 * 256 * 128
    assert "window: 3 layers, 768 bytes a token for the last 128" in describe_kv(found, 1000)


def test_doctor_says_it_of_a_model_that_is_here_and_nothing_of_one_that_is_not() -> None:
    kv, cards = doctor.check_footprint("dummy:llama-3.1-8b", {})
    assert "131,072 bytes a token" in kv.found and "H200: 279 tok/s at 1" in cards.found
    assert doctor.check_footprint("no-such-model", {}) == []
