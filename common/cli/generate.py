"""`penstock generate`: one prompt over NATS, streamed to stdout; then TTFT and tok/s on stderr."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from common.cli.client import ChatStream, Timing, connected, served_model
from common.cli.console import DEFAULT_NATS_URL, ModelName, NatsUrl, err, run, write_answer
from common.protocol.errors import EmptyPrompt, InvalidParameter
from common.runtime.bus import Bus

Prompt = Annotated[str, typer.Argument(help="What to ask; - or nothing: what is piped in.")]
System = Annotated[str, typer.Option("--system", help="System prompt. Default: the model's own.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="0 always takes the likeliest token.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same answer.")]


def command(
    prompt: Prompt = "",
    model: ModelName = "",
    system: System = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    nats_url: NatsUrl = DEFAULT_NATS_URL,
) -> None:
    """Publish one prompt on the NATS subject, stream the answer, print TTFT and tok/s."""
    prompt = asked(prompt)

    async def ask() -> Timing:
        async with connected(nats_url, "generate") as bus:
            name = await served_model(bus, model)
            body = chat_body(conversation(system, prompt), max_tokens=max_tokens, temperature=temperature, seed=seed)
            _, timing = await stream_answer(bus, name, body)
            return timing

    timing = run(ask)
    err.print(f"[dim]{timing}[/]")


def asked(argument: str) -> str:
    """The prompt: the argument, or stdin for `-` and where nothing was typed and something is piped in.

    :raises EmptyPrompt: if there is none. :raises InvalidParameter: if stdin is not text.
    """
    if argument != "-" and (argument or sys.stdin is None or sys.stdin.isatty()):
        prompt = argument
    else:
        try:
            prompt = sys.stdin.buffer.read().decode().removesuffix("\n")
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
    """An OpenAI chat request, less `model` and `stream`."""
    body: dict[str, Any] = {"messages": messages, "max_completion_tokens": max_tokens, "temperature": temperature}
    return body if seed is None else body | {"seed": seed}


async def stream_answer(bus: Bus, model: str, body: dict[str, Any]) -> tuple[str, Timing]:
    """Stream one answer to stdout as it comes, and its reasoning to stderr: returns its text and its timing."""
    parts: list[str] = []
    reasons = False
    async with ChatStream(bus, model, body) as stream:
        async for chunk in stream:
            if chunk.reasoning:
                reasons = True
                err.print(chunk.reasoning, end="", markup=False, highlight=False, soft_wrap=True, style="dim")
            if chunk.text:
                if reasons:
                    reasons = False
                    err.print("\n")
                parts.append(chunk.text)
                write_answer(chunk.text)
    write_answer("\n")
    return "".join(parts), stream.timing
