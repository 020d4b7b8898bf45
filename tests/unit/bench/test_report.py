"""Bars and picture of made-up times: lengths are to scale, and the floor stands where it is."""

import re
import xml.etree.ElementTree

import pytest

from sgl_lowlatency.bench import picture, report
from sgl_lowlatency.bench.decode_step import row_of
from sgl_lowlatency.bench.results import Results
from sgl_lowlatency.bench.shapes import PRESETS


@pytest.fixture
def content():
    results = Results(None, what="kernel-step", name="x", weights="made up", command=["x"], commit="abc")
    results.set(gpu="Card X", driver="1.2", bandwidth_gb_s={"read_gb_s": 4000})
    for rows, ms in ((1, 4.0), (8, 6.0)):
        row = row_of("qwen3-8b", PRESETS["qwen3-8b"], rows, 1024, [ms] * 3, [ms + 0.5] * 3, [ms + 0.625] * 3, 4000.0)
        results.add(**row, problems=["output is not finite"] if rows == 8 else [])
    return results.content


def test_bars_are_to_scale_and_full_up_to_the_floor(content):
    bars = re.findall(r"(█+)│(▒*) +\d", report.chart(content))
    rows = content["rows"]
    scale = report.BAR_COLUMNS / 6.5
    expected = [(f, ms) for row in rows for f, ms in ((row["floor_ms"], row["on_ms"][0]), (row["step_head_floor_ms"], row["step_head_ms"][0]))]
    assert [(len(full), len(full) + len(light)) for full, light in bars] == [(round(f * scale), round(ms * scale)) for f, ms in expected]


def test_a_terminal_without_blocks_gets_ascii(content):
    text = report.chart(content, "ascii")
    assert text.isascii() and re.search(r"#+\|-+ +4\.0000 ms", text)
    assert report.chart(content, None).isascii()


def test_the_table_names_gpu_bandwidth_and_problems(content):
    text = report.table(content)
    assert "Card X, driver 1.2, reads 4000 GB/s" in text
    one, eight = text.splitlines()[-2:]
    assert one.split()[:4] == ["qwen3-8b", "1", "1024", "4.0000"] and one.endswith("-")
    assert eight.endswith("output is not finite")
    assert "0.5000" in one.split() and "4.6250" in one.split()  # the LM head, and the step with it by cuBLAS


def test_the_picture_draws_every_bar_to_scale_with_its_floor(content, tmp_path):
    canvas = picture.draw(content)
    canvas.save(tmp_path / "x.svg")
    tree = xml.etree.ElementTree.parse(tmp_path / "x.svg")
    tag = "{http://www.w3.org/2000/svg}"
    widths = {c: [float(r.get("width")) for r in tree.iter(tag + "rect") if r.get("fill") == c and float(r.get("width")) > 12] for c in (picture.STEP, picture.HEAD)}
    assert widths[picture.STEP][0] / widths[picture.STEP][1] == pytest.approx(4 / 6, rel=1e-3)
    assert widths[picture.HEAD][0] / widths[picture.STEP][0] == pytest.approx(4.5 / 4, rel=1e-3)
    scale = widths[picture.STEP][0] / 4.0
    begin = picture.LEFT + picture.LABELS
    floors = [float(l.get("x1")) for l in tree.iter(tag + "line") if l.get("stroke") == picture.FLOOR and l.get("stroke-width") == "2"]
    assert floors == pytest.approx([begin + f * scale for row in content["rows"] for f in (row["floor_ms"], row["step_head_floor_ms"])], abs=0.1)
    texts = [t.text for t in tree.iter(tag + "text")]
    assert any("Card X" in t for t in texts) and "8 rows" in texts
    assert max(float(r.get("y", 0)) + float(r.get("height")) for r in tree.iter(tag + "rect")) <= canvas.height
