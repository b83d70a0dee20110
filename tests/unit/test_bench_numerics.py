"""The forward pass in reference ops computes what the GPU's engine does: the same kernels, interpreted on this CPU."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("transformers")

import torch

from bench.engine import numerics, texts
from bench.engine.observe import Scored, force
from bench.engine.reference_decoder import ReferenceDecoder
from common.engine.gpu.runner import DeviceRunner
from common.engine.layer_group import LayerGroup
from common.models.config import load_config
from common.models.registry import load_decoder
from common.models.source import ModelFiles
from common.ops.backend import interpreted
from common.ops.linear.candidates import Candidate
from tests.models.oracles import build, save
from tests.ops.interpreter import act_as_a_gpu

PROMPT = 3
TEXT = [random.Random(row).choices(range(256), k=12) for row in range(2)]


@pytest.fixture(scope="module", params=["llama", "qwen3-tied-groups-of-three"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelFiles]:
    wide: dict[str, Any] = {"head_dim": 32} if request.param == "llama" else {}  # 8-bit KV needs more than 16
    built = build(request.param, **wide)
    return built, save(built, tmp_path_factory.mktemp(request.param))


def test_in_float32_it_is_transformers(model: tuple[Any, ModelFiles]) -> None:
    built, files = model
    decoder = load_decoder(files, load_config(files), dtype=torch.float32, device=torch.device("cpu"))
    tokens = torch.tensor(TEXT)
    with torch.no_grad():
        expected = built(tokens).logits
    found = torch.stack(list(ReferenceDecoder(decoder, torch.float32).logits(tokens)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [numerics.BASE, numerics.ENGINES[0], numerics.ENGINES[-1]], ids=lambda one: one.name)
def test_in_each_precision_it_is_the_device_runner(
    variant: numerics.Variant, model: tuple[Any, ModelFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closer to it than the precision is to float32: the same to 2e-7, but where a last bit tips an 8-bit number. Linears are
    the library's there: their kernels have tests of their own, and are slow to interpret.
    """
    config, opened = load_config(model[1]), opener(model[1])
    decoder, _ = numerics.assemble(variant, config, opened)
    found = numerics.score(decoder, TEXT, PROMPT)
    exact = numerics.score(numerics.assemble(numerics.REFERENCE, config, opened)[0], TEXT, PROMPT)
    pool = torch.full((16, config.num_layers, 2, 16, config.num_kv_heads, config.head_dim), torch.nan).to(decoder.kv)
    monkeypatch.setattr("common.ops.linear.device._choose", lambda *_: Candidate("library"))
    monkeypatch.setattr("common.ops.linear.device.wants_quantised", lambda *_: bool(variant.quantised))
    act_as_a_gpu()
    with interpreted():
        groups = [LayerGroup(pool, range(config.num_layers))]
        on_device, _ = numerics.assemble(variant, config, opened)
        runner = DeviceRunner(on_device.decoder, groups, fingerprint="test", max_rows=2, token_budget=16)
        expected = force(runner, TEXT, PROMPT)
    assert distance(found, expected) < distance(exact, expected) / 2


def opener(files: ModelFiles) -> numerics.Open:
    config, cpu = load_config(files), torch.device("cpu")
    return lambda compute, weights: load_decoder(files, config, dtype=getattr(torch, compute), device=cpu, weights=weights)


def distance(one: list[list[Scored]], other: list[list[Scored]]) -> float:
    """Root mean square of the differences of log-probabilities."""
    errors = [a.logprob - b.logprob for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def test_pieces_lie_apart_and_a_short_text_gives_fewer() -> None:
    pieces = texts.spread(list(range(100)), 3, 30)
    assert [(piece[0], len(piece)) for piece in pieces] == [(0, 30), (33, 30), (66, 30)]
    assert len(texts.spread(list(range(65)), 3, 30)) == 2 and texts.spread([1], 3, 30) == []


def test_a_ratio_of_perplexities_has_an_error() -> None:
    base = [[Scored(-1.0, 1), Scored(-2.0, 1)], [Scored(-3.0, 1)]]
    worse = [[Scored(-1.1, 1), Scored(-2.1, 1)], [Scored(-3.4, 1)]]
    ratio, error = numerics.perplexity_ratio(worse, base)
    assert ratio == pytest.approx(math.exp(0.2))
    assert error == pytest.approx(ratio * 0.1)


def test_in_parts_the_other_linears_stay_as_they_were(model: tuple[Any, ModelFiles]) -> None:
    config = load_config(model[1])
    only_down = next(part for part in numerics.PARTS if part.fp8 == {"down"})
    decoder = numerics.assemble(only_down, config, opener(model[1]))[0].decoder
    assert {role for role, weight in decoder.linears if weight.format == "fp8"} == {"down"}
