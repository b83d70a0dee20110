"""Generates diverse chat prompts for a target to answer: templates by topics by styles, and passages of text on this machine.

    python -m recipes.draft.prompts build/draft --train 24000 --held-out 400

Passages come from Python's documentation and standard library and from /usr/share/common-licenses, all of which allow it.
Held-out prompts share no template, topic or passage with those for training, and `questions.jsonl` has questions that were
written by hand for judging drafts alone. Each prompt is a line of JSON: `messages` and
`template`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from bench.engine.texts import sources
from common.protocol.errors import ConfigError
from recipes.draft import questions, templates

Split = Literal["train", "held_out", "questions"]
QUESTION_SHARE = 0.5
"""Of training prompts made of templates, those of one line that `questions` has."""
_PASSAGE_CHARACTERS = (300, 900)
_MAX_REPEATS = 2000
"""Prompts in a row that were there before: then the generator has no more."""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True):
    """A conversation up to the answer. `template` names what it was made of."""

    messages: tuple[Message, ...]
    template: str


def prompts(split: Split, count: int, seed: int) -> list[Prompt]:
    """Return `count` different prompts: a pure function of the arguments and of the text on this machine. Of "questions" all
    that there are.

    :raises ConfigError: if there are not so many.
    """
    if split == "questions":
        asked = enumerate(questions.HELD_OUT_QUESTIONS)
        return [Prompt((Message("user", text),), f"{split}/{number}") for number, text in asked]
    generator = random.Random(f"{split}/{seed}")
    passages = _passages(split)
    found: dict[Prompt, None] = {}
    repeats = 0
    while len(found) < count:
        prompt = _prompt(split, generator, passages)
        if prompt.messages[-1].content in questions.HELD_OUT_QUESTIONS:
            continue
        repeats = repeats + 1 if prompt in found else 0
        if repeats > _MAX_REPEATS:
            raise ConfigError(f"the generator has {len(found)} different prompts of {split}, and {count} are wanted")
        found[prompt] = None
    return list(found)


def _prompt(split: Split, generator: random.Random, passages: dict[str, list[str]]) -> Prompt:
    families = _families(split, generator)
    kind = generator.choice(list(families))
    number = generator.randrange(len(families[kind]))
    turns = families[kind][number]
    fill: dict[str, Callable[[], str]] = {
        "topic": lambda: generator.choice(_half(templates.TOPICS, split)),
        "style": lambda: generator.choice(templates.STYLES),
        "audience": lambda: generator.choice(templates.AUDIENCES),
        "person": lambda: generator.choice(templates.PERSONS),
        "language": lambda: generator.choice(templates.LANGUAGES),
        "code": lambda: generator.choice(templates.CODE_LANGUAGES),
        "task": lambda: generator.choice(_half(templates.CODE_TASKS, split)),
        "sentence": lambda: generator.choice(_half(templates.SENTENCES, split)),
        "event": lambda: generator.choice(_half(templates.EVENTS, split)),
        "figure": lambda: generator.choice(questions.FIGURES),
        "place": lambda: generator.choice(questions.PLACES),
        "pair": lambda: generator.choice(questions.PAIRS),
        "why": lambda: generator.choice(questions.WHYS),
        "cause": lambda: generator.choice(questions.CAUSES),
        "word": lambda: generator.choice(questions.WORDS),
        "howto": lambda: generator.choice(questions.HOW_TO),
        "dish": lambda: generator.choice(questions.DISHES),
        "problem": lambda: generator.choice(questions.PROBLEMS),
        "habit": lambda: generator.choice(questions.HABITS),
        "thing": lambda: generator.choice(questions.THINGS),
        "form": lambda: generator.choice(questions.FORMS),
        "work": lambda: generator.choice(questions.WORKS),
        "goods": lambda: generator.choice(questions.GOODS),
        "concept": lambda: generator.choice(questions.CONCEPTS),
        "number": lambda: str(generator.randint(3, 10)),
        "a": lambda: str(generator.randint(2, 400)),
        "b": lambda: str(generator.randint(2, 99)),
        "prose": lambda: generator.choice(passages["prose"]),
        "source": lambda: generator.choice(passages["source"]),
    }
    values: dict[str, str] = {}

    def filled(text: str) -> str:
        for name, draw in fill.items():
            if "{" + name + "}" in text:
                # the same name is the same value in all turns of a conversation
                values.setdefault(name, draw())
                text = text.replace("{" + name + "}", values[name])
        return text

    messages = [Message(role, filled(text)) for role, text in _with_roles(turns)]
    if generator.random() < 0.2 and kind != "system":
        messages.insert(0, Message("system", generator.choice(_half(templates.SYSTEMS, split))))
    return Prompt(tuple(messages), f"{split}/{kind}/{number}")


def _families(split: Split, generator: random.Random) -> templates.Templates:
    if split == "held_out":
        return templates.HELD_OUT
    return questions.QUESTIONS if generator.random() < QUESTION_SHARE else templates.TRAIN


def _with_roles(turns: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Users speak first and last; a turn that begins with "system:" is the system's."""
    role = "user"
    for text in turns:
        if text.startswith("system:"):
            yield "system", text.removeprefix("system:").strip()
            continue
        yield role, text
        role = "assistant" if role == "user" else "user"


def _half(items: tuple[str, ...], split: Split) -> tuple[str, ...]:
    """Every fifth item is for held-out prompts, the others for training."""
    return tuple(item for index, item in enumerate(items) if (index % 5 == 4) == (split == "held_out"))


def _passages(split: Split) -> dict[str, list[str]]:
    """Return passages of "prose" and "source" code. A block of ten in a row is held out after every 40, so that neighbours
    don't meet."""
    texts = sources()
    found = {
        "prose": [piece for name in ("reference", "licences") for piece in _cut(texts.get(name, ("", ""))[1], "\n\n")],
        "source": _cut(texts["code"][1], "\n\n\n"),
    }
    return {
        kind: [piece for index, piece in enumerate(pieces) if (index % 50 >= 40) == (split == "held_out")]
        for kind, pieces in found.items()
    }


def _cut(text: str, separator: str) -> list[str]:
    """Cut at separators into pieces of a length that fits a prompt."""
    least, most = _PASSAGE_CHARACTERS
    pieces: list[str] = []
    piece = ""
    for part in text.split(separator):
        piece = f"{piece}{separator}{part}".strip("\n") if piece else part.strip("\n")
        if len(piece) >= least:
            pieces.append(piece[:most])
            piece = ""
    return list(dict.fromkeys(pieces))


def write(path: Path, found: list[Prompt]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(prompt) + b"\n" for prompt in found))


def read(path: Path) -> list[Prompt]:
    """:raises ConfigError: if the file is missing or is not what `write` wrote."""
    try:
        return [msgspec.json.decode(line, type=Prompt) for line in path.read_bytes().splitlines()]
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} holds no prompts ({error}): run recipes.draft.prompts first") from error


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.draft.prompts", description=__doc__)
    parser.add_argument("folder", type=Path, help="train.jsonl, held_out.jsonl and questions.jsonl are written there")
    parser.add_argument("--train", type=int, default=24_000, help="prompts (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=400, help="prompts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    counts: dict[Split, int] = {"train": arguments.train, "held_out": arguments.held_out, "questions": 0}
    for split, count in counts.items():
        found = prompts(split, count, arguments.seed)
        write(arguments.folder / f"{split}.jsonl", found)
        print(f"{split}: {len(found)} prompts of {len({prompt.template for prompt in found})} templates")


if __name__ == "__main__":
    main()
