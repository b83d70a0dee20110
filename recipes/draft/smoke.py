"""Runs the code of this recipe on the device that is there, for some seconds, with a random target of SmolLM2-135M's shape.

    python -m recipes.draft.smoke --seconds 25

Prints tokens per second of writing and of training a head. What is learnt means nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch

from recipes.draft.acceptance import by_temperature, starts_of, survival
from recipes.draft.batched import Ask, BatchedWriter
from recipes.draft.eagle_acceptance import eagle_proposer
from recipes.draft.llama import Decoder, LlamaShape
from recipes.draft.samples import Sample
from recipes.draft.target import Target, frozen
from recipes.draft.train_eagle import EagleSettings, EagleTrainer
from recipes.draft.trainer import device_of, dtype_of
from recipes.draft.vocabulary import DEFAULT_SIZE

SHAPE = LlamaShape(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
    max_position_embeddings=8192,
)


def random_target(shape: LlamaShape, device: torch.device, dtype: torch.dtype) -> Target:
    torch.manual_seed(0)
    with device:
        decoder = Decoder(shape).to(dtype)
        embedding = (0.1 * torch.randn(shape.vocab_size, shape.hidden_size)).to(dtype)
    frozen(decoder)
    return Target("random", "", shape, decoder, embedding, embedding)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.draft.smoke", description=__doc__)
    parser.add_argument("--seconds", type=float, default=25.0, help="of training (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=3072, help="answers in work at once (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=EagleSettings().batch_tokens)
    parser.add_argument("--ids", type=int, default=DEFAULT_SIZE, help="draft vocabulary (default: %(default)s)")
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    device = device_of("auto")
    torch.set_float32_matmul_precision("high")
    target = random_target(SHAPE, device, dtype_of(device))
    writer = BatchedWriter(target, [0])
    generator = np.random.default_rng(0)
    prompts = [
        generator.integers(1, SHAPE.vocab_size, int(length)).tolist() for length in generator.integers(20, 120, arguments.rows)
    ]
    asks = [Ask(prompt, seed, (0.0, 0.7)[seed % 2]) for seed, prompt in enumerate(prompts)]
    answers: list[list[int]] = []
    for attempt in range(2):
        at = time.monotonic()
        answers = writer.write(asks, arguments.max_tokens)
        written, seconds = sum(map(len, answers)), time.monotonic() - at
        print(f"writing, attempt {attempt}: {written} tokens in {seconds:.1f} s, {written / seconds:.0f}/s", flush=True)
    samples = [
        Sample(np.array([*ask.prompt, *answer], np.uint32), len(ask.prompt), ask.seed, ask.temperature)
        for ask, answer in zip(asks, answers, strict=True)
    ]
    del writer
    settings = EagleSettings(warmup=5, batch_tokens=arguments.batch_tokens)
    trainer = EagleTrainer(target, torch.arange(min(arguments.ids, SHAPE.vocab_size)), samples, settings)
    print(f"ready to train after {time.monotonic() - begun:.1f} s", flush=True)
    tokens, timed_s = 0, 0.0
    deadline_s = begun + arguments.seconds
    for losses in trainer.run(deadline_s):
        if trainer.progress.step in (5, 20) or trainer.progress.step % 100 == 0:
            print(trainer.progress, {name: round(float(value), 4) for name, value in losses.items()}, flush=True)
        if trainer.progress.step == 20:
            tokens, timed_s = 0, time.monotonic()
        tokens += arguments.batch_tokens
    if timed_s:
        print(f"training: about {tokens / (time.monotonic() - timed_s):.0f} tokens/s with padding", flush=True)
    at = time.monotonic()
    starts = by_temperature(starts_of(samples[:256], 4, 832))
    propose = eagle_proposer(trainer.draft, target)
    print({heat: survival(some, propose) for heat, some in starts.items()}, f"{time.monotonic() - at:.1f} s", flush=True)
    if device.type == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most", flush=True)


if __name__ == "__main__":
    main()
