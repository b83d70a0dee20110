"""Writes the model card of a draft model: what it is for, data, steps, acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.models.json_files import read_object_if_any
from recipes.draft.samples import read_samples

_CARD = """# {kind} for {target}

Proposes tokens for speculative decoding with {target} ({revision}). Of no use alone: embedding and output head are the
target's.

| | |
|---|---|
| layers, MLP width, hidden size | {layers}, {intermediate}, {hidden} |{reads}
| draft vocabulary | {ids} of {vocabulary} ids |
| weights | {megabytes:.1f} MB |
| data | {samples} answers of the target, {tokens} tokens; {temperatures} |
| prompts | generated (recipes/draft/prompts.py){written}; passages from Python's documentation and library and licences |
| training | {steps} steps of up to {batch} tokens, {epochs} epochs begun, {minutes:.1f} minutes |
| loss | {loss} |
| licence | the target's |

## Acceptance

On answers to held-out prompts, whose templates, topics and passages are not in the training data, and to questions written by
hand (`HELD_OUT_QUESTIONS` in recipes/draft/questions.py), by which training was watched. Column k is the share of
places at which the first k proposals equal the target's tokens; the mean counts accepted tokens out of K, without the target's
own.

{table}
"""
_DRAFT_LOSS = "KL to the target at temperature 1, and {chosen_weight} of the cross-entropy to its tokens"
_EAGLE_LOSS = (
    "cross-entropy to the target's distribution at temperature 1, and {greedy_weight} of that to its likeliest id; {unroll} "
    "draft steps unrolled from every position, step j with weight {step_decay}^j"
)


def write_card(draft: Path, data: Path, state: Mapping[str, Any], table: str) -> None:
    """Write README.md into the folder `draft`. data: the folder of shards; state: a checkpoint's.

    :raises ConfigError: if a file is missing or damaged.
    """
    config = read_object_if_any(draft / "config.json")
    samples = read_samples(data, "train")
    layer_ids = config.get("eagle_aux_hidden_state_layer_ids")
    answers = Counter(round(sample.temperature, 3) for sample in samples)
    shares = [f"{100 * count / len(samples):.0f} % at T = {heat:g}" for heat, count in sorted(answers.items())]
    text = _CARD.format(
        target=config["target"]["name"],
        revision=config["target"]["revision"],
        layers=config["num_hidden_layers"],
        intermediate=config["intermediate_size"],
        hidden=config["hidden_size"],
        ids=config["draft_vocab_size"],
        vocabulary=config["vocab_size"],
        megabytes=(draft / "model.safetensors").stat().st_size / 1e6,
        samples=len(samples),
        tokens=sum(len(sample.tokens) - sample.prompt_length for sample in samples),
        steps=state["progress"]["step"],
        batch=state["settings"]["batch_tokens"],
        epochs=state["progress"]["epoch"] + 1,
        minutes=state["progress"]["seconds"] / 60,
        kind="A draft model" if layer_ids is None else "An EAGLE-3-style head",
        reads="" if layer_ids is None else f"\n| reads | the target's residuals that enter layers {layer_ids} |",
        temperatures=", ".join(shares),
        written=" and by the target itself (recipes/draft/write.py)" if (data / "prompts-train.npz").exists() else "",
        loss=(_DRAFT_LOSS if layer_ids is None else _EAGLE_LOSS).format(**state["settings"]),
        table=table,
    )
    (draft / "README.md").write_text(text)
