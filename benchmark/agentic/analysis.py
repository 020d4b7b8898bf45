"""From the cells of a replay to the figures of its report: per arm, concurrency and repeat, and what the repeats decide.

A comparison is made of the off and on runs of one repeat, which ran one after the other: the logarithm of their ratio, averaged over
repeats, with Student's t interval. One request is not a sample of its own: requests of a run share its machine, so only repeats count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy import stats as distributions

from benchmark.agentic import records
from benchmark.agentic.aiperf_driver import FIXED
from benchmark.agentic.arms import OFF, ON
from benchmark.agentic.cells import Cell
from benchmark.agentic.records import Record
from sgl_lowlatency.bench import stats
from sgl_lowlatency.runtime.coverage import PREFILL

MIN_REPEATS = 3
BURST = 0.2  # of the mean gap
CONTEXT_BINS = 8
MAX_POINTS = 1500  # of the scatter, evenly taken
FASTER, SLOWER, UNDECIDED, NO_CLAIM = "faster", "slower", "not decidable", "no claim"
PERCENTILES = (50, 90, 99)
SERIES = {"itl": "gap between tokens", "tpot": "time an output token", "ttft": "time to first token", "e2e": "whole request"}
METRICS = {f"{name}_p{p}": f"{words}, p{p}, ms" for name, words in SERIES.items() for p in PERCENTILES} | {"seconds": "all work, s"}

Found = list[tuple[Cell, list[Record]]]


def figures(cell: Cell, found: list[Record]) -> dict[str, float]:
    """Of one run: milliseconds by METRICS; tok_s_user_pX = 1000 / itl_pX, so p90 is the slow tail; output_tok_s of all sessions together;
    cache_hit, share of input tokens found in the prefix cache; first_token_share, of the requests' time, until their first token, which the
    plugin does not change; under_way, requests at once on average; burst_share, gaps of less than a fifth of the mean: tokens that arrived
    together, of which a percentile of gaps tells nothing; accept_length, tokens a verify step. Failed requests are left out."""
    good = [record for record in found if record.error is None]
    series = {
        "itl": [gap for record in good for gap in record.gaps_ms],
        "tpot": [tpot for record in good if (tpot := record.tpot_ms) is not None],
        "ttft": [record.ttft_ms for record in good],
        "e2e": [record.e2e_ms for record in good],
    }
    value = {f"{name}_p{p}": round(stats.quantile(values, p / 100), 4) for name, values in series.items() if values for p in PERCENTILES}
    value |= {f"tok_s_user_p{p}": round(1e3 / value[f"itl_p{p}"], 3) for p in PERCENTILES if value.get(f"itl_p{p}")}
    value |= {"seconds": cell.seconds, "output_tok_s": round(sum(r.output_tokens for r in good) / cell.seconds, 3)}
    if gaps := series["itl"]:
        value["burst_share"] = round(sum(gap < BURST * sum(gaps) / len(gaps) for gap in gaps) / len(gaps), 4)
    spent_ms = sum(record.e2e_ms for record in good)
    if spent_ms:
        value["first_token_share"] = round(sum(record.ttft_ms for record in good) / spent_ms, 4)
        value["under_way"] = round(spent_ms / 1e3 / cell.seconds, 3)
    known = [record for record in good if record.cached_tokens is not None]
    if known:
        value["cache_hit"] = round(sum(r.cached_tokens for r in known) / sum(r.input_tokens for r in known), 4)
    steps = sum(record.verify_steps or 0 for record in good)
    if steps:
        value["accept_length"] = round(sum(record.output_tokens for record in good) / steps, 3)
    return value


def decide(off: Sequence[float], on: Sequence[float]) -> dict:
    """{ratio, ci95, verdict, repeats} of paired runs of a time: ratio above 1 is `on` faster. Nothing is decided below MIN_REPEATS pairs."""
    logs = [math.log(a / b) for a, b in zip(off, on, strict=True)]
    count, mean = len(logs), sum(logs) / len(logs)
    found = {"ratio": _rounded(math.exp(mean)), "ci95": None, "verdict": UNDECIDED, "repeats": count}
    if count < MIN_REPEATS:
        return found | {"why": f"{count} of at least {MIN_REPEATS} repeats"}
    error = math.sqrt(sum((x - mean) ** 2 for x in logs) / (count - 1) / count)
    half = float(distributions.t.ppf(0.975, count - 1)) * error
    low, high = math.exp(mean - half), math.exp(mean + half)
    found["ci95"] = [_rounded(low), _rounded(high)]
    if low > 1 or high < 1:
        return found | {"verdict": FASTER if low > 1 else SLOWER}
    return found | {"why": "the interval holds 1"}


def _rounded(ratio: float) -> float:
    """Five figures: a ratio never becomes 0."""
    return float(f"{ratio:.5g}")


def concurrency(found: Found, mode: str) -> dict:
    """Everything the report says of one concurrency. found: its cells, pairs complete."""
    by_arm = {arm: sorted(((c, r) for c, r in found if c.arm == arm), key=lambda item: item[0].repeat) for arm in (OFF, ON)}
    runs = {arm: [figures(cell, rows) for cell, rows in items] for arm, items in by_arm.items()}
    problems = []
    for (cell, left), (_, right) in zip(by_arm[OFF], by_arm[ON], strict=True):
        problems += [f"repeat {cell.repeat}: {line}" for rows in (left, right) for line in records.failures(rows)]
        if mode == FIXED:
            problems += [f"repeat {cell.repeat}: {line}" for line in records.unequal(left, right)]
    work = [records.work(rows) for _, rows in by_arm[OFF]]
    if mode == FIXED and len({(w["prompts_sha"], w["lengths_sha"]) for w in work}) > 1:
        problems.append("the repeats did not do the same work")
    compared = {}
    for metric in METRICS if mode == FIXED else [name for name in METRICS if name != "seconds"]:  # a scenario lasts as long as it is told to
        pair = [[run.get(metric) for run in runs[arm]] for arm in (OFF, ON)]
        if all(value is not None and value > 0 for values in pair for value in values):
            compared[metric] = decide(*pair)
            if mode != FIXED:
                compared[metric] |= {"verdict": NO_CLAIM, "why": "scenario timing: the arms met other requests"}
            elif problems:
                compared[metric] |= {"verdict": NO_CLAIM, "why": "unequal work"}
    return {
        "runs": runs, "compared": compared, "problems": problems, "work": work[0], "coverage": coverage(by_arm[ON]), "answers": answers(by_arm),
        "itl_quantiles": {arm: _quantiles(items) for arm, items in by_arm.items()},
        "itl_by_context": {arm: by_context(items) for arm, items in by_arm.items()},
        "turns": turns(by_arm) if mode == FIXED else [],
    }


def coverage(on: Found) -> dict:
    """What the plugin ran: rows its steps had (padded ones too) over the decode tokens that were needed, steps by rows, and SGLang's own
    eager forwards by reason, summed over repeats."""
    steps: dict[str, float] = {}
    fallbacks: dict[str, float] = {}
    for cell, _ in on:
        for source, target in ((cell.steps, steps), (cell.fallbacks, fallbacks)):
            for key, count in source.items():
                target[key] = target.get(key, 0) + count
    needed = sum(max(record.output_tokens - 1, 0) for _, rows in on for record in rows if record.error is None)
    return {"rows": sum(cell.rows for cell, _ in on), "decode_tokens": needed, "steps": steps, "fallbacks": fallbacks}


def lost_steps(found: dict) -> list[str]:
    """Decode steps that the plugin should have run and did not, of `coverage`'s figures. Prefill is SGLang's in any case."""
    lines = [f"{count:.0f} steps ran SGLang's own forward: {why}" for why, count in found["fallbacks"].items() if why != PREFILL and count]
    if found["rows"] < found["decode_tokens"]:
        lines.append(f"the plugin's steps had {found['rows']:.0f} rows, {found['decode_tokens']} decode tokens were made")
    return lines


def answers(by_arm: dict[str, Found]) -> dict:
    """Shares of greedy answers that are equal from end to end: off against on, and of one arm in two repeats, which tells how much of the
    difference is the standard path's own (a batch of other rows rounds otherwise)."""
    found = {"off_on": _mean(records.same_answers(a, b) for (_, a), (_, b) in zip(by_arm[OFF], by_arm[ON], strict=True))}
    for arm, items in by_arm.items():
        found[f"{arm}_{arm}"] = _mean(records.same_answers(items[0][1], rows) for _, rows in items[1:])
    return found


