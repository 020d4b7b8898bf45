"""The report as one HTML page: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
from markupsafe import Markup

from benchmark.agentic import findings, plots
from benchmark.agentic.analysis import FASTER

TEMPLATE = Path(__file__).with_name("page.html")


def render(content: dict) -> str:
    """`content` is report.json's."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    drawn = [(title, Markup(unique_ids(svg, index))) for index, (title, svg) in enumerate(plots.every(content))]
    return environment.from_string(TEMPLATE.read_text()).render(
        content=content, plan=content["plan"], findings=findings, plots=drawn, headline=findings.headline(content), caveats=findings.caveats(content),
        losses=findings.losses(content), undecided=findings.undecided(content), gains=findings.comparisons(content, FASTER),
    )


def unique_ids(svg: str, index: int) -> str:
    """The element with every id, and every reference to one, marked with `index`: an id must be unique in a page."""
    svg = re.sub(r'\bid="([^"]+)"', rf'id="f{index}-\1"', svg)
    svg = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#f{index}-\2"', svg)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#f{index}-\1)", svg)
