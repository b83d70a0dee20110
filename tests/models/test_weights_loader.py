"""The loader: reading ahead changes nothing but time, memory stays bounded, and random weights need no files."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.engine.load.runners import EngineConfig, cache_layout
from common.models.config import config_from_json, load_config
from common.models.formats.groups import Groups
from common.models.registry import load_decoder, open_weights
from common.models.shapes import SHAPES
from common.models.source import ModelFiles, resolve
from common.models.weights import prefetch
from common.models.weights.base import LinearFormat, WeightLoader, WeightsError
from common.models.weights.dummy import STD, DummyWeights
from common.models.weights.safetensors import SafetensorsWeights
from common.models.weights.upload import Upload
from common.ops.linear.linear import linear
from common.protocol.errors import UnknownModel
from common.text.bundle import load_bundle
from tests.fixtures.slow import some_slow
from tests.models.driver import Request, open_runner, run, seen_logits

CPU = torch.device("cpu")


class Recorder:
    """A source that counts how much is read and not yet taken."""

    holds_fp8 = False
    groups = ()

    def read_groups(self, name: str, upload: Upload) -> Groups:
        raise NotImplementedError

    def __init__(self, names: list[str], size: int = 100) -> None:
        self.shapes = dict.fromkeys(names, (size,))
        self.reads: list[str] = []
        self.threads: set[str] = set()
        self.broken = ""
        self._lock = threading.Lock()

    def size_bytes(self, name: str) -> int:
        return 2 * self.shapes[name][0]

    def read(self, name: str, upload: Upload) -> torch.Tensor:
        if name == self.broken:
            raise WeightsError(f"{name} can't be read")
        time.sleep(0.001)
        with self._lock:
            self.reads.append(name)
            self.threads.add(threading.current_thread().name)
        return torch.full(self.shapes[name], float(len(name)), dtype=upload.dtype)


NAMES = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(12)]
ALL = ["lm_head.weight", *reversed(NAMES), "model.embed_tokens.weight", "model.norm.weight"]


def test_threads_read_ahead_in_the_order_of_a_decoder() -> None:
    source = Recorder(ALL)
    with WeightLoader(source, torch.float32, threads=1) as loader:
        for name in ["model.embed_tokens.weight", *NAMES, "model.norm.weight", "lm_head.weight"]:
            assert torch.equal(loader.take(name, 100), torch.full((100,), float(len(name))))
        loader.finish()
    assert source.reads == ["model.embed_tokens.weight", *NAMES, "lm_head.weight", "model.norm.weight"]
    assert all(name.startswith("weights") for name in source.threads)


def test_another_order_costs_nothing_but_time() -> None:
    source = Recorder(ALL)
    done: list[tuple[int, int]] = []
    with WeightLoader(source, torch.float32, lambda now, total: done.append((now, total)), threads=3) as loader:
        for name in sorted(ALL, key=lambda name: name[::-1]):
            assert loader.take(name, 100)[0] == len(name)
        loader.finish()
    assert sorted(source.reads) == sorted(ALL)
    assert done == [(200 * count, 200 * len(ALL)) for count in range(1, len(ALL) + 1)]


def test_what_is_read_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "AHEAD_BYTES", 3 * 400)
    source = Recorder(ALL)
    with WeightLoader(source, torch.float32, threads=2) as loader:
        loader.take("model.embed_tokens.weight", 100)
        time.sleep(0.05)
        assert len(source.reads) <= 4


def test_a_reading_thread_that_fails_is_heard_where_the_tensor_is_taken() -> None:
    source = Recorder(ALL)
    source.broken = NAMES[1]
    with WeightLoader(source, torch.float32, threads=2) as loader:
        loader.take("model.embed_tokens.weight", 100)
        loader.take(NAMES[0], 100)
        with pytest.raises(WeightsError, match="can't be read"):
            loader.take(NAMES[1], 100)
    before = len(source.reads)
    time.sleep(0.02)
    assert len(source.reads) == before, "closed: nobody reads any more"


def test_what_is_skipped_is_not_waited_for() -> None:
    source = Recorder(ALL)
    with WeightLoader(source, torch.float32, threads=1) as loader:
        loader.skip("lm_head.weight")
        for name in [*NAMES, "model.embed_tokens.weight", "model.norm.weight"]:
            loader.take(name, 100)
        loader.finish()
    assert "lm_head.weight" not in source.reads


def test_mapped_files_are_read_by_several_threads(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(33, 7) for i in range(40)}
    save_file(tensors, tmp_path / "model.safetensors")
    with WeightLoader(SafetensorsWeights(tmp_path), torch.float32, threads=4) as loader:
        assert all(torch.equal(loader.take(name, 33, 7), tensor) for name, tensor in tensors.items())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    return tmp_path


def test_a_named_shape_runs_with_no_file_on_the_machine(home: Path) -> None:
    runner = open_runner(resolve("dummy:tiny"))
    first = run(runner, [Request(list(range(40)), 8)])
    assert len(first[0]) == 8
    assert run(open_runner(resolve("dummy:tiny")), [Request(list(range(40)), 8)]) == first, "workers agree on the weights"


def test_a_folder_without_weights_runs_with_random_ones(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_bytes((resolve("dummy:tiny").path / "config.json").read_bytes())
    with pytest.raises(UnknownModel, match="no \\.safetensors"):
        resolve(str(folder))
    files = resolve(str(folder), weights=False)
    assert len(run(open_runner(files, load_format="dummy"), [Request([1, 2, 3], 4)])[0]) == 4
    config = load_config(files)
    assert (
        cache_layout(config, EngineConfig()).fingerprint != cache_layout(config, EngineConfig(load_format="dummy")).fingerprint
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"model_type": "qwen3", "tie_word_embeddings": False}, {"attention_bias": True, "mlp_bias": True}],
)
def test_random_weights_are_all_that_a_decoder_takes(home: Path, changes: dict[str, object]) -> None:
    files = resolve("dummy:tiny")
    config = config_from_json(SHAPES["tiny"] | changes)
    decoder = load_decoder(files, config, dtype=torch.bfloat16, device=CPU)
    assert decoder.embedding.dtype == torch.bfloat16
    assert abs(float(decoder.embedding.float().std()) - STD) < STD / 10
    assert bool((decoder.norm == 1).all())


def test_random_weights_go_straight_to_fp8(home: Path) -> None:
    files = resolve("dummy:tiny")
    config = load_config(files)
    with WeightLoader(open_weights(files, config), torch.bfloat16, weights="fp8") as loader:
        name = "model.layers.0.mlp.gate_proj"
        packed = loader.take_linear({name: 128}, 64, bias=False)
    assert packed.format == "fp8"
    assert packed.scale is not None
    plain = DummyWeights(config).read(f"{name}.weight", Upload(CPU, torch.bfloat16))
    assert torch.allclose(packed.data.float() * packed.scale[:, None], plain.float(), rtol=1 / 15, atol=1e-4)


def test_a_named_shape_speaks_bytes(home: Path) -> None:
    bundle = load_bundle(resolve("dummy:tiny"))
    text = "Zwölf 12 \U0001f600\x00"
    assert len(bundle.encode_prompt(text)) == len(text.encode())
    assert bundle.tokenizer.decode(bundle.encode_prompt(text)) == text
    assert bundle.tokenizer.vocab_size == 512
    assert bundle.tokenizer.decode([300, 511]) == " 300 511", "what random weights choose is seen"
    assert (bundle.eos_ids, bundle.max_context) == ([], 4096)
    assert bundle.encode_chat([{"role": "user", "content": "a"}]) == list(b"user: a\nassistant:")


def test_every_named_shape_is_a_model(home: Path) -> None:
    sizes = {"llama-3.1-8b": 8.03e9, "llama-3.2-1b": 1.24e9, "qwen3-8b": 8.19e9, "qwen3-32b": 32.8e9, "smollm2-135m": 134.5e6}
    for name, parameters in sizes.items():
        source = DummyWeights(load_config(resolve(f"dummy:{name}")))
        assert sum(map(source.size_bytes, source.shapes)) / 2 == pytest.approx(parameters, rel=0.01)
    with pytest.raises(UnknownModel, match=r"there are llama-3\.1-8b"):
        resolve("dummy:gpt-5")


def test_a_shape_may_have_the_numbers_of_a_peers_dummy_weights(home: Path) -> None:
    files = resolve("dummy:tiny-1-layers-uniform")
    config = load_config(files)
    assert (config.num_layers, files.revision) == (1, "tiny-1-layers-uniform-v1")
    source = open_weights(files, config)
    for name in ("model.norm.weight", "model.layers.0.mlp.gate_proj.weight"):
        values = source.read(name, Upload(CPU, torch.float32))
        assert 0.0009 < float(values.abs().max()) <= 0.001 and float(values.std()) == pytest.approx(0.001 / 3**0.5, rel=0.2)
    assert float(open_weights(resolve("dummy:tiny"), config).read("model.norm.weight", Upload(CPU, torch.float32)).min()) == 1


@pytest.mark.parametrize("dtype", some_slow(["float32", "bfloat16"], quick=["float32"]))
def test_a_shape_may_count_and_another_be_right_for_a_known_share_of_the_tokens(dtype: str, home: Path) -> None:
    def next_tokens(name: str) -> list[tuple[int, list[int]]]:
        """Behind each token: what is said, and the two likeliest."""
        runner = open_runner(resolve(f"dummy:{name}"), dtype=dtype)
        found: list[tuple[int, list[int]]] = []
        for first in range(0, 480, 32):
            with seen_logits(runner) as seen:
                said = run(runner, [Request([7, 100 * token], 1) for token in range(first, first + 32)])
            found += [(one[0], row.topk(2).indices.tolist()) for one, row in zip(said, torch.cat(seen), strict=True)]
        return found

    assert [said for said, _ in next_tokens("smollm2-135m-2-layers-counting")] == [100 * n + 1 for n in range(480)]
    drafts = next_tokens("smollm2-135m-1-layers-counting-60")
    steps = [said - 100 * n for n, (said, _) in enumerate(drafts)]
    assert set(steps) == {1, 2} and 0.53 < steps.count(1) / len(steps) < 0.67
    second = [top[1] - 100 * n == 1 for n, (_, top) in enumerate(drafts) if steps[n] == 2]
    assert 0.35 < sum(second) / len(second) < 0.65


@pytest.fixture
def awq_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    awq = SHAPES["llama-3.2-1b-awq"]["quantization_config"] | {"group_size": 64}
    monkeypatch.setitem(SHAPES, "smollm2-135m-awq", SHAPES["smollm2-135m"] | {"quantization_config": awq})
    return "smollm2-135m-awq"


def test_a_shape_in_4_bits_counts(home: Path, awq_shape: str) -> None:
    runner = open_runner(resolve(f"dummy:{awq_shape}-30-layers-counting"), dtype="float32", num_blocks=64)
    said = run(runner, [Request([7, 100 * token], 1) for token in range(1, 33)])
    assert said == [[100 * token + 1] for token in range(1, 33)]


@pytest.mark.parametrize("weights", ["fp8", "groups"])
@pytest.mark.slow
def test_a_counting_model_says_the_same_with_a_head_in_fp8(weights: LinearFormat, home: Path, awq_shape: str) -> None:
    shape = awq_shape if weights == "groups" else "smollm2-135m"
    files = resolve(f"dummy:{shape}-1-layers-counting-60")
    config = load_config(files)
    heads = [
        load_decoder(files, config, dtype=torch.bfloat16, device=CPU, weights=weights, fp8_head=fp8).head
        for fp8 in (False, True)
    ]
    assert [head.format for head in heads] == ["tiles", "fp8"]
    embedding = open_weights(files, config).read("model.embed_tokens.weight", Upload(CPU, torch.float32))[:480]
    hidden = (embedding / embedding.std()).bfloat16()
    plain, rounded = (linear(hidden, head, wide=True).topk(2).indices for head in heads)
    assert torch.equal(plain[:, 0], rounded[:, 0])
    has_second = plain[:, 1] < plain[:, 0]  # the right one, behind a wrong first choice
    assert has_second.any() and torch.equal(plain[has_second], rounded[has_second])


def test_an_unwritable_home_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(UnknownModel, match="PENSTOCK_HOME"):
        resolve("dummy:tiny", cache_dir=tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_any_size_arrive_on_the_device_as_they_are(tmp_path: Path) -> None:
    shapes = {"model.norm.weight": (1,), "lm_head.weight": (5001, 4099)}  # a byte, and more than a staging buffer
    shapes |= {f"model.layers.{i}.mlp.up_proj.weight": (1023, 4 * i + 1) for i in range(60)}
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    tensors["model.layers.7.mlp.up_proj.weight"] = tensors["model.layers.7.mlp.up_proj.weight"].float()
    save_file(tensors, tmp_path / "model.safetensors")
    files = ModelFiles(name="m", format="safetensors", path=tmp_path)
    device = torch.device("cuda:0")
    with WeightLoader(SafetensorsWeights(files.path), torch.bfloat16, device=device, threads=8) as loader:
        for name, tensor in tensors.items():
            found = loader.take(name, *tensor.shape)
            assert found.is_cuda
            assert torch.equal(found.cpu(), tensor.to(torch.bfloat16)), name