def by_context(items: Found) -> list[dict]:
    """{context, p10, p50, p90, requests}: milliseconds an output token of requests in bins of equally many, by their middle token's context."""
    points = sorted((r.input_tokens + r.output_tokens / 2, r.tpot_ms) for _, rows in items for r in rows if r.error is None and r.tpot_ms is not None)
    size = max(1, math.ceil(len(points) / CONTEXT_BINS))
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        times = [time for _, time in part]
        quantiles = {f"p{p}": round(stats.quantile(times, p / 100), 4) for p in (10, 50, 90)}
        found.append({"context": round(stats.median([context for context, _ in part])), **quantiles, "requests": len(part)})
    return found


def turns(by_arm: dict[str, Found]) -> list[list[float]]:
    """[off ms, on ms, context] an output token of every request, each the median over repeats; at most MAX_POINTS, evenly taken."""
    times: dict[str, dict] = {OFF: {}, ON: {}}
    context = {}
    for arm, items in by_arm.items():
        for record in (r for _, rows in items for r in rows if r.error is None and r.tpot_ms is not None):
            times[arm].setdefault(record.key, []).append(record.tpot_ms)
            context[record.key] = record.input_tokens + record.output_tokens / 2
    keys = sorted(times[OFF].keys() & times[ON].keys())
    keys = keys[:: max(1, math.ceil(len(keys) / MAX_POINTS))]
    return [[round(stats.median(times[OFF][key]), 4), round(stats.median(times[ON][key]), 4), round(context[key])] for key in keys]


def _quantiles(items: Found) -> list[float]:
    """201 quantiles, 0 to 1, of the gaps of all repeats."""
    values = sorted(gap for _, rows in items for record in rows if record.error is None for gap in record.gaps_ms)
    return [round(values[round(at * (len(values) - 1) / 200)], 4) for at in range(201)] if values else []


def _mean(values) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if known else None
