"""A model's specification, from its files: config.json or GGUF metadata, and what identifies the weights. Torch-free."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.models.families.gguf import Q_BIAS, Q_NORM
from common.models.families.registry import GGUF_FAMILIES, JSON_FAMILIES, reader_of
from common.models.families.wrappers import unwrapped
from common.models.fields import Fields
from common.models.formats.beside import quantization_beside
from common.models.formats.detect import detect, gguf_scheme
from common.models.gguf_parts import gguf_parts
from common.models.json_files import read_object, read_object_if_any
from common.models.naming import DUMMY_PREFIX
from common.models.source import ModelFiles
from common.models.spec import ExpertsSpec, LayerNames, LayerSpec, ModelSpec, RopeSpec
from common.models.weights.files import weight_files
from common.models.weights.gguf_metadata import read_metadata
from common.models.weights.tied_head import holds_another_head
from common.protocol.errors import ConfigError

RopeConfig = RopeSpec
ModelConfig = ModelSpec
"""What the rest of the code calls a model's specification."""

_EDGE_BYTES = 1 << 20
_NUM_PIECES, _PIECE_BYTES = 256, 1 << 12
_TELLING = {
    "phi3": ("rope_factors_short.weight", "rope_factors_long.weight"),
    "glm4": (Q_BIAS,),
    "glm4moe": (Q_BIAS, f"{Q_NORM}.weight"),
    "seed_oss": (Q_BIAS,),
}
"""Tensors of a GGUF architecture that say what its metadata do not: LongRoPE's factors; whether there are biases or norms."""


def load_config(files: ModelFiles) -> ModelConfig:
    """The configuration of `files`, without reading weights or importing torch.

    :raises ConfigError: if a field is missing or wrong, or the model needs something this decoder has not.
    """
    if files.format == "gguf":
        metadata = read_metadata(files.path)
        config = config_from_gguf(metadata | _told_by_tensors(files.path, metadata))
        weights = gguf_parts(files.path)
    else:
        weights = weight_files(files.path)
        data = _read_config(files.path / "config.json")
        generation = read_object_if_any(files.path / "generation_config.json")
        config = config_from_json(data, generation)
        if config.tie_embeddings and holds_another_head(files.path, config.names):
            config = config_from_json(data | {"tie_word_embeddings": False}, generation)
    return msgspec.structs.replace(config, identity=_identity(config, weights))


def check_config_file(path: Path) -> None:
    """:raises ConfigError: if this config.json is no supported model's; see `load_config`."""
    config_from_json(_read_config(path))


def _read_config(path: Path) -> dict[str, Any]:
    """Return config.json, with the quantization_config of a file beside it if it has none."""
    data = read_object(path)
    text = data.get("text_config")
    parts = (data, text) if isinstance(text, Mapping) else (data,)
    if not any(part.get(key) for part in parts for key in ("quantization_config", "compression_config")):
        data |= quantization_beside(path.parent)
    return data


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


