"""A choice with reasoning and calls: which special tokens its parser sees, what counts as reasoning, and where it ends."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from common.protocol.messages import TokenLogprobs
from common.text.detokenize import Detokenizer, WindowDetokenizer
from common.text.output.events import CallArguments, CallEnd, CallStart, Reasoning, Text
from common.text.output.formats import Dialect
from common.text.output.parser import OutputParser
from common.text.output.tools import ToolSet
from common.text.tokenizer import Tokenizer
from services.gateway.choice_events import ChoiceEvents
from services.gateway.choices import ChoiceRules, StopStrings

SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|other|>"]
TOOLS = ToolSet([{"function": {"name": "now"}}])
MISTRAL = Dialect("mistral", "magistral")


def tokenizer() -> Tokenizer:
    """A token is a byte, or one of SPECIAL."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return Tokenizer(backend)


TOKENIZER = tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, parse_special=True)


def choice(kind: type[Detokenizer | WindowDetokenizer] = Detokenizer, *, stop: str = "", scored: bool = False) -> ChoiceEvents:
    shown = TOKENIZER.special_ids_of(MISTRAL.marks(tools=True, reasoning=True))
    return ChoiceEvents(
        kind(TOKENIZER, shown=shown),
        ChoiceRules(stops=StopStrings([stop]) if stop else None, scored=scored),
        OutputParser(MISTRAL, tools=TOOLS),
    )


@pytest.mark.parametrize("kind", [Detokenizer, WindowDetokenizer])
def test_the_parser_sees_its_own_marks_and_no_other_special_token(kind: type[Detokenizer | WindowDetokenizer]) -> None:
    made = choice(kind)
    delta = made.push(ids("[THINK]hm[/THINK]<|other|>So.[TOOL_CALLS]now[ARGS]{}"), None, "stop")
    assert delta.events == [
        Reasoning("hm"),
        Text("So."),
        CallStart(0, "call_0", "now"),
        CallArguments(0, "{}"),
        CallEnd(0),
    ]
    assert delta.finish == made.finish == "tool_calls"
    assert made.reasoning_count == len(ids("[THINK]hm[/THINK]"))


def test_without_marks_all_special_tokens_are_hidden() -> None:
    for kind in (Detokenizer, WindowDetokenizer):
        source = kind(TOKENIZER)
        assert source.push(ids("a[THINK]<|other|>b")) + source.finish() == "ab"


def test_text_alone_is_a_delta_of_text() -> None:
    assert choice().push(ids("So.")).text == "So."
    assert choice().push(ids("So.")).events is None


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_tokens_behind_a_stop_string_have_no_scores(size: int) -> None:
    made = choice(stop="stop", scored=True)
    tokens = ids("[THINK]stop[/THINK]go on stop here")
    scored: list[int] = []
    text = ""
    for at in range(0, len(tokens), size):
        part = tokens[at : at + size]
        delta = made.push(part, [TokenLogprobs(-1.0) for _ in part])
        scored += [token.token for token in delta.scored or []]
        text += delta.text + "".join(event.text for event in delta.events or [] if isinstance(event, Text))
        if delta.finish:
            break
    assert text == "go on "
    assert made.finish == "stop"
    assert TOKENIZER.decode(scored, skip_special=False).rstrip() == "[THINK]stop[/THINK]go on"
