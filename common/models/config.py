"""What a decoder looks like: read from config.json or from GGUF metadata. Torch-free.

One `ModelConfig` describes every architecture that the decoder knows; the differences between Llama and Qwen3 are fields of
it, not classes.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from common.models.formats.detect import detect, gguf_scheme
from common.models.formats.scheme import WeightFormat, WeightScheme
from common.models.json_files import read_object, read_object_if_any
from common.models.naming import DUMMY_PREFIX
from common.models.source import ModelFiles
from common.models.weights.gguf_metadata import read_metadata
from common.protocol.errors import ConfigError

Architecture = Literal["llama", "qwen3"]
RopeType = Literal["default", "linear", "llama3", "yarn"]

_EDGE_BYTES = 1 << 20


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions over the whole head, halves rotated against each other (`rotate_half`).

    `factor` and the fields after it are read by the scaled types only. `original_max_context` is the context (tokens) the
    model was first trained for. `attention_factor` 0 means: what the YaRN paper gives for `factor` (arXiv 2309.00071).
    """

    type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder with grouped-query attention and a SwiGLU feed-forward.

    `identity` names the weights' content (a digest over sizes and file edges, not over whole files). `eos_ids` are all ids
    that end a text. `max_context` is in tokens. `quantization`: how the files hold the linears.
    """

    architecture: Architecture
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    rms_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    bos_id: int | None = None
    eos_ids: list[int] = []
    quantization: WeightScheme = WeightScheme()
    identity: str = ""

    @property
    def weight_format(self) -> WeightFormat:
        """How the linears are multiplied on a GPU, unless a setting says otherwise."""
        return self.quantization.kind


def load_config(files: ModelFiles) -> ModelConfig:
    """The configuration of `files`, without reading weights or importing torch.

    :raises ConfigError: if a field is missing or wrong, or the model needs something this decoder has not.
    """
    if files.format == "gguf":
        config = config_from_gguf(read_metadata(files.path))
        weights = [files.path]
    else:
        config = config_from_json(
            read_object(files.path / "config.json"), read_object_if_any(files.path / "generation_config.json")
        )
        weights = sorted(files.path.glob("*.safetensors"))
    return msgspec.structs.replace(config, identity=_identity(config, weights))


def check_config_file(path: Path) -> None:
    """:raises ConfigError: if this config.json is no supported model's; see `load_config`."""
    config_from_json(read_object(path))


def weights_identity(files: ModelFiles, config: ModelConfig, *, dummy: bool = False) -> str:
    """What workers announce as the weights they compute with: equal for equal files wherever they lie. Empty where that is
    unknown: for a folder of which this machine has only configuration and tokenizer. `dummy`: random weights of this shape."""
    if dummy:
        return f"dummy/{config.identity}"
    if files.format == "dummy" and not files.name.startswith(DUMMY_PREFIX):
        return ""
    return config.identity


def context_of(max_context: int, max_model_len: int) -> int:
    """Tokens of prompt and answer together: the model's `max_context`, or what the operator limits it to (0: no limit).

    :raises ConfigError: if that is more than the model takes.
    """
    if max_model_len > max_context:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the {max_context} tokens of the model's context", param="max_model_len"
        )
    return max_model_len or max_context


