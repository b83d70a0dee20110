"""Choose the ids that a draft model can propose: the most frequent in the target's answers, and the special ones always.

python -m recipes.draft.vocabulary build/draft --size 16384
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.models.source import DEFAULT_MODEL, resolve
from common.protocol.errors import ConfigError
from common.text.bundle import load_bundle
from recipes.draft.samples import Sample, read_samples

DEFAULT_SIZE = 16_384


def answer_counts(samples: Sequence[Sample], vocab_size: int) -> NDArray[np.int64]:
    """Return how often the target wrote each id, int64 [vocab_size]; prompts do not count."""
    counts = np.zeros(vocab_size, np.int64)
    for sample in samples:
        counts += np.bincount(sample.tokens[sample.prompt_length :], minlength=vocab_size)
    return counts


def choose_ids(counts: NDArray[np.int64], size: int, always: Collection[int]) -> NDArray[np.int64]:
    """Return `size` ids, the most frequent first; of equals, the lower id. `always` are among them.

    :raises ConfigError: if `size` is larger than the vocabulary, or too small for `always`.
    """
    if not len(set(always)) <= size <= len(counts):
        raise ConfigError(f"a draft vocabulary of {size} ids must hold {len(set(always))} special ones out of {len(counts)}")
    if any(not 0 <= token < len(counts) for token in always):
        raise ConfigError(f"special ids must be below {len(counts)}")
    order = np.lexsort((np.arange(len(counts)), -counts))
    special = np.isin(order, np.array(sorted(set(always)), np.int64))
    ranked = np.concatenate([order[special], order[~special]])
    chosen = np.sort(ranked[:size])
    return chosen[np.argsort(-counts[chosen], kind="stable")].astype(np.int64)


def d2t_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return target id minus draft id of each draft id (EAGLE-3's convention)."""
    return ids - np.arange(len(ids), dtype=np.int64)


def read_ids(path: Path) -> NDArray[np.int64]:
    """:raises ConfigError: if the file is not what this module wrote."""
    try:
        ids = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{path} is not a draft vocabulary ({error}): run recipes.draft.vocabulary first") from error
    if ids.ndim != 1 or ids.dtype != np.int64 or not len(ids) or len(np.unique(ids)) < len(ids):
        raise ConfigError(f"{path} is not a draft vocabulary: no id may be named twice")
    return ids


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.draft.vocabulary", description=__doc__)
    parser.add_argument("folder", type=Path, help="holds the shards; vocabulary.npy is written there")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--size", type=int, default=DEFAULT_SIZE, help="ids of the draft model (default: %(default)s)")
    arguments = parser.parse_args(argv)
    bundle = load_bundle(resolve(arguments.model))
    counts = answer_counts(read_samples(arguments.folder, "train"), bundle.tokenizer.vocab_size)
    ids = choose_ids(counts, arguments.size, {*bundle.tokenizer.special_ids, *bundle.eos_ids})
    np.save(arguments.folder / "vocabulary.npy", ids)
    print(f"{len(ids)} of {len(counts)} ids cover {counts[ids].sum() / max(1, counts.sum()):.4f} of {counts.sum()} tokens")


if __name__ == "__main__":
    main()
