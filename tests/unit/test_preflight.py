"""What can't be served is refused before a process starts, by `pull`, `doctor` and `up` alike, in one line that says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import gguf
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common.cli.preflight import check_machine, check_model
from common.engine.load.layout import EngineConfig
from common.models.source import ModelFiles
from common.protocol.errors import ConfigError, InvalidParameter, UnknownModel
from common.runtime.memory import available_bytes
from common.text.template import ChatTemplate
from services.gateway.__main__ import served
from services.gateway.config import GatewayConfig
from tests.fixtures.hub import hub_of
from tests.fixtures.tiny_model import edit_config, write_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "Tiny-1.5")


def cut_short(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)


def hold_integers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.q_proj.qweight": np.zeros(4, np.int32)}, folder / "model.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "architecture": (lambda folder: edit_config(folder, model_type="mamba"), "model_type 'mamba' is not supported"),
    "quantisation": (
        lambda folder: edit_config(folder, quantization_config={"quant_method": "hqq", "bits": 4}),
        "quant_method 'hqq' is not supported",
    ),
    "activation": (lambda folder: edit_config(folder, hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "sizes": (lambda folder: edit_config(folder, num_attention_heads=0), "num_attention_heads"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "config is damaged": (lambda folder: (folder / "config.json").write_text("{"), "config.json can't be read"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no .safetensors file"),
    "half a download": (lambda folder: cut_short(folder / "model.safetensors"), "it may be cut short"),
    "integer weights": (hold_integers, "qweight"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
    "tokenizer is damaged": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json can't be loaded"),
    "template is damaged": (lambda folder: (folder / "chat_template.jinja").write_text("{% for %}"), "template"),
    "template is no text": (
        lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{"),
        "chat_template.jinja can't be read",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_cannot_be_served_says_why(what: str, model: Path) -> None:
    damage, says = BROKEN[what]
    damage(model)
    with pytest.raises((ConfigError, UnknownModel)) as caught:
        check_model(str(model))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tiny.gguf"])
def test_a_file_that_git_has_not_fetched_says_how(model: Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 538090408\n"
    (model / name).write_text(pointer)
    for tied in (True, False) if name == "model.safetensors" else (True,):
        edit_config(model, tie_word_embeddings=tied)
        with pytest.raises(ConfigError, match="it is a Git LFS pointer, and `git lfs pull` fetches the file"):
            check_model(str(model / name if name.endswith(".gguf") else model))


def test_a_further_template_that_is_no_text_is_left_out(model: Path) -> None:
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "._tool_use.jinja").write_bytes(b"\0\5\x16\7\xff")
    assert not check_model(str(model)).warnings


def test_a_context_that_no_request_fits_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="a context of 2 tokens is too short to serve: 8 are the least"):
        check_model(str(model), EngineConfig(max_model_len=2))
    edit_config(model, max_position_embeddings=1)
    with pytest.raises(ConfigError, match="a context of 1 tokens is too short"):
        check_model(str(model))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages | frobnicate }}", "can't render these messages: unknown filter"),
        ("{{ raise_exception('no system') }}", "refuses these messages: no system"),
    ],
)
def test_a_template_that_refuses_a_plain_chat_is_a_warning(model: Path, template: str, says: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    [warning] = check_model(str(model)).warnings
    assert warning.startswith("a chat of one message, tried, is refused: the model's chat template") and says in warning


def test_a_template_with_methods_that_are_unknown_here_is_a_warning(model: Path) -> None:
    template = model / "chat_template.jinja"
    shown = "{{ messages[0].content }}{# x.zfill(2) #}{{ '.center(' }}"
    for call, warns in (("{% if tools %}{{ 'a-b'.rsplit('-') }}{% endif %}", True), ("{{ 'a-b'.split('-', 1) }}", False)):
        template.write_text(shown + call)
        warnings = str(check_model(str(model)).warnings)
        assert ("calls rsplit, unknown here" in warnings) is warns
        assert "zfill" not in warnings and "center" not in warnings


def test_the_methods_that_are_said_to_be_unknown_are() -> None:
    for name in sorted(method for method in dir(str) if not method.startswith("_")):
        template = ChatTemplate("{{ messages[0].content." + name + "() }}")
        try:
            template.render([{"role": "user", "content": "x"}])
            said = ""
        except InvalidParameter as error:
            said = str(error)
        assert ("no method named" in said) == (name in {*template.unknown_methods, "index", "maketrans"}), name


def test_what_a_generation_config_asks_for_in_vain_is_a_warning(model: Path) -> None:
    path = model / "generation_config.json"
    path.write_text('{"temperature": 0.6, "num_beams": 1, "typical_p": 1.0, "suppress_tokens": [], "min_length": 0}')
    assert not check_model(str(model)).warnings
    path.write_text('{"no_repeat_ngram_size": 3, "suppress_tokens": [7], "forced_eos_token_id": 0}')
    [warning] = check_model(str(model)).warnings
    assert warning.startswith("generation_config.json sets no_repeat_ngram_size, suppress_tokens, forced_eos_token_id, which")


def test_yarn_stretches_the_context_for_everyone(model: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    edit_config(model, max_position_embeddings=512, rope_scaling=yarn)
    assert check_model(str(model)).model.max_context == 2048
    assert check_model(str(model), EngineConfig(max_model_len=2000)).model.max_context == 2000
    for limit, context in ((0, 2048), (2000, 2000)):
        bundle = served(GatewayConfig(model=str(model), max_model_len=limit)).bundle
        assert bundle is not None and bundle.max_context == context


def test_a_model_that_can_be_served_is_described(model: Path) -> None:
    found = check_model(str(model))
    assert str(found) == "Tiny-1.5: llama, 2 layers, int8 weights, context 4,096"
    assert (found.warnings, found.longest) == ([], 4096)
    assert found.pool_bytes > 1000 << 20
    assert "bfloat16 weights" in str(check_model(str(model), device="cuda"))
    assert check_model(str(model), EngineConfig(max_model_len=100)).model.max_context == 100


def test_a_gguf_file_is_looked_through(smollm2: ModelFiles, tmp_path: Path) -> None:
    found = check_model(str(smollm2.path))
    assert found.files.name == smollm2.path.stem and found.longest == 8192
    cut = tmp_path / "cut.gguf"
    with smollm2.path.open("rb") as whole:
        cut.write_bytes(whole.read(smollm2.path.stat().st_size // 2))
    with pytest.raises(ConfigError, match="does not fit into the file"):
        check_model(str(cut))
    (tmp_path / "none.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match="can't be read as a GGUF file"):
        check_model(str(tmp_path / "none.gguf"))


def test_gguf_types_that_cannot_be_computed_with_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "ints.gguf", "llama")
    for name, value in {"block_count": 1, "embedding_length": 64, "feed_forward_length": 64, "context_length": 128}.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_uint32("llama.vocab_size", 8)
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="type I8 can't be dequantised"):
        check_model(str(tmp_path / "ints.gguf"))


def test_settings_that_do_not_fit_the_model_are_found(model: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len 5000 is more than the 4096"):
        check_model(str(model), EngineConfig(max_model_len=5000))
    with pytest.raises(ConfigError, match="fp8 needs a GPU"):
        check_model(str(model), EngineConfig(quantization="fp8"))
    check_model(str(model), EngineConfig(quantization="fp8"), "cuda")


def test_heads_that_a_float_engine_may_refuse_are_a_warning(model: Path) -> None:
    edit_config(model, head_dim=6)
    floats = EngineConfig(load_format="dummy", dtype="float32")
    others = [EngineConfig(load_format="dummy"), msgspec.structs.replace(floats, engine="simulated")]
    told = [str(check_model(str(model), engine).warnings) for engine in (floats, *others)]
    assert ["heads of 6" in warnings for warnings in told] == [True, False, False]


def test_a_small_pool_is_announced_and_a_useless_one_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = 2 * 2 * 16 * 16 * 2 * 2  # layers, K and V, tokens, head_dim, KV heads, bytes
    [warning] = check_model(str(model), EngineConfig(kv_cache_mb=1)).warnings
    holds = ((1 << 20) // block_bytes - 1) * 16
    assert f"sequences of {holds:,} tokens, the model takes 4,096" in warning
    exactly = check_model(str(model), EngineConfig(num_blocks=3))
    assert exactly.longest == 32, "who says a number of blocks means it"

    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    larger = "dummy:smollm2-135m"  # 0.35 MiB a block
    with pytest.raises(ConfigError, match=r"sequences of 16 tokens, and 256 is the least .* raise kv_cache_mb to 6 or more"):
        check_model(larger, EngineConfig(kv_cache_mb=1))
    assert check_model(larger, EngineConfig(kv_cache_mb=6)).longest == 256


def test_memory_and_shared_memory_must_suffice(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_model(str(model), EngineConfig(kv_cache_mb=64))
    assert check_machine([(found, 1)], tmp_path) == []
    with pytest.raises(ConfigError, match=r"100000 KV pools need .* lower --kv-cache-mb"):
        check_machine([(found, 100_000)], tmp_path)
    with pytest.raises(ConfigError, match=r"KV stores may take .* lower --capacity-mb"):
        check_machine([(found, 1)], tmp_path, store_bytes=1 << 60)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: Mock(free=1 << 30))
        [tight] = check_machine([(found, 1)], tmp_path, store_bytes=1 << 30)
    assert "with full KV stores 10" in tight and "--capacity-mb" in tight
    monkeypatch.setattr("common.cli.preflight.available_bytes", lambda: found.engine_bytes + 1)
    [tight] = check_machine([(found, 1)], tmp_path)
    assert "full KV pools" in tight
    with pytest.raises(ConfigError, match=r"Tiny-1\.5 takes .* in 2 engines"):
        check_machine([(found, 2)], tmp_path)


def test_memory_is_what_the_machine_and_the_container_have_left(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert available_bytes(tmp_path) == 1 << 60
    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert available_bytes(tmp_path) == 8000 << 10
    write("proc/self/cgroup", "0::/a/b\n")
    write("sys/fs/cgroup/a/b/memory.max", "max\n")
    write("sys/fs/cgroup/a/memory.max", "5000000\n")
    write("sys/fs/cgroup/a/memory.current", "2000000\n")
    write("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 500000\n")
    assert available_bytes(tmp_path) == 3_500_000
    write("proc/self/cgroup", "4:cpu,memory:/c\n0::/\n")
    write("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "1000\n")
    write("sys/fs/cgroup/memory/c/memory.usage_in_bytes", "400\n")
    assert available_bytes(tmp_path) == 600


@pytest.mark.parametrize("command", ["pull {}", "doctor --model {}", "up --model {} --http-port 0 --nats-port 0"])
def test_all_three_commands_refuse_before_a_process_starts(command: str, model: Path, tmp_path: Path) -> None:
    edit_config(model, model_type="mamba")
    words = command.format(model).split()
    logs = tmp_path / "logs"
    if words[0] == "up":
        words += ["--log-dir", str(logs)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    ended = subprocess.run(
        [sys.executable, "-m", "common.cli", *words], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert ended.returncode == 1
    assert "model_type 'mamba' is not supported" in " ".join((ended.stdout + ended.stderr).split())
    assert "Traceback" not in ended.stderr and not logs.exists()


def test_the_shape_of_a_dummy_model_needs_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    tiny = check_model("dummy:tiny")
    assert tiny.files.name == "dummy:tiny" and tiny.longest == 4096
    large = check_model("dummy:llama-3.1-8b")
    assert 7.9e9 < large.engine_bytes < 13e9
    assert msgspec.structs.replace(large, warnings=[]).model.num_layers == 32


@pytest.mark.parametrize("supported", [True, False])
def test_a_repository_is_judged_by_its_configuration_before_its_weights_come(
    supported: bool, model: Path, tmp_path: Path
) -> None:
    if not supported:
        edit_config(model, quantization_config={"quant_method": "hqq", "bits": 4})
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "HF_"))}
    with hub_of(model) as hub:
        ended = subprocess.run(
            [sys.executable, "-m", "common.cli", "pull", "owner/name"],
            env=clean | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == (0 if supported else 1), ended.stderr
    assert "Traceback" not in ended.stderr and "Fetching" not in ended.stderr
    assert ("it can be served: owner/name: llama, 2 layers" if supported else "quant_method 'hqq'") in ended.stderr
    assert ("model.safetensors" in hub.fetched) == supported
    assert len(hub.fetched) == len(set(hub.fetched)), "nothing comes twice"
