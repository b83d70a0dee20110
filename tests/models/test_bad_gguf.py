"""GGUF files with tensors or metadata that mean nothing are refused by their headers and small tensors, in one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from common.models.config import load_config
from common.models.source import ModelFiles
from common.models.weights.inventory import take_inventory
from common.protocol.errors import ConfigError
from common.text.gguf_tokenizer import build
from tests.models.test_config_defaults import tiny

HIDDEN, MIDDLE, VOCABULARY = 8, 16, 24


def write(path: Path, *, alignment: int = 32, metadata: dict[str, Any] | None = None, **changes: np.ndarray) -> ModelFiles:
    """A Llama of one layer. changes: tensors, by their names with _ for a dot."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": HIDDEN, "feed_forward_length": MIDDLE}
    for key, value in (sizes | {"attention.head_count": 2, "vocab_size": VOCABULARY}).items():
        writer.add_uint32(f"llama.{key}", value)
    for key, found in (metadata or {}).items():
        if isinstance(found, list):
            writer.add_array(key, found)
        else:
            writer.add_uint32(key, found)
    ones = np.ones
    tensors = {name: ones((HIDDEN, HIDDEN), np.float32) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    tensors |= {name: ones((MIDDLE, HIDDEN), np.float32) for name in ("ffn_gate", "ffn_up")}
    tensors |= {"ffn_down": ones((HIDDEN, MIDDLE), np.float32)}
    tensors |= {name: ones(HIDDEN, np.float32) for name in ("attn_norm", "ffn_norm")}
    whole = {f"blk.0.{name}.weight": tensor for name, tensor in tensors.items()}
    whole |= {"output_norm.weight": ones(HIDDEN, np.float32), "token_embd.weight": ones((VOCABULARY, HIDDEN), np.float32)}
    for name, tensor in (whole | {name.replace("_DOT_", "."): tensor for name, tensor in changes.items()}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(name="tiny", format="gguf", path=path)


def inspect(files: ModelFiles) -> None:
    take_inventory(files, load_config(files))


def test_a_whole_file_passes(tmp_path: Path) -> None:
    inspect(write(tmp_path / "plain.gguf"))
    inspect(write(tmp_path / "aligned.gguf", alignment=4))
    inspect(write(tmp_path / "factors.gguf", rope_freqs_DOT_weight=np.ones(2, np.float32)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alignment": 1, "metadata": {"a": 1}}, "begins within a number, at byte"),
        ({"blk_DOT_0_DOT_ffn_up_exps_DOT_weight": np.ones((0, MIDDLE, HIDDEN), np.float32)}, r"ffn_up_exps\.weight is empty"),
        ({"rope_freqs_DOT_weight": np.ones(3, np.float32)}, r"rope_freqs\.weight has shape \[3\], the configuration asks for"),
        ({"rope_freqs_DOT_weight": np.zeros(2, np.float32)}, r"rope_freqs\.weight holds a factor that is not above 0"),
        ({"rope_freqs_DOT_weight": np.full(2, np.nan, np.float32)}, "holds a factor that is not above 0"),
        ({"rope_freqs_DOT_weight": np.ones(2, np.int32)}, "type I32 can't be dequantised"),
    ],
)
def test_tensors_that_mean_nothing_show_before_anything_is_loaded(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        inspect(write(tmp_path / "odd.gguf", **changes))


@pytest.mark.parametrize("metadata", [{"general.file_type": [1]}, {"tokenizer.ggml.tokens": 5}])
def test_odd_metadata_that_nothing_depends_on_are_no_error(tmp_path: Path, metadata: dict[str, Any]) -> None:
    inspect(write(tmp_path / "odd.gguf", metadata=metadata))


@pytest.mark.parametrize("value", [None, 5, 1.5, [[]], [None]])
@pytest.mark.parametrize("name", ["merges", "scores", "token_type"])
def test_a_damaged_tokenizer_is_named(name: str, value: Any) -> None:
    kind = "llama" if name == "scores" else "gpt2"
    metadata = {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": ["a", "b"], f"tokenizer.ggml.{name}": value}
    with pytest.raises(ConfigError, match=rf"the GGUF file's tokenizer\.ggml\.{name} are damaged"):
        build(metadata)


def test_longrope_can_not_divide_by_a_factor_of_0() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 7 + [0.0]}
    with pytest.raises(ConfigError, match=r"longrope's factors in config\.json must be more than 0"):
        tiny("phi3", original_max_position_embeddings=128, rope_scaling={"type": "longrope", **factors})
