"""The report as Markdown."""

from __future__ import annotations

from benchmark.agentic import findings
from benchmark.agentic.aiperf_driver import FIXED
from benchmark.agentic.analysis import FASTER
from benchmark.agentic.arms import OFF, ON


def render(content: dict) -> str:
    """`content` is report.json's."""
    plan, arguments = content["plan"], content["servers"]["arguments"]
    lines = [f"# {content['name']}", ""]
    lines += [findings.LEAD, "", findings.machine(content), ""]
    lines += _bullets(findings.caveats(content))
    lines += ["", "| sessions at once | off, tok/s/user p50 | on | off, p90 | on | |", "|---|---|---|---|---|---|"]
    for row in findings.headline(content):
        lines.append(f"| {row['concurrency']} | {row['off_p50']} | {row['on_p50']} | {row['off_p90']} | {row['on_p90']} | {row['words']} |")
    for title, found in (
        ("Where the plugin loses or does not run", findings.losses(content)),
        ("Not decidable", findings.undecided(content)),
        ("Decided in its favour", findings.comparisons(content, FASTER)),
    ):
        lines += ["", f"## {title}", "", *(_bullets(found) or [findings.NOTHING])]
    for number, one in content["concurrencies"].items():
        lines += ["", f"## {number} session{'s' if number != '1' else ''} at once", ""]
        lines += ["| | off | on | |", "|---|---|---|---|"]
        lines += [f"| {row['name']} | {row[OFF]} | {row[ON]} | {row['words']} |" for row in findings.figures(one)]
        work, coverage = one["work"], one["coverage"]
        lines += ["", f"- Work: {work['requests']} requests, {work['input_tokens']:,} input and {work['output_tokens']:,} output tokens a run; "
                  f"prompts in order `{work['prompts_sha']}`, lengths `{work['lengths_sha']}`."]
        fair = "yes, both arms, every repeat" if plan["mode"] == FIXED else "not asked for"
        lines += [f"- Equal work: {'no' if one['problems'] else fair}."]
        lines += [f"  - {line}" for line in one["problems"][:20]]
        lines += [f"- Plugin: steps by rows {_pairs(coverage['steps'])}; SGLang's own eager forwards: {_pairs(coverage['fallbacks']) or 'none'}."]
        lines += [f"- Equal greedy answers: {findings.answers(one)}."]
    lines += ["", "## Provenance", ""]
    lines += _bullets([
        f"code {content['commit']}{' with changes' if content['dirty'] else ''}, {content['date']}", f"versions: {_pairs(content['versions'])}",
        f"clocks after the last run, MHz: {_pairs(content['clocks_mhz'])}",
        f"traces: {plan['sessions']} sessions, {plan['requests']} requests, SHA-256 `{plan['traces_sha256']}`",
        f"servers: `{' '.join(plan['server_arguments'])}`",
        f"resolved: {_pairs(arguments)}", f"driver: `{' '.join(content['command'])}`", f"order of runs: {'; '.join(content['order'])}",
    ])
    logged = content["servers"]["startup"] or ["the servers' logs are not ours"]
    return "\n".join([*lines, "", "What the plugin logged at its start:", "", "```", *logged, "```", ""])


def _pairs(values: dict) -> str:
    return ", ".join(f"{key} {value:.0f}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items())


def _bullets(lines: list[str]) -> list[str]:
    return [f"- {line}" for line in lines]
