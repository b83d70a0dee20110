"""What `penstock up` waits for until everything is ready, told as a bar on a terminal and as lines elsewhere."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence

import anyio
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from common.cli.client import connected, decode_presence
from common.cli.console import err
from common.cli.fleet import ProcessSpec
from common.cli.net import http_reply, reachable
from common.cli.up_config import UpConfig
from common.protocol import subjects
from common.protocol.messages import Presence, ServedModel
from common.runtime.bus import BusMessage

POLL_S = 0.1
CHANGED_EVERY_S = 1.0
REMIND_EVERY_S = 5.0
BUS_START_TIMEOUT_S = 30.0
_PERCENT = re.compile(r"\d+%")


class Starting:
    """How far the processes of `specs` have come, by their heartbeats."""

    def __init__(self, specs: Sequence[ProcessSpec], models: Sequence[ServedModel]) -> None:
        self.models = models
        self.obstacle = ""
        """Why the gateway is not ready, as it says."""
        self._expected = Counter(spec.role for spec in specs)
        self._heard: dict[str, Presence] = {}

    def heard(self, presence: Presence) -> None:
        self._heard[presence.worker.id] = presence

    @property
    def num_gateways_ready(self) -> int:
        return sum(beat.worker.role == "gateway" and beat.state == "ready" for beat in self._heard.values())

    @property
    def progress(self) -> float:
        """Processes that are ready, and the shares of the others' weights that are loaded."""
        return sum(1.0 if beat.state == "ready" else 0.9 * beat.loaded % 0.9 for beat in self._heard.values())

    @property
    def subjects(self) -> list[str]:
        """Where each name of each model is asked for chats."""
        names = [name for model in self.models for name in (model.name, *model.aliases)]
        return list(dict.fromkeys(subjects.chat(subjects.slug(name)) for name in names))

    def context_of(self, model: str) -> int:
        """Tokens that a sequence may have on every engine of `model` that was heard; 0 if none said it."""
        heard = [beat for beat in self._heard.values() if beat.model == model or len(self.models) == 1]
        return min((beat.max_context for beat in heard if beat.max_context), default=0)

    @property
    def models_to_come(self) -> list[str]:
        """The models, of several, that some gateway could not answer a request for when it said so last."""
        gateways = [beat for beat in self._heard.values() if beat.worker.role == "gateway"]
        late = {model.name for beat in gateways for model in beat.models if not model.ready}
        return [model.name for model in self.models if model.name in late] if len(self.models) > 1 else []

    @property
    def problems(self) -> list[str]:
        """What was asked for and does not work, though everything is ready: a KV store's disk."""
        tiers = [(beat.worker.id, tier) for beat in self._heard.values() for tier in beat.tiers if tier.problem]
        return [f"{worker} keeps no blocks on {tier.name}: {tier.problem}" for worker, tier in tiers]

    def waiting_for(self) -> str:
        """Who is not ready yet, in a line."""
        parts: list[str] = []
        for role, count in self._expected.items():
            beats = [beat for beat in self._heard.values() if beat.worker.role == role]
            silent = count - len(beats)
            late = [beat for beat in beats if beat.state == "starting"]
            parts += [f"{beat.worker.id} ({_stage(beat)})" for beat in sorted(late, key=lambda beat: beat.worker.id)]
            if silent > 0:
                parts.append(f"{role} to start" if count == 1 else f"{silent} of {count} {role} to start")
        of_models = f" of {', '.join(self.models_to_come)}" if self.models_to_come else ""
        why = f" ({self.obstacle})" if self.obstacle else ""
        return ", ".join(parts) or f"the gateway's canary: a request through every path{of_models}{why}"


def _stage(beat: Presence) -> str:
    return f"loading {100 * beat.loaded:.0f}%" if beat.loaded < 1 else "starting"


async def wait_ready(config: UpConfig, specs: Sequence[ProcessSpec], models: Sequence[ServedModel]) -> Starting:
    """Return once every gateway is ready and its canary went through, for each of the `models`."""
    starting = Starting(specs, models)
    names = ", ".join(model.name for model in models) if len(models) > 1 else config.model

    def heard(message: BusMessage) -> None:
        if presence := decode_presence(message):
            starting.heard(presence)

    tell = _Teller(err.print)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        if not err.is_terminal:
            err.print(f"starting {', '.join(spec.name for spec in specs)} with {names}", markup=False)
        task = bar.add_task(f"loading {names}", total=len(specs))
        async with connected(config.nats_url, "up", login=config.bus_login, timeout_s=BUS_START_TIMEOUT_S) as bus:
            await bus.subscribe(subjects.any_presence(), heard)
            host = reachable(config.http_host)
            while True:
                status, said = await http_reply(config.http_port, "/ready", host=host)
                starting.obstacle = said.partition("; ")[2]
                if starting.num_gateways_ready >= config.gateway and not starting.models_to_come and status == 200:
                    break
                bar.update(task, completed=min(starting.progress, len(specs)))
                await anyio.sleep(POLL_S)
                tell(starting.waiting_for(), time.monotonic())
    return starting


class _Teller:
    """Says what is waited for: on a terminal, which has a bar, as a reminder; elsewhere whenever it has changed, too."""

    def __init__(self, print_line: Callable[..., None]) -> None:
        self._print = print_line
        self._told = ""
        self._at = time.monotonic()

    def __call__(self, text: str, now: float) -> None:
        news = _PERCENT.sub("", text)
        changed = news != self._told and not err.is_terminal
        if now - self._at >= (CHANGED_EVERY_S if changed else REMIND_EVERY_S):
            self._print(f"waiting for {text}", markup=False)
            self._told, self._at = news, now
