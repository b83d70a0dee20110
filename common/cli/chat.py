"""`penstock chat`: a conversation in the terminal, each turn one request over NATS.

The main thread waits for the user and for signals, an event loop in a second thread speaks with the bus: so a line is edited
with readline, the connection is kept alive meanwhile, and Ctrl-C comes to where it is meant for. While an answer streams it
cancels the request; what came of the answer is kept, and the conversation goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import anyio
import msgspec
import typer
from anyio.from_thread import BlockingPortal, start_blocking_portal

from common.cli.chunks import Answer
from common.cli.client import LISTEN_S, check_served, connected, gateway_models, served_model, watch_presence
from common.cli.console import DEFAULT_NATS_URL, NatsUrl, err, first_error, write_answer
from common.cli.conversation import Conversation
from common.cli.generate import MaxTokens, Seed, System, Temperature, chat_body, print_timing, stream_answer
from common.cli.model_names import ModelName
from common.cli.prompt_line import PromptLine, paths
from common.protocol.errors import InvalidParameter, PenstockError, UnknownModel
from common.runtime.bus import Bus

STOP_S = 5.0
"""Longest wait for a cancelled request to end."""
HOW_TO_LEAVE = "Ctrl-D or /bye ends the conversation"
HELP = """\
/system [TEXT]  show the system prompt, or change it; - removes it
/model [NAME]   list the models that are served, or go on with another
/file PATH      put a text file (at most 256 KiB) into the next message
/clear, /new    forget the conversation, but not the system prompt
/save PATH      write the conversation to a new file, as JSON
/help, /?       this list
/bye            end the conversation; so does Ctrl-D
Ctrl-C ends an answer that is being written. A message that begins with / is typed with a space before it."""


def command(
    model: ModelName = "",
    system: System = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    seed: Seed = None,
    nats_url: NatsUrl = DEFAULT_NATS_URL,
) -> None:
    """Talk to the model. Ctrl-C ends an answer, Ctrl-D the conversation; /help lists commands for models, files and more."""
    try:
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(connected(nats_url, "chat")) as bus:
            name = portal.call(served_model, bus, model)
            if model:
                portal.call(check_served, bus, name)
            sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
            Chat(portal, bus, name, Conversation(system), sampling).talk()
    except BaseExceptionGroup as group:
        raise first_error(group) from None


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How every answer is drawn."""

    max_tokens: int
    temperature: float
    seed: int | None


class Turn:
    """One request in the portal's event loop, which another thread may stop."""

    def __init__(self, bus: Bus, model: str, body: dict[str, Any]) -> None:
        self.answer = Answer()
        self.stopped = False
        self._bus, self._model, self._body = bus, model, body
        self._scope: anyio.CancelScope | None = None

    async def run(self) -> None:
        """:raises PenstockError: if the request fails."""
        with anyio.CancelScope() as self._scope:
            if not self.stopped:
                await stream_answer(self._bus, self._model, self._body, self.answer)

    async def stop(self) -> None:
        """Cancel the request; `run` returns once the gateway was told."""
        self.stopped = True
        if self._scope is not None:
            self._scope.cancel()


