"""The report of made-up runs: what is decided stands there with its interval, what is not stands there as that."""

import json
import re
from xml.etree import ElementTree

import pytest
from replay_runs import MACHINE, PLAN, cell, folder, record, run

for name in ("scipy", "matplotlib", "jinja2"):
    pytest.importorskip(name)

from benchmark import report  # noqa: E402
from benchmark.agentic import cells, page  # noqa: E402
from benchmark.agentic.arms import OFF, ON  # noqa: E402

FAST, NOISE, SLOW = [(5.0, 4.0), (5.1, 4.0), (5.0, 4.1)], [(5.0, 4.5), (4.0, 4.6), (5.0, 4.4)], [(4.0, 5.0), (4.1, 5.1), (4.0, 5.2)]


@pytest.fixture
def written(tmp_path):
    """The three texts of a replay faster at 1, undecided at 2, slower at 4 sessions."""
    for concurrency, times in ((1, FAST), (2, NOISE), (4, SLOW)):
        folder(tmp_path, times, concurrency=concurrency)
    return [path.read_text() for path in report.write(tmp_path)]


def sections(markdown):
    return {part.split("\n")[0]: part for part in markdown.split("\n## ")[1:]}


def test_every_outcome_stands_in_its_section(written):
    parts = sections(written[1])
    gap = "gap between tokens, p50"
    assert f"- concurrency 1, {gap}: 1.248 × faster, 95 % interval " in parts["Decided in its favour"]
    assert f"- concurrency 2, {gap}: not decidable: the interval holds 1 (off/on " in parts["Not decidable"]
    assert f"- concurrency 4, {gap}: 1.264 × slower, 95 % interval 1.1" in parts["Where the plugin loses or does not run"]
    for title in ("Decided in its favour", "Not decidable", "Where the plugin loses or does not run"):
        assert parts[title].count(f"{gap}:") == 1
    assert "concurrency 4: 4 of 4 requests took longer a token with the plugin" in parts["Where the plugin loses or does not run"]
    page_text = re.sub(r"\s+", " ", written[2])
    for part in (parts["Decided in its favour"], parts["Not decidable"], parts["Where the plugin loses or does not run"]):
        for line in re.findall(r"^- (.*)$", part, re.MULTILINE):
            assert f"<li>{line}</li>" in page_text


def test_the_json_is_a_results_file(written):
    content = json.loads(written[0])
    assert (content["schema"], content["what"], content["name"], content["gpu"]) == (1, "replay", "replay-qwen3-8b-fixed-work", "NVIDIA H200")
    (row,) = (row for row in content["rows"] if row["concurrency"] == 1)
    assert (row["off_ms"], row["on_ms"], row["ratio"]) == ([5.0, 5.1, 5.0], [4.0, 4.0, 4.1], 1.25)
    assert row["ratio_ci95"][0] <= 1.25 <= row["ratio_ci95"][1]
    assert content["order"][:2] == ["r1 c1 off, on", "r1 c2 off, on"] and "r2 c1 on, off" in content["order"]


def test_the_page_stands_alone(written):
    page_text = written[2]
    assert not re.findall(r'(?:src|href)="(?!#|data:image/png;base64,)', page_text) and "<script" not in page_text and "@import" not in page_text
    assert '<meta name="viewport" content="width=device-width' in page_text
    ids = re.findall(r'\bid="([^"]+)"', page_text)
    assert len(ids) == len(set(ids)) > 50
    for target in re.findall(r'(?:href="#|url\(#)([^")]+)', page_text):
        assert target in ids


def test_plots_show_both_arms_and_what_they_are(written):
    svgs = re.findall(r"<figure><figcaption>(.*?)</figcaption>(<svg.*?</svg>)\s*</figure>", written[2], re.DOTALL)
    titles = [title for title, _ in svgs]
    assert titles[:2] == ["Tokens a second a user, over concurrency", "Where steps ran, by reason"] and len(titles) == 2 + 3 * 3
    for title, svg in svgs:
        ElementTree.fromstring(svg)  # well-formed by itself
        words = {"".join(t.split()) for t in re.findall(r"<text[^>]*>(.*?)</text>", svg)}
        wanted = {"prefill", "plugin"} if "reason" in title else {"tok/s/user"} if "over concurrency" in title else set()
        wanted = {"standardpath,msatoken", "plugin,msatoken"} if "Every request" in title else wanted or {"standardpath", "plugin"}
        assert wanted <= words, title


def test_names_from_outside_do_not_become_markup(tmp_path):
    folder(tmp_path, FAST, plan=PLAN | {"model": "<b>x</b>"})
    text = page.render(report.build(tmp_path))
    assert "&lt;active&gt;" in text and "<active>" not in text
    assert "&lt;b&gt;x&lt;/b&gt;" in text and "<b>" not in text


