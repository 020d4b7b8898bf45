"""The report of a replay: OUT/report.json (a results file), report.md, and report.html, one page that needs nothing beside it.

    python3 -m benchmark.report OUT

Exit status 0 if every concurrency's arms did the same work. Needs scipy, which SGLang brings, and for the page matplotlib and jinja2
(`pip install 'sgl-lowlatency[plot]'`); where these are missing the other two files are written, and the page can be made elsewhere from OUT.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from benchmark.agentic import analysis, cells, console, markdown
from benchmark.agentic.arms import OFF, ON
from sgl_lowlatency.bench import stats
from sgl_lowlatency.bench.results import SCHEMA

JSON, MARKDOWN, HTML = "report.json", "report.md", "report.html"


class ReportRefused(ValueError):
    """Runs that cannot stand in one report; the message says why."""


def build(out: Path) -> dict:
    """The content of report.json. Raises ReportRefused without a finished pair, for runs of different GPUs, or an unreadable folder."""
    try:
        plan, servers = (json.loads((out / name).read_text()) for name in ("plan.json", "servers.json"))
        found = cells.every(out)
    except (OSError, ValueError) as error:
        raise ReportRefused(f"{out} is not a folder of benchmark.replay: {error}") from None
    if not found:
        raise ReportRefused(f"{out} has no pair of finished runs yet")
    machines = {key: sorted({str(cell.machine.get(key)) for cell, _ in found}) for key in ("gpu", "driver")}
    wrong = [f"results of different {key}s: {', '.join(values)}" for key, values in machines.items() if len(values) > 1]
    if wrong:
        raise ReportRefused("\n".join(wrong))
    last = found[-1][0]
    last_word = plan["mode"] if plan["what"] == "replay" else plan["shape"].partition(",")[0]
    content = {"schema": SCHEMA, "what": plan["what"], "name": f"{plan['what']}-{plan['model']}-{last_word}", "date": found[0][0].date}
    content |= {key: plan[key] for key in ("commit", "dirty", "versions", "weights")} | last.machine
    content |= {"command": last.command, "notes": "", "plan": plan, "servers": servers, "rows": [], "concurrencies": {}}
    content["order"] = [f"r{c.repeat} c{c.concurrency} " + ("off, on" if c.first == (c.arm == OFF) else "on, off") for c, _ in found if c.arm == OFF]
    for number in sorted({cell.concurrency for cell, _ in found}):
        one = analysis.concurrency([item for item in found if item[0].concurrency == number], plan["mode"])
        content["concurrencies"][str(number)] = one
        content["rows"].append(_row(plan, servers, number, one))
    return content


def _row(plan: dict, servers: dict, number: int, one: dict) -> dict:
    """A results row: the median gap between tokens of every repeat."""
    off, on = ([run["itl_p50"] for run in one["runs"][arm] if "itl_p50" in run] for arm in (OFF, ON))
    arguments = servers["arguments"]
    mode = "verify" if arguments.get("speculative_algorithm") else "decode"
    context = round(one["work"]["input_tokens"] / one["work"]["requests"])
    row = {"model": plan["model"], "dtype": arguments.get("quantization") or "bf16", "tp": arguments.get("tp_size") or 1, "mode": mode}
    row |= {"batch": number, "rows": number, "context": context, "concurrency": number, "metric": "itl_p50", "off_ms": off, "on_ms": on}
    if off and on:
        row |= {"ratio": round(stats.ratio(off, on), 4), "ratio_ci95": [round(x, 4) for x in stats.ratio_ci95(off, on)]}
    return row


def write(out: Path) -> list[Path]:
    """Writes the files, the page where it can be drawn, and returns them. Raises ReportRefused."""
    content = build(out)
    texts = {JSON: json.dumps(content, indent=1) + "\n", MARKDOWN: markdown.render(content)}
    if drawable():
        from benchmark.agentic import page

        texts[HTML] = page.render(content)
    for name, text in texts.items():
        partial = out / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, out / name)
    return [out / name for name in texts]


def drawable() -> bool:
    """Whether what the page needs is installed."""
    return all(importlib.util.find_spec(name) for name in ("matplotlib", "jinja2"))


def table(out: Path) -> str:
    """The head of the written report as lines of a terminal, and where to make a page that could not be drawn here."""
    text = console.render(json.loads((out / JSON).read_text()))
    why = f"no {HTML}: matplotlib or jinja2 is not installed; python3 -m benchmark.report makes it from {out} anywhere"
    return text if drawable() else f"{text}\n{why}"


def problems(out: Path) -> list[str]:
    """What the written report says against its own runs."""
    content = json.loads((out / JSON).read_text())
    return [f"concurrency {number}: {line}" for number, one in content["concurrencies"].items() for line in one["problems"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    try:
        print(*write(args.out), table(args.out), sep="\n")
    except ReportRefused as error:
        print(f"report: refused: {error}", file=sys.stderr)
        return 2
    found = problems(args.out)
    print(*(f"- {line}" for line in found), sep="\n") if found else None
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
