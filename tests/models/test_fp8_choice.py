"""What FP8 costs is measured on text, and stays within what it may cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from bench.engine.reference_decoder import ReferenceDecoder
from common.engine.load import fp8_choice
from common.engine.load import runners as load
from common.engine.load.causal import CENTERED_POSITIONS, can_center
from common.engine.load.fp8_choice import Fp8Choice, known_or_measured, measure
from common.engine.load.layout import EngineConfig
from common.engine.load.precision import Precision
from common.models.config import ModelConfig, load_config
from common.models.decoder import Decoder, modules
from common.models.registry import load_decoder
from common.models.shapes import SHAPES
from common.models.source import ModelFiles, resolve
from common.ops.kept import CACHE_VARIABLE
from common.ops.linear.linear import linear
from common.ops.norm.rms_norm_reference import rms_norm_reference
from tests.models.oracles import build, save

CPU = torch.device("cpu")
TEXT = [(7 * index * index + 3 * index) % 256 for index in range(96)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.fixture(scope="module", params=["llama", "qwen3-tied-groups-of-three"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, ModelConfig]:
    files = save(build(request.param), tmp_path_factory.mktemp(request.param))
    return files, load_config(files)


def opened(model: tuple[ModelFiles, ModelConfig], **settings: Any) -> Decoder:
    return load_decoder(*model, dtype=torch.float32, device=CPU, **settings)


def choice_within(model: tuple[ModelFiles, ModelConfig], max_loss: float, *, kv: bool = False) -> Fp8Choice:
    return measure(opened(model), opened(model, weights="fp8", fp8_head=True), TEXT, max_loss, kv=kv)


def unquantised(decoder: Decoder) -> list[str]:
    """The modules of linears that are not FP8."""
    return sorted(
        module
        for layer, weights in enumerate(decoder.layers)
        for role, weight in weights.linears.items()
        if weight.format != "fp8"
        for module in modules(decoder.config, (layer, role))
    )


def logits(decoder: Decoder, text: torch.Tensor, center: torch.Tensor | None = None) -> torch.Tensor:
    return fp8_choice._logits(decoder, fp8_choice.Causal(decoder, text.shape[1], center=center), text)


def test_its_forward_pass_is_the_models(model: tuple[ModelFiles, ModelConfig]) -> None:
    decoder = opened(model)
    text = torch.tensor(TEXT).view(2, -1)
    expected = torch.cat(list(ReferenceDecoder(decoder, torch.float32).logits(text)))
    torch.testing.assert_close(logits(decoder, text), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3-longrope", "olmo2", "gpt-oss", "llama4", "llama4-norms-of-q-and-k"])
def test_its_forward_pass_is_that_of_every_family(name: str, tmp_path: Path) -> None:
    """With an FP8 pool it is another, but not by much: what a softmax with a cap or sinks would see is not centred."""
    oracle = build(name)
    files = save(oracle, tmp_path)
    config = load_config(files)
    decoder = opened((files, config))
    text = torch.tensor(TEXT).view(2, -1)
    with torch.no_grad():
        expected = oracle(text, use_cache=False).logits.flatten(0, 1)
    torch.testing.assert_close(logits(decoder, text), expected, atol=1e-3, rtol=1e-3)
    found = measure(decoder, None, TEXT, 0.0, kv=True)
    assert 0 < found.kv_loss < 0.05
    centers = found.center(config, CPU)
    for layer, center in zip(decoder.layers, centers, strict=True):
        assert bool(center.any()) == can_center(layer.mixer)


@pytest.mark.parametrize("name", ["phi3", "qwen3-moe"])
def test_linears_that_are_fused_in_the_files_or_beside_experts_are_left_alone_by_their_names(name: str, tmp_path: Path) -> None:
    files = save(build(name), tmp_path)
    given = files, load_config(files)
    limit = choice_within(given, 0.0).full_loss / 3
    found = choice_within(given, limit)
    decoder = opened(given, weights="fp8", plain=found.plain, fp8_head=found.head)
    assert found.loss <= limit and found.plain and 0 < found.share < 1
    assert unquantised(decoder) == sorted(found.plain)


def test_its_fp8_pool_is_the_pools(model: tuple[ModelFiles, ModelConfig]) -> None:
    decoder = opened(model)
    decoder.k_center = torch.randn(model[1].num_layers, model[1].num_kv_heads, model[1].head_dim) / 4
    text = torch.tensor(TEXT).view(2, -1)
    expected = torch.cat(list(ReferenceDecoder(decoder, torch.float8_e4m3fn).logits(text)))
    exact, found = logits(decoder, text), logits(decoder, text, decoder.k_center)
    # the kernels' queries and weights are float16 beside 8-bit keys
    assert fp8_choice._divergence(expected, found) < fp8_choice._divergence(expected, exact) / 4


def test_a_pool_takes_from_what_weights_may_cost(model: tuple[ModelFiles, ModelConfig]) -> None:
    without = choice_within(model, 0.0)
    limit = without.full_loss / 3
    alone, beside = choice_within(model, limit), choice_within(model, limit, kv=True)
    assert alone.kv_loss == 0 < beside.kv_loss
    assert beside.loss + beside.kv_loss <= limit or beside.share == 0
    assert beside.share <= alone.share


def test_everything_is_fp8_where_that_costs_little_enough(model: tuple[ModelFiles, ModelConfig]) -> None:
    for max_loss in (0.0, 10.0):
        found = choice_within(model, max_loss)
        assert (found.plain, found.share, found.head) == ([], 1.0, True)
        assert found.loss == found.full_loss > 0


def test_what_costs_too_much_is_left_alone(model: tuple[ModelFiles, ModelConfig]) -> None:
    everything = choice_within(model, 0.0).full_loss
    found = choice_within(model, everything / 3)
    assert 0 < found.share < 1 and 0 <= found.loss <= everything / 3 and found.full_loss == everything
    # and so it is loaded
    decoder = opened(model, weights="fp8", plain=found.plain, fp8_head=found.head)
    assert (decoder.head.format == "fp8") == found.head
    assert unquantised(decoder) == sorted(found.plain)
    text = torch.tensor(TEXT).view(1, -1)
    reference = logits(opened(model), text)
    assert fp8_choice._divergence(reference, logits(decoder, text)) == pytest.approx(found.loss + found.floor, rel=1e-3)


def test_the_head_is_a_linear_among_others(model: tuple[ModelFiles, ModelConfig]) -> None:
    everything = choice_within(model, 0.0)
    assert 0 < everything.head_loss < everything.full_loss
    without = measure(opened(model), opened(model, weights="fp8"), TEXT, 0.0, kv=False)
    assert not without.head and without.head_loss == 0 and without.share == 1.0
    # it is the first to be left alone
    limit = (without.loss + everything.loss) / 2
    assert without.loss < limit < everything.loss
    found = choice_within(model, limit)
    assert (found.head, found.plain, found.loss) == (False, [], without.loss)
    size = model[1].vocab_size * model[1].hidden_size
    assert everything.head_read_bytes == 3 * size  # of float32 four
    assert everything.head_memory_bytes == (-size if model[1].tie_embeddings else 3 * size)


def test_a_head_in_fp8_is_asked_for(model: tuple[ModelFiles, ModelConfig]) -> None:
    assert opened(model, weights="fp8").head.format != "fp8"
    assert opened(model, fp8_head=True).head.format != "fp8"
    assert opened(model, weights="fp8", fp8_head=True).head.format == "fp8"


def test_nothing_is_fp8_where_everything_costs_too_much(model: tuple[ModelFiles, ModelConfig]) -> None:
    found = choice_within(model, 1e-12)
    assert found.share == 0 and found.loss == 0 and len(found.plain) == 7 * model[1].num_layers and not found.head


def test_keys_are_centred_on_what_all_positions_share(model: tuple[ModelFiles, ModelConfig]) -> None:
    config = model[1]
    decoder = opened(model)
    found = measure(decoder, None, TEXT, 0.0, kv=True)
    hidden = decoder.embedding[torch.tensor(TEXT)]
    layer = decoder.layers[0]
    normed = rms_norm_reference(hidden, layer.input_norm, config.rms_eps)
    heads, kv_heads = config.num_heads, config.num_kv_heads
    keys = linear(normed, layer.qkv).view(len(TEXT), -1, config.head_dim)[:, heads : heads + kv_heads]
    if layer.k_norm is not None:
        keys = rms_norm_reference(keys, layer.k_norm, config.rms_eps)
    mean = keys.mean(0).double()
    first, second = mean.chunk(2, -1)
    positions = min(CENTERED_POSITIONS, config.max_context)
    rotated = torch.zeros_like(mean)
    for cos, sin in (row.double().chunk(2) for row in decoder.rope.table(positions)):
        rotated += torch.cat((first * cos - second * sin, second * cos + first * sin), -1) / positions
    torch.testing.assert_close(found.center(config, CPU)[0].double(), rotated, atol=1e-3, rtol=1e-2)


def test_it_is_measured_once(model: tuple[ModelFiles, ModelConfig], cache: Path) -> None:
    def never() -> NoReturn:
        raise AssertionError("it is known")

    def both() -> tuple[Decoder, Decoder]:
        return opened(model), opened(model, weights="fp8")

    first = known_or_measured("a", CPU, lambda: TEXT, both, 0.0, kv=False)
    assert known_or_measured("a", CPU, never, never, 0.0, kv=False) == first
    with pytest.raises(AssertionError):  # another limit is another question
        known_or_measured("a", CPU, never, never, 0.5, kv=False)
    (file,) = cache.glob("fp8-*.json")
    file.write_text("{")  # a machine that went down while it was written
    assert known_or_measured("a", CPU, lambda: TEXT, both, 0.0, kv=False) == first
    assert not list(cache.glob("*.tmp"))


def ask(model: tuple[ModelFiles, ModelConfig], precision: Precision, **settings: Any) -> Fp8Choice | None:
    engine = EngineConfig(quantization_max_loss=0.0, **settings)
    return load._fp8_choice(*model, engine, precision, CPU, lambda **given: opened(model, **given))


def test_only_what_is_real_and_fp8_is_measured(model: tuple[ModelFiles, ModelConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.text.tokenizer.load_tokenizer", lambda files: type("Tokens", (), {"encode": lambda *_: TEXT})())
    fp8 = Precision(compute="bfloat16", weights="fp8", kv="bfloat16")
    assert ask(model, Precision(compute="bfloat16", weights="none", kv="bfloat16")) is None
    assert ask(model, fp8, load_format="dummy") is None
    weights = ask(model, fp8)
    assert weights is not None and weights.share == 1.0
    keys = ask(model, Precision(compute="bfloat16", weights="none", kv="fp8"))
    assert keys is not None and keys.share == 0.0 and keys.k_center == weights.k_center


def test_a_model_that_does_not_fit_twice_is_loaded_all_the_same(
    model: tuple[ModelFiles, ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.text.tokenizer.load_tokenizer", lambda files: type("Tokens", (), {"encode": lambda *_: TEXT})())

    def small(weights: str) -> Decoder:
        if weights == "none":
            raise torch.OutOfMemoryError("no room")
        return opened(model, weights=weights)

    found = load._fp8_choice(*model, EngineConfig(), Precision(compute="bfloat16", weights="fp8", kv="bfloat16"), CPU, small)
    assert found is None
    found = load._fp8_choice(*model, EngineConfig(), Precision(compute="bfloat16", weights="fp8", kv="fp8"), CPU, small)
    assert found is not None and found.plain == [] and found.center(model[1], CPU).abs().max() > 0


def test_engines_that_chose_otherwise_are_told_apart() -> None:
    chosen = Fp8Choice(plain=["a"], share=0.5, kv_loss=0, loss=0, full_loss=0, floor=0, k_center=b"1234")
    measured_again = msgspec.structs.replace(chosen, loss=0.1, floor=0.2)
    assert chosen.digest() == measured_again.digest()
    assert chosen.digest() == msgspec.structs.replace(chosen, head=True).digest()  # which no KV depends on
    others = [msgspec.structs.replace(chosen, plain=["b"]), msgspec.structs.replace(chosen, k_center=b"4321")]
    assert len({chosen.digest(), *(other.digest() for other in others)}) == 3


@pytest.mark.parametrize("drafts", [False, True])
def test_the_head_of_a_draft_model_is_fp8_where_nothing_is_measured(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nothing is measured of, and what only drafts: random weights here, too large a model elsewhere."""
    files = resolve("dummy:tiny")
    config = load_config(files)
    fp8 = Precision(compute="float32", weights="fp8", kv="float32")
    monkeypatch.setattr(load, "resolve_engine_precision", lambda *_: fp8)
    decoder, _, choice = load._decoder(files, config, EngineConfig(), "cpu", None, drafts=drafts)
    assert choice is None
    assert (decoder.head.format == "fp8") == drafts
    assert {weight.format for role, weight in decoder.linears if role != "head"} == {"fp8"}


@pytest.mark.parametrize(("capability", "format"), [((8, 0), "tiles"), ((9, 0), "fp8"), ((10, 0), "fp8")])
def test_a_draft_model_in_groups_has_an_fp8_head_on_gpus_that_know_fp8(
    capability: tuple[int, int], format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    monkeypatch.setitem(SHAPES, "tiny-awq", SHAPES["tiny"] | {"quantization_config": awq})
    files = resolve("dummy:tiny-awq")
    config = load_config(files)
    groups = Precision(compute="float32", weights="groups", kv="float32")
    monkeypatch.setattr(load, "resolve_engine_precision", lambda *_: groups)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for drafts in (True, False):
        decoder, _, _ = load._decoder(files, config, EngineConfig(), "cpu", None, drafts=drafts)
        assert decoder.head.format == (format if drafts else "tiles")