def config_from_json(data: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """`data` is Hugging Face's config.json, `generation` its generation_config.json.

    :raises ConfigError: see `load_config`.
    """
    architecture = data.get("model_type")
    if architecture not in ("llama", "qwen3"):
        raise ConfigError(f"model_type {architecture!r} is not supported; supported are llama and qwen3")
    if data.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {data['hidden_act']!r} is not supported; only silu is")
    if data.get("use_sliding_window"):
        raise ConfigError("sliding-window attention is not supported")
    get = _Fields(data, "config.json")
    num_heads = get.size("num_attention_heads")
    qwen3 = architecture == "qwen3"
    attention_bias = bool(data.get("attention_bias", False))
    eos = (generation or {}).get("eos_token_id", data.get("eos_token_id"))
    return _checked(
        ModelConfig(
            architecture=architecture,
            num_layers=get.size("num_hidden_layers"),
            hidden_size=get.size("hidden_size"),
            num_heads=num_heads,
            num_kv_heads=get.size("num_key_value_heads", num_heads),
            head_dim=get.size("head_dim", 128 if qwen3 else get.size("hidden_size") // num_heads),
            intermediate_size=get.size("intermediate_size"),
            vocab_size=get.size("vocab_size"),
            max_context=get.size("max_position_embeddings", 2048),
            rms_eps=get.number("rms_norm_eps", 1e-6),
            rope=_rope_from_json(data),
            tie_embeddings=bool(data.get("tie_word_embeddings", False)),
            qk_norm=qwen3,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=bool(data.get("mlp_bias", False)),
            bos_id=data.get("bos_token_id"),
            eos_ids=_ids(eos),
            quantization=detect(data),
        )
    )


def config_from_gguf(metadata: Mapping[str, Any]) -> ModelConfig:
    """:raises ConfigError: see `load_config`."""
    architecture = metadata.get("general.architecture")
    if architecture not in ("llama", "qwen3"):
        raise ConfigError(f"GGUF architecture {architecture!r} is not supported; supported are llama and qwen3")
    prefix = f"{architecture}."
    fields = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if fields.get("expert_count"):
        raise ConfigError("mixture-of-experts GGUF files are not supported")
    get = _Fields(fields, "the GGUF metadata")
    num_heads = get.size("attention.head_count")
    head_dim = get.size("attention.key_length", get.size("embedding_length") // num_heads)
    if get.size("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError("rotary embedding over a part of the head is not supported")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return _checked(
        ModelConfig(
            architecture=architecture,
            num_layers=get.size("block_count"),
            hidden_size=get.size("embedding_length"),
            num_heads=num_heads,
            num_kv_heads=get.size("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_size=get.size("feed_forward_length"),
            vocab_size=get.size("vocab_size", len(tokens) or None),
            max_context=get.size("context_length"),
            rms_eps=get.number("attention.layer_norm_rms_epsilon", 1e-6),
            rope=_rope_from_gguf(fields),
            qk_norm=architecture == "qwen3",
            bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_ids=list(dict.fromkeys(token for token in eos if token is not None)),
            quantization=gguf_scheme(metadata),
        )
    )


class _Fields:
    """Typed access to a mapping of untrusted values."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def size(self, name: str, default: int | None = None) -> int:
        value = self.data.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.where} has no {name}")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{name} in {self.where} must be a positive whole number, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.data.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ConfigError(f"{name} in {self.where} must be a number, not {value!r}")
        return float(value)


def _rope_from_json(data: Mapping[str, Any]) -> RopeConfig:
    """transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` and `rope_scaling`."""
    parameters: dict[str, Any] = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ConfigError(f"rope type {kind!r} is not supported; supported are default, linear, llama3 and yarn")
    if parameters.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("rotary embedding over a part of the head is not supported")
    get = _Fields(parameters, "rope_parameters")
    max_context = data.get("max_position_embeddings", 2048)
    return RopeConfig(
        type=kind,
        theta=get.number("rope_theta", _Fields(data, "config.json").number("rope_theta", 10_000.0)),
        factor=get.number("factor", 1.0),
        low_freq_factor=get.number("low_freq_factor", 1.0),
        high_freq_factor=get.number("high_freq_factor", 4.0),
        original_max_context=get.size("original_max_position_embeddings", max_context),
        beta_fast=get.number("beta_fast", 32.0),
        beta_slow=get.number("beta_slow", 1.0),
        attention_factor=get.number("attention_factor", 0.0),
        mscale=get.number("mscale", 0.0),
        mscale_all_dim=get.number("mscale_all_dim", 0.0),
        truncate=bool(parameters.get("truncate", True)),
    )


def _rope_from_gguf(fields: Mapping[str, Any]) -> RopeConfig:
    """Llama 3's scaling is no metadata but a tensor, `rope_freqs.weight`: the decoder divides by it."""
    get = _Fields(fields, "the GGUF metadata")
    kind = fields.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"rope scaling {kind!r} is not supported; supported are none, linear and yarn")
    return RopeConfig(
        type="default" if kind == "none" else kind,
        theta=get.number("rope.freq_base", 10_000.0),
        factor=get.number("rope.scaling.factor", 1.0),
        original_max_context=get.size("rope.scaling.original_context_length", get.size("context_length")),
        beta_fast=get.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=get.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=get.number("rope.scaling.attn_factor", 0.0),
    )


def _checked(config: ModelConfig) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(f"{config.num_heads} attention heads can't share {config.num_kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise ConfigError(f"a head dimension of {config.head_dim} has no halves to rotate")
    return config


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids = [one for one in values if isinstance(one, int) and not isinstance(one, bool)]
    if len(ids) < len(values):
        raise ConfigError(f"eos_token_id must be an id or a list of ids, not {value!r}")
    return ids


def _identity(config: ModelConfig, weights: list[Path]) -> str:
    """Equal for equal files wherever they lie; costs two megabytes of reading per file."""
    digest = hashlib.blake2b(msgspec.json.encode(config), digest_size=16)
    for path in weights:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(size.to_bytes(8, "little") + file.read(_EDGE_BYTES))
                file.seek(max(0, size - _EDGE_BYTES))
                digest.update(file.read(_EDGE_BYTES))
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error}") from error
    return digest.hexdigest()
