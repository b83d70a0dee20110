"""`penstock chat`: a conversation in the terminal, each turn one request over NATS."""

from __future__ import annotations

import sys

import anyio.to_thread

from common.cli.client import connected, served_model
from common.cli.console import DEFAULT_NATS_URL, ModelName, NatsUrl, err, run
from common.cli.generate import MaxTokens, Seed, System, Temperature, chat_body, stream_answer
from common.protocol.errors import RequestError


def command(
    model: ModelName = "",
    system: System = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    seed: Seed = None,
    nats_url: NatsUrl = DEFAULT_NATS_URL,
) -> None:
    """Talk to the model. An empty line or Ctrl-D ends the conversation."""

    async def talk() -> None:
        async with connected(nats_url, "chat") as bus:
            name = await served_model(bus, model)
            err.print(f"[bold]{name}[/] [dim]· an empty line or Ctrl-D ends the conversation[/]")
            history = [{"role": "system", "content": system}] if system else []
            while prompt := await anyio.to_thread.run_sync(_ask, abandon_on_cancel=True):
                turn = [*history, {"role": "user", "content": prompt}]
                body = chat_body(turn, max_tokens=max_tokens, temperature=temperature, seed=seed)
                try:
                    answer, timing = await stream_answer(bus, name, body)
                except RequestError as error:  # for example: the conversation grew over the context
                    err.print(f"{error.code}: {error}", markup=False, style="red")
                    continue
                history = [*turn, {"role": "assistant", "content": answer}]
                err.print(f"[dim]{timing}[/]")

    run(talk)


def _ask() -> str:
    """One line from the terminal, or of what is piped in; empty at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
