"""`penstock generate`: one prompt over NATS. The answer is streamed to stdout, then TTFT and tok/s to stderr; with `--json` the
whole answer is one JSON object on stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from common.cli.chunks import Answer
from common.cli.client import ChatStream, connected, served_model
from common.cli.console import DEFAULT_NATS_URL, NatsUrl, err, run, write_answer
from common.cli.model_names import ModelName
from common.protocol.errors import ConfigError, EmptyPrompt, InvalidParameter, PenstockError
from common.runtime.bus import Bus

MAX_FILE_BYTES = 1 << 20
"""Largest file of a schema or of tools."""

Prompt = Annotated[
    str, typer.Argument(metavar="PROMPT", show_default=False, help="What to ask. - or nothing: what is piped in.")
]
System = Annotated[str, typer.Option("--system", metavar="TEXT", help="System prompt. Default: the model's own.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, metavar="N", help="Longest answer, in tokens.")]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0, metavar="T", help="0: always the likeliest token; 1: as the model was trained.")
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="The same seed gives the same answer. Default: a random one.")
]


def command(
    prompt: Prompt = "",
    model: ModelName = "",
    system: System = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", metavar="FILE", help="The answer is JSON that fits this JSON schema.")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option("--tools", metavar="FILE", help="Tools that the model may call: a JSON list as in OpenAI's `tools`."),
    ] = None,
    tool_choice: Annotated[
        str, typer.Option("--tool-choice", metavar="CHOICE", help="With --tools: auto, none, required, or the name of one.")
    ] = "auto",
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one line of JSON at the end: text, reasoning, tool calls, usage and times."),
    ] = False,
    nats_url: NatsUrl = DEFAULT_NATS_URL,
) -> None:
    """Ask one question and stream the answer. Time to first token and tok/s go to stderr."""
    prompt = asked(prompt)
    body = chat_body(conversation(system, prompt), max_tokens=max_tokens, temperature=temperature, seed=seed)
    if json_schema is not None:
        schema = {"name": "answer", "schema": json_file(json_schema, "json_schema", dict), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if tools is None and tool_choice not in ("auto", "none"):
        raise ConfigError(f"--tool-choice {tool_choice} chooses of --tools: give both", param="tool_choice")
    if tools is not None:
        named = {"type": "function", "function": {"name": tool_choice}}
        body["tools"] = json_file(tools, "tools", list)
        body["tool_choice"] = tool_choice if tool_choice in ("auto", "none", "required") else named

    async def ask() -> Answer:
        async with connected(nats_url, "generate") as bus:
            name = await served_model(bus, model)
            return await (collect_answer if as_json else stream_answer)(bus, name, body, Answer())

    answer = run(ask)
    if as_json:
        write_answer(msgspec.json.encode(answer.summary()).decode() + "\n")
    else:
        print_timing(answer, max_tokens)


def asked(argument: str) -> str:
    """The prompt: the argument, or stdin for `-` and where nothing was typed and something is piped in.

    :raises EmptyPrompt: if there is none. :raises InvalidParameter: if it is not text.
    """
    if argument != "-" and (argument or sys.stdin is None or sys.stdin.isatty()):
        prompt = argument
    else:
        try:
            prompt = sys.stdin.buffer.read().decode().removesuffix("\n") if sys.stdin else ""
        except UnicodeDecodeError as error:
            raise InvalidParameter("what is piped in is not UTF-8 text", param="prompt") from error
    if not prompt.strip():
        raise EmptyPrompt('nothing to ask: `penstock generate "a prompt"`, or pipe one into `penstock generate -`')
    return prompt


def conversation(system: str, prompt: str) -> list[dict[str, str]]:
    """The messages of a first turn."""
    start = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": prompt}]


def chat_body(messages: list[dict[str, str]], *, max_tokens: int, temperature: float, seed: int | None) -> dict[str, Any]:
    """An OpenAI chat request, less `model` and `stream`.

    :raises InvalidParameter: if a message is no valid Unicode: an argument with bytes that are no UTF-8.
    """
    for message in messages:
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            raise InvalidParameter("the text is not valid UTF-8", param="prompt") from error
    body: dict[str, Any] = {"messages": messages, "max_completion_tokens": max_tokens, "temperature": temperature}
    return body if seed is None else body | {"seed": seed}


def json_file(path: Path, param: str, kind: type) -> Any:
    """What a JSON file holds.

    :raises InvalidParameter: if it can't be read, is too large or no JSON of this `kind` (dict or list).
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidParameter(f"can't read {path}: {error.strerror}", param=param) from error
    if len(data) > MAX_FILE_BYTES:
        raise InvalidParameter(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB", param=param)
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidParameter(f"{path} is not JSON: {error}", param=param) from error
    if not isinstance(value, kind):
        raise InvalidParameter(f"{path} must hold a JSON {'object' if kind is dict else 'list'}", param=param)
    return value


async def stream_answer(bus: Bus, model: str, body: dict[str, Any], answer: Answer) -> Answer:
    """Stream one answer to stdout as it comes, and its reasoning to stderr; tool calls follow as one line of JSON each.

    `answer` is filled meanwhile, so that its beginning is there if this is cancelled.
    """
    reasons = False
    async with ChatStream(bus, model, body) as stream:
        answer.timing = stream.timing
        try:
            async for chunk in stream:
                answer.add(chunk)
                if chunk.reasoning:
                    reasons = True
                    err.print(chunk.reasoning, end="", markup=False, highlight=False, soft_wrap=True, style="dim")
                if chunk.text:
                    if reasons:
                        reasons = False
                        err.print("\n")
                    write_answer(chunk.text)
        except PenstockError:
            if answer.text:
                write_answer("\n")  # what is said of the error has a line of its own
            raise
    if answer.text or not answer.calls:
        write_answer("\n")
    for call in answer.tool_calls:
        write_answer(msgspec.json.encode(call).decode() + "\n")
    return answer


async def collect_answer(bus: Bus, model: str, body: dict[str, Any], answer: Answer) -> Answer:
    """The same without printing anything."""
    async with ChatStream(bus, model, body) as stream:
        answer.timing = stream.timing
        async for chunk in stream:
            answer.add(chunk)
    return answer


def print_timing(answer: Answer, max_tokens: int) -> None:
    """TTFT, tok/s and tokens to stderr, and whether the answer was cut off."""
    cut = f" · cut off at --max-tokens {max_tokens}" if answer.finish_reason == "length" else ""
    err.print(f"[dim]{answer.timing}{cut}[/]")
