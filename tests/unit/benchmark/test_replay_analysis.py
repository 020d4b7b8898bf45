"""What repeats decide. Oracles: Student's t interval from scipy, and figures worked out by hand."""

import math

import pytest
from replay_runs import cell, record, run

distributions = pytest.importorskip("scipy.stats")

from benchmark.agentic import analysis, findings  # noqa: E402
from benchmark.agentic.arms import OFF, ON  # noqa: E402


def pairs(times, change=lambda repeat, arm, found: found):
    return [(cell(arm, n, seconds=gap), change(n, arm, run(gap))) for n, both in enumerate(times, 1) for arm, gap in zip((OFF, ON), both)]


def test_the_interval_is_that_of_scipys_paired_t_test_on_logarithms():
    off, on = [5.0, 5.2, 5.1, 4.9], [4.0, 4.3, 3.9, 4.1]
    found = analysis.decide(off, on)
    interval = distributions.ttest_rel([math.log(x) for x in off], [math.log(x) for x in on]).confidence_interval(0.95)
    assert found["ci95"] == pytest.approx([math.exp(interval.low), math.exp(interval.high)], abs=1e-4)
    assert found["verdict"] == analysis.FASTER


def test_a_drift_of_the_machine_that_both_arms_share_hides_nothing():
    assert analysis.decide([5.0, 6.0, 7.0], [4.0, 4.81, 5.59])["verdict"] == analysis.FASTER


def test_slower_undecided_and_too_few():
    assert analysis.decide([4.0, 4.1, 4.0], [5.0, 5.1, 5.0])["verdict"] == analysis.SLOWER
    noise = analysis.decide([5.0, 4.0, 5.0], [4.5, 4.6, 4.4])
    assert (noise["verdict"], noise["why"]) == (analysis.UNDECIDED, "the interval holds 1") and noise["ci95"][0] < 1 < noise["ci95"][1]
    few = analysis.decide([5.0, 5.0], [1.0, 1.0])
    assert (few["verdict"], few["ci95"], few["why"]) == (analysis.UNDECIDED, None, "2 of at least 3 repeats")
    assert analysis.decide([5.0] * 3, [5.0] * 3)["verdict"] == analysis.UNDECIDED
    wide = analysis.decide([1.0, 1.0, 1.0], [40.0, 90.0, 9000.0])  # emulation of a busy machine: the low end is 1e-6
    assert 0 < wide["ci95"][0] < 1e-4 and "slower" not in findings.ratio(wide)
    far = analysis.decide([1e-6, 1e-6, 1e-6], [1.0, 1.01, 1.02])
    assert "slower" in findings.ratio(far) and far["ratio"] > 0


def test_figures_of_one_run():
    found = [record(gap=4.0), record("a", 1, gap=8.0), record("b", 0, error="no answer", gap=1000.0)]
    value = analysis.figures(cell(OFF, 1, seconds=2.0), found)
    assert (value["itl_p50"], value["ttft_p99"], value["e2e_p50"]) == (6.0, 50.0, (66.0 + 82.0) / 2)
    assert (value["tok_s_user_p50"], value["output_tok_s"]) == (round(1000 / 6, 3), 5.0)
    assert value["cache_hit"] == round(1000 / 2100, 4) and "accept_length" not in value
    assert analysis.figures(cell(OFF, 1), [record(verify_steps=2)])["accept_length"] == 2.5


def test_unequal_work_makes_no_claim():
    times = [(5.0, 4.0), (5.1, 4.0), (5.0, 4.1)]
    fair = analysis.concurrency(pairs(times), "fixed-work")
    assert fair["problems"] == [] and fair["compared"]["itl_p50"]["verdict"] == analysis.FASTER
    lost = analysis.concurrency(pairs(times, lambda n, arm, found: found[:-1] if (n, arm) == (2, ON) else found), "fixed-work")
    assert lost["problems"] == ["repeat 2: b/root/1: sent to one arm only"]
    assert {c["verdict"] for c in lost["compared"].values()} == {analysis.NO_CLAIM}
    cut = pairs(times, lambda n, arm, found: [record(error="cut"), *found[1:]] if (n, arm) == (1, OFF) else found)
    failed = analysis.concurrency(cut, "fixed-work")
    assert failed["problems"] == ["repeat 1: a/root/0: cut"] and failed["compared"]["itl_p50"]["verdict"] == analysis.NO_CLAIM
    other = analysis.concurrency(pairs(times, lambda n, arm, found: [record(prompt="q"), *found[1:]] if n == 3 else found), "fixed-work")
    assert other["problems"] == ["the repeats did not do the same work"]


def test_scenario_timing_makes_no_claim():
    found = analysis.concurrency(pairs([(5.0, 4.0)] * 3), "scenario-timing")
    assert {c["verdict"] for c in found["compared"].values()} == {analysis.NO_CLAIM} and found["turns"] == [] and "seconds" not in found["compared"]


def test_what_the_plugin_ran_and_what_it_lost():
    on = [(cell(ON, 1, rows=10.0, fallbacks={"prefill": 3.0, "LoRA": 2.0}), run(5.0))]
    assert analysis.lost_steps(analysis.coverage(on)) == [
        "2 steps ran SGLang's own forward: LoRA", "the plugin's steps had 10 rows, 16 decode tokens were made",
    ]
    assert analysis.lost_steps(analysis.coverage([(cell(ON, 1), run(5.0))])) == []


def test_answers_stand_beside_an_arms_own():
    changed = analysis.concurrency(
        pairs([(5.0, 4.0)] * 3, lambda n, arm, found: [record(output_sha="x"), *found[1:]] if arm == ON else found), "fixed-work"
    )
    assert changed["answers"] == {"off_on": 0.75, "off_off": 1.0, "on_on": 1.0}


def test_a_point_a_request_is_the_median_of_its_repeats():
    found = analysis.concurrency(pairs([(5.0, 4.0), (9.0, 4.2), (5.2, 1.0)]), "fixed-work")
    assert found["turns"] == [[5.2, 4.0, 1002], [5.2, 4.0, 1102]] * 2
    assert found["itl_quantiles"][OFF][0] == 5.0 and found["itl_quantiles"][OFF][200] == 9.0
    assert sum(one["requests"] for one in found["itl_by_context"][ON]) == 12
