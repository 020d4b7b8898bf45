"""The report's head as lines of a terminal."""

from __future__ import annotations

from benchmark.agentic import findings
from benchmark.agentic.aiperf_driver import FIXED
from benchmark.agentic.arms import OFF, ON


def render(content: dict) -> str:
    """`content` is report.json's. Two lines a concurrency: what is decided, and the work that it was decided on."""
    plan = content["plan"]
    lines = [f"{content['name']}: {findings.machine(content)}", f"driver {plan['driver']}, {plan['mode']}, {plan['shape']}"]
    lines += [f"{'':4}{'off p50':>9}{'on p50':>9}{'off p90':>9}{'on p90':>9}  tok/s/user; gap between tokens, p50"]
    for row in findings.headline(content):
        figures = "".join(f"{row[name]:>9}" for name in ("off_p50", "on_p50", "off_p90", "on_p90"))
        lines += [f"C {row['concurrency']:<2}{figures}  {row['words']}", f"    {_work(plan, content['concurrencies'][row['concurrency']])}"]
    return "\n".join(lines)


def _work(plan: dict, one: dict) -> str:
    work = one["work"]
    equal = ("no" if one["problems"] else "yes") if plan["mode"] == FIXED else "not asked for"
    parts = [f"equal work: {equal}, {len(one['runs'][OFF])} repeats of {work['requests']} requests, {work['output_tokens']} tokens out"]
    parts += [f"prompts {work['prompts_sha'][:12]}", f"first token {_both(one, 'ttft_p50')} ms, {_both(one, 'first_token_share')} of the time"]
    parts += [f"cached {_both(one, 'cache_hit')}", f"at once {_both(one, 'under_way')}"]
    return "; ".join(parts)


def _both(one: dict, metric: str) -> str:
    return f"{findings.median(one, OFF, metric)}/{findings.median(one, ON, metric)}"
