"""`docs/metrics.md` from the sources: `python -m tests.unit.metrics_page > docs/metrics.md`, which `make docs` does.

A metric is found where a name stands beside its help, in a call or in a table. Both are literals, but for what a file puts
together of its own constants, and for the two owners of a staging buffer.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PREFIX = "penstock_"
SECTIONS = {
    "Every process": ("common/runtime/metrics.py", "common/runtime/file_limit.py", "common/runtime/otlp.py"),
    "Gateways": ("services/gateway/",),
    "Prefill and decode workers": ("common/worker/",),
    "Decode workers": ("services/decode/",),
    "Draft workers": ("services/draft/",),
    "KV stores": ("services/kvstore/",),
    "Prefill and decode workers and KV stores": ("common/runtime/lease_metrics.py", "common/transfer/"),
}
"""Whose metrics are made in which files."""
OWNERS = {"common/transfer/staging.py": ("kv", "kvstore")}
"""What `owner` is in a name: of a prefill worker's buffer, and of a KV store's."""
COUNTERS = {"counter", "CounterMetricFamily", "of_engine", "_by_position"}
OTHERS = {"gauge", "histogram", "GaugeMetricFamily", "FastHistogram", "read"}
"""What is called with a metric's name and help."""
MADE = re.compile(r"\b(metrics\.(counter|gauge|histogram)|(Counter|Gauge|Histogram)MetricFamily)\b|registry=self.registry")
GAUGES = "_GAUGES"
"""A table of gauges; other tables are of counters."""
HEAD = """# Metrics

This page is generated from the sources by `make docs`; edit the help of a metric there, not this page.

Every process serves its metrics at `/metrics` on its HTTP port ([operations.md](operations.md)), with their labels, and with
`python_*` and `process_*` of Prometheus's client. A name that begins with `vllm:` means what it means in vLLM. A histogram has
`_bucket`, `_sum` and `_count` behind its name. Which of them tell of trouble, and what to do then:
[operations.md](operations.md#kv-transfers-hits-recomputation-leases), and for speculation [http.md](http.md#what-is-measured).
"""


@functools.cache
def metrics() -> dict[str, dict[str, str]]:
    """Return for each section the help of each metric, by its full name."""
    found: dict[str, dict[str, str]] = {heading: {} for heading in SECTIONS}
    for heading, places in SECTIONS.items():
        for place in places:
            for file in sorted(sources()):
                if file.is_relative_to(ROOT / place):
                    found[heading] |= dict(_of(file))
    return found


@functools.cache
def sources() -> frozenset[Path]:
    """Return the files that make metrics, wherever they are."""
    return frozenset(
        file for top in ("common", "services") for file in (ROOT / top).rglob("*.py") if MADE.search(file.read_text())
    )


def page() -> str:
    """Return the whole page."""
    lines = [HEAD.rstrip()]
    for heading, named in metrics().items():
        lines += ["", f"## {heading}", "", "| metric | |", "|---|---|"]
        lines += [f"| `{name}` | {text}. |" for name, text in sorted(named.items())]
    return "\n".join(lines) + "\n"


def _of(file: Path) -> Iterator[tuple[str, str]]:
    tree = ast.parse(file.read_text())
    constants = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    gauges = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == GAUGES and node.value
        for line in ast.walk(node.value)
    }
    for owner in OWNERS.get(str(file.relative_to(ROOT)), ("",)):
        for node in ast.walk(tree):
            kind, parts = _parts(node)
            name, text = (_text(part, constants | {"owner": owner}) for part in parts) if len(parts) == 2 else ("", "")
            if re.fullmatch(r"[a-z]\w+|vllm:\w+", name) and " " in text and text[0].isupper():
                yield _full(name, is_counter=kind in COUNTERS or (kind == "" and node not in gauges)), text


def _parts(node: ast.AST) -> tuple[str, list[ast.expr]]:
    """Return what is called, and its first two arguments; or the first two entries of what may be a line of a table."""
    if isinstance(node, ast.Tuple):
        return "", node.elts[:2]
    if not isinstance(node, ast.Call):
        return "", []
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return called, node.args[:2] if called in COUNTERS | OTHERS else []


def _text(node: ast.expr, constants: dict[str, str]) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return constants.get(name, "")
        case ast.JoinedStr(values=parts):
            return "".join(_text(part.value if isinstance(part, ast.FormattedValue) else part, constants) for part in parts)
        case _:
            return ""


def _full(name: str, *, is_counter: bool) -> str:
    """The name as it stands in `/metrics`."""
    name = name if ":" in name or name.startswith(PREFIX) else PREFIX + name
    return f"{name.removesuffix('_total')}_total" if is_counter else name


if __name__ == "__main__":
    sys.stdout.write(page())
