"""Models of a megabyte with random weights, made where they are needed: one vocabulary, other weights for each seed.

A byte of text is a token, the last token ends an answer, and the template shows tools, so that every kind of request works.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from common.models.shapes import SHAPES, write_model

SHAPE = "tiny"
EOS = "<|end|>"
SCALE = 0.2
"""Standard deviation of the weights: large enough that two models soon disagree, and that no answer is one token for ever."""
TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}assistant:{# <tool_call> #}"""


def write(folder: Path, seed: int) -> Path:
    """Fill `folder` with a model in Hugging Face's layout, and return it."""
    folder.mkdir(parents=True)
    write_model(SHAPE, folder)
    vocab_size = int(SHAPES[SHAPE]["vocab_size"])
    _add_eos(folder, vocab_size - 1)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    rng = np.random.default_rng(seed)
    save_file(
        {name: rng.standard_normal(shape, np.float32) * SCALE for name, shape in _shapes().items()},
        folder / "model.safetensors",
    )
    return folder


def _add_eos(folder: Path, token: int) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = {name: index for name, index in tokenizer["model"]["vocab"].items() if index != token}
    tokenizer["model"]["vocab"] = vocab | {EOS: token}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] = [{"id": token, "content": EOS, "special": True, **flags}]
    path.write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"clean_up_tokenization_spaces": False, "eos_token": EOS}))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": token}))


def _shapes() -> dict[str, tuple[int, ...]]:
    shape = SHAPES[SHAPE]
    hidden, middle, heads, kv_heads = (
        int(shape[name]) for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = hidden // heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (int(shape["vocab_size"]), hidden),
        "model.norm.weight": (hidden,),
    }
    of_layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    for layer in range(int(shape["num_hidden_layers"])):
        shapes |= {f"model.layers.{layer}.{name}.weight": of_it for name, of_it in of_layer.items()}
    return shapes
