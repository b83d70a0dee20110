"""What a head reads is what transformers computes; its reference is an EAGLE-3 layer made of transformers' parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from common.engine.plan import StepPlan, StepRow
from common.ops.cpu_int8.head_reference import HeadWeightsReference, head_reference
from common.ops.drafting.head_layer_tensors import HeadLayerTensors
from common.ops.norm.rms_norm import rms_norm
from tests.models.driver import GREEDY, open_runner
from tests.models.oracles import build, oracle_prompt, save


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("gemma2", "float32"), ("qwen3", "float32"), ("qwen3", "auto")]
)
def test_what_is_noted_are_the_models_hidden_states(family: str, dtype: str, tmp_path: Path) -> None:
    """Of prompts and verified tokens, in any order of rows, behind the last layer too; logits stay the same to the bit."""
    model: Any = build(family)
    runner: Any = open_runner(save(model, tmp_path), dtype=dtype)
    layers = model.config.num_hidden_layers
    prompts = [oracle_prompt(length=9), oracle_prompt(seed=1, length=5), oracle_prompt(seed=2, length=1)]
    rows = [
        StepRow(prompts[0], 0, [0], 0, GREEDY, 9, serial=0),
        StepRow(prompts[1], 0, [1], 3, GREEDY, 5, serial=1),
        StepRow(prompts[2], 0, [2], 1, GREEDY, 1),
        StepRow(prompts[1], 0, [3], 0, GREEDY, 5, num_read=2),
    ]
    for row in rows:
        row.more_blocks = [row.blocks] * (len(runner.groups) - 1)
    without = runner.logits(rows).clone()
    noted: list[Any] = []
    runner.head = SimpleNamespace(
        layers=np.array([0, 1, layers]),
        state_size=3 * model.config.hidden_size,
        draft=lambda rows, results, states, firsts: noted.append((states.copy(), list(firsts))) or [],
    )
    with torch.inference_mode():
        assert torch.equal(runner.logits(rows), without)
    runner.execute(StepPlan(0, rows))
    ((states, firsts),) = noted
    for row, first in zip(rows, firsts, strict=True):
        with torch.inference_mode():
            every = model.model(torch.tensor([row.tokens]), output_hidden_states=True).hidden_states
        mine = torch.from_numpy(states[first : first + len(row.tokens)]).view(len(row.tokens), 3, -1)
        last = rms_norm(mine[:, 2].contiguous(), runner.decoder.norm.float(), runner.decoder.config.rms_eps)
        tolerance = 1e-4 if dtype == "float32" else 0.1
        for found, expected in zip((mine[:, 0], mine[:, 1], last), (every[0], every[1], every[-1]), strict=True):
            torch.testing.assert_close(found, expected[0], rtol=tolerance, atol=tolerance)


def test_the_reference_is_a_layer_of_transformers_with_a_wider_input() -> None:
    form: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "attn_implementation": "eager",
    }
    config = LlamaConfig(**form)
    torch.manual_seed(1)
    attention, mlp, rotary = LlamaAttention(config, 0), LlamaMLP(config), LlamaRotaryEmbedding(config)
    for name, outputs in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
        setattr(attention, name, nn.Linear(64, outputs, bias=False))
    norms = [LlamaRMSNorm(32, 1e-5) for _ in range(4)]
    for norm in norms:
        nn.init.normal_(norm.weight, 1.0, 0.1)
    fc, lm_head = nn.Linear(96, 32, bias=False), nn.Linear(32, 20, bias=False)
    states, embedded = torch.randn(7, 96), torch.randn(7, 32)
    positions = torch.arange(3, 10)[None]
    with torch.inference_mode():
        feature = fc(states)
        both = torch.cat((norms[0](embedded), norms[1](feature)), -1)
        mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
        attended = attention(both[None], position_embeddings=rotary(both[None], positions), attention_mask=mask)[0][0]
        x = feature + attended
        x = x + mlp(norms[2](x))
        expected = lm_head(norms[3](x))
        weights = HeadWeightsReference(
            fc=fc.weight,
            embedding_norm=norms[0].weight,
            feature_norm=norms[1].weight,
            layers=[
                HeadLayerTensors(
                    qkv=torch.cat([getattr(attention, f"{name}_proj").weight for name in "qkv"]),
                    output=attention.o_proj.weight,
                    mlp_norm=norms[2].weight,
                    gate_up=torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
                    down=mlp.down_proj.weight,
                )
            ],
            norm=norms[3].weight,
            lm_head=lm_head.weight,
        )
        found_x, found = head_reference(
            weights, states, torch.empty(0, 32), embedded, head_dim=8, num_kv_heads=2, rope_theta=5000.0, eps=1e-5, first=3
        )
    torch.testing.assert_close(found_x, x)
    torch.testing.assert_close(found, expected)
