"""What speculation gave during a run: decode workers' metrics before it and after, as a table, JSON and a plot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from common.protocol.errors import BusError, ConfigError
from common.protocol.messages import Presence
from common.runtime.metrics import MODEL_LABEL

if TYPE_CHECKING:
    import httpx

_DRAFTS = "penstock_speculation_drafts_total"
_VERIFIED = "penstock_speculation_draft_tokens_total"
_ACCEPTED = "penstock_speculation_accepted_tokens_total"
_VERIFIED_AT = "penstock_speculation_verified_tokens_per_pos_total"
_ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_TIMEOUT_S = 10.0


class Drafter(msgspec.Struct, kw_only=True):
    """What was verified of one kind of drafter. verified_at, accepted_at: of tokens, by their place in a proposal."""

    drafts: float = 0.0
    verified: float = 0.0
    accepted: float = 0.0
    verified_at: list[float] = []
    accepted_at: list[float] = []

    @property
    def acceptance(self) -> list[float]:
        """By place: how many of the tokens verified there were accepted, 0 to 1."""
        return [accepted / verified for accepted, verified in zip(self.accepted_at, self.verified_at, strict=True) if verified]

    @property
    def mean_accepted(self) -> float:
        """Tokens accepted of a proposal."""
        return self.accepted / self.drafts if self.drafts else 0.0


Counts = dict[tuple[str, str, str, int], float]
"""By metric, model, drafter and place (-1: of all)."""


def addresses(workers: Iterable[Presence]) -> list[str]:
    """Return where the metrics of decode workers are. :raises ConfigError: if none of them says so."""
    decode = [worker for worker in workers if worker.worker.role == "decode"]
    found = [_address(worker.http_host, worker.http_port) for worker in decode if worker.http_port and worker.http_host]
    if not found:
        raise ConfigError("no decode worker on this bus serves metrics: leave out --speculation", param="speculation")
    return found


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"


async def addresses_at(http: httpx.AsyncClient) -> list[str]:
    """As `addresses`, by what a gateway tells Prometheus. :raises ConfigError: if it tells nothing."""
    import httpx

    try:
        groups: list[dict[str, Any]] = (await http.get("/sd")).raise_for_status().json()
        decode = [group for group in groups if group["labels"]["role"] == "decode"]
        found = [f"http://{target}/metrics" for group in decode for target in group["targets"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{http.base_url}/sd does not say where metrics are: is it Penstock's gateway?") from error
    if not found:
        raise ConfigError(f"{http.base_url} knows no decode worker that serves metrics", param="speculation")
    return found


async def read(urls: Iterable[str]) -> Counts:
    """Return what decode workers have counted so far. :raises BusError: if one does not answer."""
    import httpx

    counts: Counts = {}
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as http:
        for url in urls:
            try:
                text = (await http.get(url)).raise_for_status().text
            except httpx.HTTPError as error:
                raise BusError(f"the metrics at {url} can't be read: {type(error).__name__}") from error
            add(counts, text)
    return counts


def add(counts: Counts, text: str) -> None:
    """Add what one worker's /metrics say."""
    names = (_DRAFTS, _VERIFIED, _ACCEPTED, _VERIFIED_AT, _ACCEPTED_AT)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                labels = sample.labels
                key = sample.name, labels[MODEL_LABEL], labels["drafter"], int(labels.get("position", -1))
                counts[key] = counts.get(key, 0.0) + sample.value


def between(before: Counts, after: Counts, model: str) -> dict[str, Drafter]:
    """Return what came in between for one model, by drafter. A worker that was started anew counts from zero."""
    grown = {
        (name, drafter, place): max(0.0, value - before.get((name, of, drafter, place), 0.0))
        for (name, of, drafter, place), value in after.items()
        if of == model
    }
    found: dict[str, Drafter] = {}
    for name in {drafter: None for _, drafter, _ in grown}:
        places = 1 + max((place for metric, drafter, place in grown if drafter == name), default=-1)
        found[name] = Drafter(
            drafts=grown.get((_DRAFTS, name, -1), 0.0),
            verified=grown.get((_VERIFIED, name, -1), 0.0),
            accepted=grown.get((_ACCEPTED, name, -1), 0.0),
            verified_at=[grown.get((_VERIFIED_AT, name, place), 0.0) for place in range(places)],
            accepted_at=[grown.get((_ACCEPTED_AT, name, place), 0.0) for place in range(places)],
        )
    return found


def speculation_table(drafters: dict[str, Drafter], generated_tokens: int) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("drafter", "proposals", "tokens verified", "accepted", "of a proposal", "by place"):
        shown.add_column(title, justify="left" if title in ("drafter", "by place") else "right")
    for name, one in drafters.items():
        shown.add_row(
            name,
            f"{one.drafts:,.0f}",
            f"{one.verified:,.0f}",
            f"{one.accepted / one.verified:.0%}" if one.verified else "-",
            f"{one.mean_accepted:.2f}" if one.drafts else "-",
            " ".join(f"{share:.0%}" for share in one.acceptance) or "-",
        )
    saved = sum(one.accepted for one in drafters.values())
    if generated_tokens:
        shown.caption = (
            f"{saved:,.0f} of {generated_tokens:,} tokens took no step of their own ({saved / generated_tokens:.0%})"
        )
    return shown


def speculation_summary(drafters: dict[str, Drafter]) -> dict[str, Any]:
    """For `--json`. Shares of nothing are null."""
    return {
        name: {
            "proposals": round(one.drafts),
            "verified_tokens": round(one.verified),
            "accepted_tokens": round(one.accepted),
            "acceptance": round(one.accepted / one.verified, 4) if one.verified else None,
            "accepted_of_a_proposal": round(one.mean_accepted, 3) if one.drafts else None,
            "acceptance_by_position": [round(share, 4) for share in one.acceptance],
        }
        for name, one in drafters.items()
    }


def check_plot() -> None:
    """:raises ConfigError: if there is nothing to draw with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'penstock[bench]'", param="plot") from error


def draw(drafters: dict[str, Drafter], path: Path) -> None:
    """Acceptance by place, a line for each drafter, as an image at `path`. :raises ConfigError: if it can't be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    shown, axis = pyplot.subplots(figsize=(6.0, 4.2), layout="constrained")
    for name, one in drafters.items():
        if one.acceptance:
            label = f"{name}: {one.mean_accepted:.2f} of a proposal"
            axis.plot(range(1, 1 + len(one.acceptance)), one.acceptance, marker="o", label=label)
    axis.set(xlabel="place in a proposal", ylabel="accepted, of those verified there", ylim=(0, 1.02))
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    if axis.get_legend_handles_labels()[0]:
        axis.legend()
    try:
        shown.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be written: {error}", param="plot") from error
    finally:
        pyplot.close(shown)
