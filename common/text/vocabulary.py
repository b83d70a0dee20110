"""Whether two models have one vocabulary: a digest of what maps text to token ids.

Proposals travel as token ids, so a draft model must mean the same by each id as the model whose text it continues.
"""

from __future__ import annotations

import hashlib

import msgspec

from common.models.config import load_config
from common.models.source import ModelFiles
from common.protocol.errors import ConfigError
from common.text.tokenizer import load_tokenizer


def vocabulary_digest(files: ModelFiles, vocab_size: int) -> str:
    """Return a digest of a model's vocabulary, merges, added tokens and number of logits. Empty where the tokenizer can't be
    loaded: then nothing is known of it.

    vocab_size: logits of the model, which may be more than the tokenizer has tokens.
    """
    try:
        tokenizer = load_tokenizer(files)
    except ConfigError:
        return ""
    said = tokenizer.serialised()
    model = said.get("model", {})
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, dict):
        vocabulary = sorted(vocabulary.items(), key=lambda entry: entry[1])
    added = sorted((token["id"], token["content"]) for token in said.get("added_tokens", ()))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    content = msgspec.json.encode([vocab_size, model.get("type"), vocabulary, merges, added])
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def check_same_vocabulary(target: ModelFiles, draft: ModelFiles) -> None:
    """Check that a draft model may draft for a target.

    :raises ConfigError: if their vocabularies differ in size or in what an id means, or one of them can't be read.
    """
    sizes = [load_config(files).vocab_size for files in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the draft model {draft.name} has a vocabulary of {sizes[1]}, and {target.name} one of {sizes[0]}",
            param="draft_model",
        )
    digests = [vocabulary_digest(files, sizes[0]) for files in (target, draft)]
    if not digests[1]:
        raise ConfigError(f"the tokenizer of the draft model {draft.name} is missing or can't be read", param="draft_model")
    if digests[0] != digests[1]:
        raise ConfigError(
            f"the draft model {draft.name} has another tokenizer than {target.name}: they must be the same", param="draft_model"
        )