def config_from_json(data: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """`data` is Hugging Face's config.json, `generation` its generation_config.json.

    :raises ConfigError: see `load_config`.
    """
    data = dict(unwrapped(data))
    draft_vocab_size = data.pop("draft_vocab_size", None)  # any family's, see `reduced_vocabulary`
    for key in ("embedding_from_target", "head_from_target", "target"):  # see `draft_folder`
        data.pop(key, None)
    read = reader_of(data.get("model_type"), JSON_FAMILIES, "model_type")
    spec = read(Fields(data, "config.json"))
    eos = (generation or {}).get("eos_token_id", data.get("eos_token_id"))
    reduced = _reduced_vocabulary(draft_vocab_size, spec)
    return _checked(msgspec.structs.replace(spec, eos_ids=_ids(eos), quantization=detect(data), draft_vocab_size=reduced))


def _reduced_vocabulary(size: object, spec: ModelSpec) -> int:
    """Return the rows of a draft model's head; 0 for a head of the whole vocabulary.

    :raises ConfigError: if that is no size of a part of it, or the head is the embedding.
    """
    if size is None or size == 0:
        return 0
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= spec.vocab_size:
        raise ConfigError(f"draft_vocab_size must be between 1 and vocab_size ({spec.vocab_size}), not {str(size)[:80]!r}")
    if spec.tie_embeddings:
        raise ConfigError("draft_vocab_size needs a head of its own: tie_word_embeddings must be false")
    return size


def config_from_gguf(metadata: Mapping[str, Any]) -> ModelSpec:
    """:raises ConfigError: see `load_config`."""
    architecture = metadata.get("general.architecture")
    read = reader_of(architecture, GGUF_FAMILIES, "GGUF architecture")
    prefix = f"{architecture}."
    fields = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    tokens = metadata.get("tokenizer.ggml.tokens")
    known = {"vocab_size": len(tokens)} if isinstance(tokens, list) and tokens else {}
    spec = read(Fields(known | fields, "the GGUF metadata"))
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return _checked(
        msgspec.structs.replace(
            spec,
            bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_ids=list(dict.fromkeys(token for token in eos if token is not None)),
            quantization=gguf_scheme(metadata),
        )
    )


def _told_by_tensors(path: Path, metadata: Mapping[str, Any]) -> dict[str, list[float]]:
    """What tensors alone tell of a model, as further metadata of the architecture."""
    architecture = metadata.get("general.architecture")
    names = _TELLING.get(architecture) if isinstance(architecture, str) else None
    if names is None:
        return {}
    from common.models.weights.gguf_tensors import read_floats  # numpy and the gguf package

    found = read_floats(path, names)
    return {f"{architecture}.{name.removesuffix('.weight')}": values for name, values in found.items()}


def _checked(spec: ModelSpec) -> ModelSpec:
    """Windows and chunks that hold the whole context are none.

    :raises ConfigError: if the numbers contradict each other.
    """
    for layer in spec.layers:
        mixer = layer.mixer
        if mixer.num_heads % mixer.num_kv_heads:
            raise ConfigError(f"{mixer.num_heads} attention heads can't share {mixer.num_kv_heads} KV heads evenly")
        if mixer.head_dim % 2 or (mixer.rope is not None and mixer.rope.dims % 2):
            raise ConfigError(f"a head dimension of {mixer.head_dim} has no halves to rotate")
        if isinstance(layer.mlp, ExpertsSpec) and layer.mlp.router.top_k > layer.mlp.router.num_experts:
            raise ConfigError(f"a token can't visit {layer.mlp.router.top_k} of {layer.mlp.router.num_experts} experts")
    return msgspec.structs.replace(spec, layers=tuple(_reaching(layer, spec.max_context) for layer in spec.layers))


def _reaching(layer: LayerSpec, context: int) -> LayerSpec:
    mixer = layer.mixer
    window, chunk = (0 if size >= context else size for size in (mixer.window, mixer.chunk))
    if (window, chunk) == (mixer.window, mixer.chunk):
        return layer
    return msgspec.structs.replace(layer, mixer=msgspec.structs.replace(mixer, window=window, chunk=chunk))


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids = [one for one in values if isinstance(one, int) and not isinstance(one, bool)]
    if len(ids) < len(values):
        raise ConfigError(f"eos_token_id must be an id or a list of ids, not {value!r}")
    return ids


_LATER: dict[str, tuple[object, ...]] = {
    "exact_embedding_scale": (False,),
    "logit_scale": (1.0,),
    "draft_layers": (0,),
    "shift": (1,),
    "choice_bias": (False, LayerNames().choice_bias),
    "choice_bias_in_rows": (False,),
    "weight_scale": (1.0,),
}
"""Fields that specifications did not have in an earlier version, and the values that mean what it meant without them."""


def _without_later_defaults(value: Any) -> Any:
    """Return what an earlier version would have of this, if it means what it did there."""
    if isinstance(value, dict):
        return {key: _without_later_defaults(one) for key, one in value.items() if key not in _LATER or one not in _LATER[key]}
    return [_without_later_defaults(one) for one in value] if isinstance(value, list | tuple) else value


def _identity(config: ModelConfig, weights: list[Path]) -> str:
    """Equal for equal files wherever they lie; costs three megabytes of reading per file.

    Pieces between the edges tell weights apart that differ in some layers only: KV on disk outlives a change of the files.
    """
    digest = hashlib.blake2b(msgspec.json.encode(_without_later_defaults(msgspec.to_builtins(config))), digest_size=16)
    for path in weights:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(size.to_bytes(8, "little") + file.read(_EDGE_BYTES))
                file.seek(max(0, size - _EDGE_BYTES))
                digest.update(file.read(_EDGE_BYTES))
                for piece in range(_NUM_PIECES if size > 2 * _EDGE_BYTES else 0):
                    file.seek(size * piece // _NUM_PIECES)
                    digest.update(file.read(_PIECE_BYTES))
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error}") from error
    return digest.hexdigest()
