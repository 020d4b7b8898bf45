"""The report's plots as SVG text, drawn by matplotlib without a display. Sized for a phone's width; a page scales them up."""

from __future__ import annotations

import io
import re

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot, ticker  # noqa: E402

from benchmark.agentic.arms import OFF, ON  # noqa: E402
from sgl_lowlatency.bench import stats  # noqa: E402
from sgl_lowlatency.runtime.coverage import PREFILL  # noqa: E402

COLOURS = {OFF: "#8a6d3b", ON: "#1f5fbf"}
LABELS = {OFF: "standard path", ON: "plugin"}
GREYS = ("#b6c2cf", "#d9822b", "#a23b72", "#5c7080", "#c2a83e", "#7157d9")
TAIL = 3.0
SIZE = (5.0, 3.7)  # inches; text of 11 points stays readable at 340 pixels
STYLE = {
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e7eb", "axes.axisbelow": True,
    "svg.fonttype": "none", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"],
}


def every(content: dict) -> list[tuple[str, str]]:
    """(title, SVG) of all plots; one that has no data is left out."""
    many = content["concurrencies"]
    found = [("Tokens a second a user, over concurrency", users(many)), ("Where steps ran, by reason", coverage(many))]
    for number, one in many.items():
        at = f"{number} session{'s' if number != '1' else ''} at once"
        if all(one["itl_quantiles"].values()):
            found.append((f"Gaps between tokens, {at}", cdf(one["itl_quantiles"])))
        if all(one["itl_by_context"].values()):
            found.append((f"Time a token over context, {at}", by_context(one["itl_by_context"])))
        if one["turns"]:
            found.append((f"Every request, off against on, {at}", scatter(one["turns"])))
    return found


def users(many: dict) -> str:
    """Median over repeats of tok/s/user at p50 and p90; bars reach from the slowest repeat to the fastest."""
    with _figure("users") as (figure, axes):
        for arm in (OFF, ON):
            for percentile, style in (("p50", "-"), ("p90", "--")):
                name = f"tok_s_user_{percentile}"
                runs = {int(number): [run[name] for run in one["runs"][arm] if name in run] for number, one in many.items()}
                runs = {number: values for number, values in runs.items() if values}
                middle = [stats.median(values) for values in runs.values()]
                spread = [[m - min(v) for m, v in zip(middle, runs.values())], [max(v) - m for m, v in zip(middle, runs.values())]]
                axes.errorbar(list(runs), middle, yerr=spread, fmt="o" + style, color=COLOURS[arm], capsize=3, label=f"{LABELS[arm]}, {percentile}")
        axes.set_xticks([int(n) for n in many])
        axes.set(xlabel="sessions at once", ylabel="tok/s/user")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.3)  # the legend stands above the lines
        axes.legend(frameon=False, fontsize=10, loc="upper right", ncols=2)
        return _svg(figure, "users")


def cdf(quantiles: dict[str, list[float]]) -> str:
    """Share of gaps up to a time, all repeats together, up to TAIL times the slower arm's median: prefills of others make a few far longer."""
    with _figure("cdf") as (figure, axes):
        for arm in (OFF, ON):
            values = quantiles[arm]
            axes.plot(values, [100 * at / (len(values) - 1) for at in range(len(values))], color=COLOURS[arm], label=LABELS[arm])
        middle = max(values[len(values) // 2] for values in quantiles.values())
        end = max(min(TAIL * middle, max(values[-2] for values in quantiles.values()) * 1.05), 1e-3)
        beyond = max(sum(value > end for value in values) / len(values) for values in quantiles.values())
        axes.set(xlabel=f"gap between tokens, ms; {beyond:.0%} are longer", ylabel="% of gaps", xlim=(0, end), ylim=(0, 100))
        axes.legend(frameon=False, loc="lower right")
        return _svg(figure, "cdf")


def by_context(bins: dict[str, list[dict]]) -> str:
    """Median of requests in bins of context, p10 to p90 as a band."""
    with _figure("context") as (figure, axes):
        for arm in (OFF, ON):
            context = [one["context"] for one in bins[arm]]
            low, high = ([one[name] for one in bins[arm]] for name in ("p10", "p90"))
            axes.fill_between(context, low, high, color=COLOURS[arm], alpha=0.15, linewidth=0)
            axes.plot(context, [one["p50"] for one in bins[arm]], "o-", color=COLOURS[arm], label=LABELS[arm])
        axes.set(xlabel="tokens of context", ylabel="ms an output token")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
        return _svg(figure, "context")


def scatter(turns: list[list[float]]) -> str:
    """A point a request; below the line the plugin is faster."""
    with _figure("scatter") as (figure, axes):
        off, on, context = zip(*turns)
        high = max(*off, *on) * 1.05
        axes.plot([0, high], [0, high], color="#7b8794", linewidth=1)
        points = axes.scatter(off, on, c=context, s=22, cmap="viridis", alpha=0.8, linewidths=0)
        figure.colorbar(points, ax=axes, label="tokens of context")
        axes.set(xlabel="standard path, ms a token", ylabel="plugin, ms a token", xlim=(0, high), ylim=(0, high))
        return _svg(figure, "scatter")


def coverage(many: dict) -> str:
    """Steps of the plugin's server, share of those counted: its own, and SGLang's eager forwards by reason."""
    with _figure("coverage") as (figure, axes):
        reasons = {reason for one in many.values() for reason in one["coverage"]["fallbacks"]}
        reasons = sorted(reasons, key=lambda reason: (reason != PREFILL, reason))
        left = [0.0] * len(many)
        totals = [sum(one["coverage"]["steps"].values()) + sum(one["coverage"]["fallbacks"].values()) for one in many.values()]
        parts = [(LABELS[ON], COLOURS[ON], [sum(one["coverage"]["steps"].values()) for one in many.values()])]
        for index, reason in enumerate(reasons):
            parts.append((reason, GREYS[index % len(GREYS)], [one["coverage"]["fallbacks"].get(reason, 0) for one in many.values()]))
        for label, colour, counts in parts:
            shares = [100 * count / total if total else 0 for count, total in zip(counts, totals)]
            axes.barh(list(many), shares, left=left, color=colour, label=label)
            left = [a + b for a, b in zip(left, shares)]
        axes.set(xlabel="% of counted steps", ylabel="sessions at once", xlim=(0, 100))
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=2)
        return _svg(figure, "coverage")


class _figure:
    """A figure and its axes in our style, closed at the end of the block."""

    def __init__(self, name: str) -> None:
        self._context = matplotlib.rc_context(STYLE | {"svg.hashsalt": name})

    def __enter__(self):
        self._context.__enter__()
        self._figure, axes = pyplot.subplots(figsize=SIZE, layout="constrained")
        return self._figure, axes

    def __exit__(self, *problem) -> None:
        pyplot.close(self._figure)
        self._context.__exit__(*problem)


def _svg(figure, name: str) -> str:
    """The <svg> element alone; the same figure gives the same text, and ids of two figures in one page differ."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    element = text.getvalue()[text.getvalue().index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    return re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg role="img" aria-label="{name}" viewBox="\1" xmlns="http://www.w3.org/2000/svg" '
                  r'xmlns:xlink="http://www.w3.org/1999/xlink">', element, count=1)
