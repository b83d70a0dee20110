"""The plot of `penstock bench --speculation`: acceptance by position, and which drafter gave how many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from common.cli.speculation_report import DecodeWorker
from common.protocol.errors import ConfigError


def check_plot(path: Path) -> None:
    """Check, before any load, that a plot can be drawn and saved.

    :raises ConfigError: there is no matplotlib, it has no such file type, or `path` can't be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'penstock[bench]'", param="plot") from error
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in kinds:
        said = f"ends in {path.suffix!r}" if path.suffix else "has no file type"
        raise ConfigError(f"--plot {path} {said}: take .png, .svg or .pdf", param="plot")
    try:
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def draw(workers: Sequence[DecodeWorker], path: Path) -> None:
    """Draw the figure as an image at `path`. :raises ConfigError: if it can't be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    names = list({name: None for worker in workers for name in worker.drafters})
    colors = {name: f"C{index}" for index, name in enumerate(names)}
    shown, (places, tokens) = pyplot.subplots(1, 2, figsize=(12.0, 4.2), layout="constrained")
    for worker, marker in zip(workers, cycle("osv^Dx"), strict=False):
        for name, one in worker.drafters.items():
            if shares := one.acceptance:
                label = f"{worker.worker}, {name}" if len(workers) > 1 else name
                places.plot(range(1, 1 + len(shares)), shares, marker=marker, color=colors[name], label=label)
    places.set(xlabel="position in a proposal", ylabel="accepted, of those verified there", ylim=(0, 1.02))
    places.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    bars = [worker.worker for worker in workers]
    below = [max(0.0, worker.generated - worker.accepted) for worker in workers]
    tokens.bar(bars, below, 0.5, label="a step of its own", color="lightgrey")
    for name in names:
        counts = [worker.drafters[name].accepted if name in worker.drafters else 0.0 for worker in workers]
        if any(counts):
            tokens.bar(bars, counts, 0.5, bottom=below, label=name, color=colors[name])
        below = [under + count for under, count in zip(below, counts, strict=True)]
    tokens.set(ylabel="generated tokens", xlim=(-0.6, max(1, len(bars)) - 0.4))
    for axis in (places, tokens):
        axis.grid(axis="y", alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    try:
        shown.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    finally:
        pyplot.close(shown)


def _unwritable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} can't be written: {getattr(error, 'strerror', None) or error}", param="plot")