def test_unequal_work_is_a_problem_and_no_claim(tmp_path):
    folder(tmp_path, FAST)
    cells.save(tmp_path, cell(ON, 2), run(4.0)[:-1])
    _, markdown, _ = (path.read_text() for path in report.write(tmp_path))
    assert report.problems(tmp_path) == ["concurrency 1: repeat 2: b/root/1: sent to one arm only"]
    assert "Equal work: no" in markdown and "no claim: unequal work" in markdown and "faster" not in markdown


def test_results_of_different_gpus_are_refused(tmp_path):
    folder(tmp_path, FAST)
    for arm in (OFF, ON):
        cells.save(tmp_path, cell(arm, 3, machine=MACHINE | {"gpu": "NVIDIA H100"}), run(4.0))
    with pytest.raises(report.ReportRefused, match="results of different gpus: NVIDIA H100, NVIDIA H200"):
        report.build(tmp_path)


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(report.ReportRefused, match="is not a folder of benchmark.replay"):
        report.build(tmp_path)
    folder(tmp_path, [])
    with pytest.raises(report.ReportRefused, match="has no pair of finished runs yet"):
        report.build(tmp_path)


def test_a_machine_without_a_gpu_says_so(tmp_path):
    none = {"gpu": "none", "num_gpus": 0, "driver": "none", "clocks_mhz": {}}
    folder(tmp_path, FAST)
    for repeat, times in enumerate(FAST, 1):
        for arm, gap in zip((OFF, ON), times):
            cells.save(tmp_path, cell(arm, repeat, machine=none, seconds=gap), run(gap))
    texts = [path.read_text() for path in report.write(tmp_path)]
    assert all("No GPU: the plugin ran in host emulation." in text for text in texts[1:])


def test_without_a_plotting_library_all_but_the_page_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "drawable", lambda: False)
    folder(tmp_path, FAST)
    assert [path.name for path in report.write(tmp_path)] == ["report.json", "report.md"]
    assert f"no report.html: matplotlib or jinja2 is not installed; python3 -m benchmark.report makes it from {tmp_path}" in report.table(tmp_path)


def test_a_terminal_shows_what_is_decided_and_on_what_work(tmp_path):
    folder(tmp_path, FAST)
    report.write(tmp_path)
    first, second, _, figures, work = report.table(tmp_path).splitlines()
    assert first.startswith("replay-qwen3-8b-fixed-work: NVIDIA H200, driver 1.2; SGLang 0.5.23")
    assert second == "driver direct, fixed-work, agentic-64k, seed 0, scale 1"
    assert figures.split()[:6] == ["C", "1", "200", "250", "200", "250"] and "1.248 × faster, 95 % interval " in figures
    assert "equal work: yes, 3 repeats of 4 requests, 20 tokens out" in work and "first token 50/50 ms" in work


def test_tokens_that_arrive_together_are_a_warning(tmp_path):
    folder(tmp_path, FAST)
    assert "arrived together" not in report.write(tmp_path)[1].read_text()
    together = [record(name, turn, gaps_ms=(0.01, 0.01, 0.01, 20.0)) for name in "ab" for turn in range(2)]
    cells.save(tmp_path, cell(OFF, 2), together)
    assert "- Tokens arrived together with the one before, up to 75% at concurrency 1: read the time an" in report.write(tmp_path)[1].read_text()


def test_simulated_acceptance_is_labelled(tmp_path):
    folder(tmp_path, FAST, plan=PLAN | {"simulated_acceptance": 2.5})
    texts = [path.read_text() for path in report.write(tmp_path)]
    assert all("Simulated acceptance: 2.5 tokens a verify step were drawn, not verified; the texts mean nothing." in text for text in texts[1:])


def test_chance_is_counted_over_what_can_be_decided(tmp_path):
    folder(tmp_path / "three", FAST)
    assert "13 comparisons at 95 % each: about 0.7 of them would be decided by chance" in report.write(tmp_path / "three")[1].read_text()
    folder(tmp_path / "two", FAST[:2])
    text = report.write(tmp_path / "two")[1].read_text()
    assert "by chance" not in text and sections(text)["Decided in its favour"].strip().endswith("\nNothing that these runs decide.")
    folder(tmp_path / "scenario", FAST, plan=PLAN | {"mode": "scenario-timing"})
    text = report.write(tmp_path / "scenario")[1].read_text()
    assert "by chance" not in text and "no claim: scenario timing" in text and "faster" not in text