class Chat:
    """The conversation at the prompt."""

    def __init__(self, portal: BlockingPortal, bus: Bus, model: str, conversation: Conversation, sampling: Sampling) -> None:
        self.portal = portal
        self.bus = bus
        self.model = model
        self.conversation = conversation
        self.sampling = sampling
        self.commands: dict[str, Callable[[str], None]] = {
            "/system": self.system,
            "/model": self.change_model,
            "/file": self.file,
            "/clear": self.clear,
            "/new": self.clear,
            "/save": self.save,
            "/help": self.help,
            "/?": self.help,
            "/bye": self.leave,
            "/exit": self.leave,
            "/quit": self.leave,
        }
        self.line = PromptLine(self.complete)

    def talk(self) -> None:
        """Until Ctrl-D, or the end of what is piped in; then a failed turn is a failed command.

        :raises typer.Exit: with status 1 after what is piped in, if a line of it failed; with 0 at /bye.
        """
        failed = False
        if self.line.interactive:
            err.print(f"{self.model} · /help lists commands, {HOW_TO_LEAVE}", markup=False, style="dim")
        while True:
            try:
                line = self.line.read()
                self.take(line)
            except EOFError:
                break
            except PenstockError as error:
                failed = True
                err.print(f"{error.code}: {error}", markup=False, style="red")
            except KeyboardInterrupt:
                if not self.line.interactive:
                    raise
                err.print(f"\n{HOW_TO_LEAVE}", style="dim")
        if self.line.interactive:
            err.print()
        elif failed:
            raise typer.Exit(1)

    def take(self, line: str) -> None:
        """Do what a line says. An empty one says nothing.

        :raises PenstockError: if it can't be done; the conversation is as it was.
        """
        word, _, rest = line.partition(" ")
        if line.startswith("/"):
            if word not in self.commands:
                raise InvalidParameter(f"no command {word}: /help lists them; a message is typed with a space before its /")
            self.commands[word](rest.strip())
        elif line.strip():
            self.ask(line.strip())

    def ask(self, prompt: str) -> None:
        """One turn. What came of an answer that was stopped is kept; a turn without any text of an answer is not."""
        sampling = msgspec.structs.asdict(self.sampling)
        turn = Turn(self.bus, self.model, chat_body(self.conversation.with_prompt(prompt), **sampling))
        running: Future[None] | None = None
        try:
            running = self.portal.start_task_soon(turn.run)
            running.result()
        except KeyboardInterrupt:
            if not self.line.interactive or running is None:
                raise
            self._stop(turn, running)
        answer = turn.answer
        if turn.stopped:
            write_answer("\n")
        if answer.text:
            self.conversation.answered(prompt, answer.text)
        if turn.stopped:
            err.print("stopped" if answer.text else "stopped before the answer began: not kept", style="dim")
        else:
            print_timing(answer, self.sampling.max_tokens)

    def _stop(self, turn: Turn, running: Future[None]) -> None:
        self.portal.start_task_soon(turn.stop)
        while True:
            try:
                return running.result(STOP_S)
            except KeyboardInterrupt:  # pressed more than once
                continue

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def system(self, text: str) -> None:
        if text:
            self.conversation.system = "" if text == "-" else text
        shown = self.conversation.system
        err.print(f"system prompt: {shown}" if shown else "no system prompt: the model's own, if it has one", markup=False)

    def change_model(self, name: str) -> None:
        """:raises UnknownModel: if it is not served."""
        names = self._served()
        if name and names and name not in names:
            raise UnknownModel(f"{name} is not served here: there are {', '.join(names)}", param="model")
        self.model = name or self.model
        for other in names if not name else ():
            err.print(f"{'*' if other == self.model else ' '} {other}", markup=False)
        if name or not names:
            err.print(f"talking to {self.model}", markup=False)

    def _served(self) -> list[str]:
        return gateway_models(self.portal.call(watch_presence, self.bus, LISTEN_S), aliases=True)

    def file(self, path: str) -> None:
        """:raises InvalidParameter: if there is no such text file."""
        if not path:
            for file in self.conversation.files:
                err.print(f"{file.name} ({file.num_bytes:,} bytes)", markup=False)
            if not self.conversation.files:
                raise InvalidParameter("/file needs a path", param="file")
            return
        file = self.conversation.attach(typed_path(path))
        err.print(f"{file.name} ({file.num_bytes:,} bytes) goes with your next message", markup=False)

    def clear(self, rest: str) -> None:
        self.conversation.clear()
        err.print("forgotten")

    def save(self, path: str) -> None:
        """:raises InvalidParameter: if it can't be written, or there is such a file."""
        if not path:
            raise InvalidParameter("/save needs a path", param="file")
        self.conversation.save(typed_path(path))
        err.print(f"saved to {path}", markup=False)

    def help(self, rest: str) -> None:
        err.print(HELP, markup=False)

    def leave(self, rest: str) -> None:
        raise EOFError

    def complete(self, line: str) -> list[str]:
        """What a line may become at Tab: commands, paths of files, names of models."""
        word, space, rest = line.partition(" ")
        if word in ("/file", "/save") and space:
            return [f"{word} {path}" for path in paths(rest)]
        if word == "/model" and space:
            return [f"{word} {name}" for name in self._served() if name.startswith(rest)]
        return [name for name in self.commands if line.startswith("/") and name.startswith(line)]


def typed_path(text: str) -> Path:
    """A path as it is typed or dropped into a terminal: quotes around it are left out, ~ is the home folder."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:
        return path
