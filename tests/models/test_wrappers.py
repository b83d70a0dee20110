"""Models that wrap one of text: the text part is served, whatever else the files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from common.models.config import config_from_json, load_config
from common.models.source import ModelFiles
from common.models.weights.inventory import take_inventory
from common.protocol.errors import ConfigError
from tests.models.driver import Request, open_runner, run
from tests.models.oracles import build, greedy_choices, oracle_prompt, save

WRAPPED = {"gemma3": "gemma3", "mistral": "mistral3", "ministral3": "mistral3", "llama4": "llama4"}
NAMES = {
    "published": ("language_model.model.", "language_model.lm_head.", "vision_tower."),
    "later": ("model.language_model.", "lm_head.", "model.vision_tower."),
}


def wrap(files: ModelFiles, kind: str, names: str) -> None:
    """Turn a text model's folder into that of a model that also takes images."""
    model, head, images = NAMES[names]
    path = files.path / "model.safetensors"
    tensors = {
        key.replace("model.", model, 1) if key.startswith("model.") else key.replace("lm_head.", head, 1): tensor
        for key, tensor in load_file(path).items()
    }
    tensors |= {f"{images}blocks.0.weight": torch.ones(3, 3), "multi_modal_projector.linear.weight": torch.ones(2)}
    save_file(tensors, path)
    config = files.path / "config.json"
    text = json.loads(config.read_bytes())
    wrapper = {"model_type": kind, "vision_config": {"hidden_size": 3}, "image_token_index": 9, "text_config": text}
    config.write_text(json.dumps(wrapper))


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("oracle", WRAPPED)
def test_the_text_part_is_served(tmp_path: Path, oracle: str, names: str) -> None:
    model = build(oracle)
    files = save(model, tmp_path)
    before = take_inventory(files, load_config(files))
    wrap(files, WRAPPED[oracle], names)
    with capture_logs() as logs:
        runner = open_runner(files)
    assert [(line["event"], line["tensors"]) for line in logs if line["log_level"] == "info"] == [("image_weights_skipped", 2)]
    prompt = oracle_prompt()[:30]
    output = run(runner, [Request(prompt, 6)])[0]
    assert output == greedy_choices(model, prompt, output)
    assert take_inventory(files, load_config(files)) == before


def test_ministral_3_as_it_is_published(tmp_path: Path) -> None:
    """In FP8 with a scale for each linear, static scales of activations beside it, and everything about images left alone."""
    model = build("ministral3")
    files = save(model, tmp_path)
    wrap(files, "mistral3", "published")
    path, config = files.path / "model.safetensors", files.path / "config.json"
    tensors = load_file(path)
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight = tensors[name]
        scale = weight.abs().max() / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[name.replace("weight", "weight_scale_inv")] = scale
        tensors[name.replace("weight", "activation_scale")] = torch.tensor(0.5)
        own = name.removeprefix("language_model.").removesuffix(".weight")
        model.get_submodule(own).weight.data = tensors[name].float() * scale
    save_file(tensors, path)
    quantization = {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None}
    quantization["modules_to_not_convert"] = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    config.write_text(json.dumps(json.loads(config.read_bytes()) | {"quantization_config": quantization, "dtype": "bfloat16"}))
    prompt = oracle_prompt()[:30]
    output = run(open_runner(files), [Request(prompt, 6)])[0]
    assert output == greedy_choices(model, prompt, output)


def test_gemma_3_as_transformers_saves_it(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

    text = build("gemma3")
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(text_config=text.config, vision_config=vision, mm_tokens_per_image=1)
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    files = save(whole, tmp_path)
    prompt = oracle_prompt()[:30]
    output = run(open_runner(files), [Request(prompt, 6)])[0]
    assert output == greedy_choices(text, prompt, output)


def mistral3(*, top: bool, text: bool) -> Any:
    """A model as transformers makes it: the wrapper and its text part say by themselves whether the head is the embedding."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralVisionConfig

    part = build("mistral", head_dim=16, tie_word_embeddings=text).config
    vision = PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Mistral3Config(text_config=part, vision_config=vision, tie_word_embeddings=top)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return Mistral3ForConditionalGeneration(config).eval()


def first_choices(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("top", [False, True])
@pytest.mark.parametrize("text", [False, True])
def test_the_wrapper_says_whether_the_head_is_the_embedding(tmp_path: Path, top: bool, text: bool) -> None:
    model = mistral3(top=top, text=text)
    files = save(model, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_bytes())
    assert (saved["tie_word_embeddings"], saved["text_config"]["tie_word_embeddings"]) == (top, text)
    take_inventory(files, load_config(files))
    prompt = oracle_prompt()[:30]
    output = run(open_runner(files), [Request(prompt, 6)])[0]
    assert output == first_choices(model, prompt, output)


def test_a_head_in_the_files_is_read_though_the_wrapper_denies_it(tmp_path: Path) -> None:
    """As transformers 5 saves a model of 4 that says it in the text part alone."""
    model = mistral3(top=False, text=False)
    files = save(model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"tie_word_embeddings": True}))
    assert not load_config(files).tie_embeddings
    prompt = oracle_prompt()[:30]
    output = run(open_runner(files), [Request(prompt, 6)])[0]
    assert output == first_choices(model, prompt, output)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.safetensors can't be read"):
        load_config(files)


def test_the_text_part_says_it_where_the_wrapper_does_not() -> None:
    text = {"model_type": "mistral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 99}
    text |= {"num_attention_heads": 4}
    for tied in (False, True):
        found = config_from_json({"model_type": "mistral3", "text_config": text | {"tie_word_embeddings": tied}})
        assert found.tie_embeddings == tied
    assert not config_from_json({"model_type": "mistral3", "text_config": text}).tie_embeddings


def test_published_gemma_3_leaves_defaults_out() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    found = config_from_json({"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 106]})
    assert (found.vocab_size, found.num_heads, found.num_kv_heads, found.head_dim) == (262_208, 8, 4, 256)
    assert (found.tie_embeddings, found.eos_ids, found.max_context) == (True, [1, 106], 131_072)


def test_what_a_configuration_leaves_alone_may_be_named_as_in_the_wrapper() -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    text = {"model_type": "mistral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 99}
    text |= {"num_attention_heads": 4}
    quantization: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    quantization |= {"ignore": ["language_model.lm_head", "re:language_model.model.layers.1.*"]}
    quantization |= {"config_groups": {"group_0": {"weights": weights}}}
    found = config_from_json({"model_type": "mistral3", "text_config": text, "quantization_config": quantization})
    assert found.quantization.leaves_alone("lm_head")
    assert found.quantization.leaves_alone("model.layers.1.mlp.up_proj")
    assert not found.quantization.leaves_alone("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen2_5_vl"}, "model_type 'qwen2_5_vl' is not supported; .* text part of gemma3, llama4, mistral3"),
        ({"model_type": "gemma3"}, "a gemma3 model has no text_config"),
        ({"model_type": "mistral3", "text_config": {"model_type": "llama"}}, "'llama'; supported: mistral, ministral3"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}}, "config.json has no intermediate_size"),
        (
            {"model_type": "gemma3", "odd": 1, "text_config": {"hidden_size": 64, "intermediate_size": 9}},
            "no num_hidden_layers",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_json(config)


def test_an_unread_key_beside_the_text_part_is_an_error() -> None:
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match="sets odd"):
        config_from_json({"model_type": "gemma3", "odd": 1, "text_config": text})
