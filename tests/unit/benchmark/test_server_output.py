"""Reading what servers print: metrics, coverage, refusals, traces."""

import pytest

from benchmark.common import graph_trace
from benchmark.serve import coverage, refusals, server, trace

PAGE = """# HELP sgl_lowlatency:decode_steps_total Decode steps run by decode_step.
sgl_lowlatency:decode_steps_total{mode="decode",rows="1"} 12.0
sgl_lowlatency:decode_steps_total{mode="decode",rows="4"} 3.0
sgl_lowlatency:fallback_steps_total{reason="prefill"} 2.0
sgl_lowlatency:fallback_steps_total{reason="17 rows, built for 1 to 16"} 5.0
sglang:num_running_reqs{model_name="m"} 0.0
"""


def test_counts_of_a_metrics_page():
    counts = coverage.parse(server.parse_metrics(PAGE))
    assert counts.executed == {1: 12.0, 4: 3.0}
    assert counts.rows == 24 and counts.modes == {"decode"}
    assert counts.fallbacks == {"prefill": 2.0, "17 rows, built for 1 to 16": 5.0}


def test_a_gain_that_lost_steps_is_a_problem():
    before = coverage.Counts({1: 10.0, 4: 3.0}, {"prefill": 1.0}, True)
    gained = coverage.parse(server.parse_metrics(PAGE)).since(before)
    assert gained.executed == {1: 2.0}
    assert gained.problems(needed_rows=2) == ["fallback of 5 steps: 17 rows, built for 1 to 16"]
    assert "2 decode rows executed, 3 needed" in gained.problems(needed_rows=3)


def test_a_server_without_counters_is_a_problem():
    counts = coverage.parse(server.parse_metrics('sglang:num_running_reqs{model_name="m"} 0.0\n'))
    assert counts.problems(0) == ["the server exports no sgl_lowlatency counters"]


def test_the_refusal_is_cut_out_of_the_log():
    log = f"""warning: something
Traceback (most recent call last):
ValueError: {server.FLAG} cannot run this setup:
  - tp_size 2 is not one of ['1']
  - dtype 'float16' is not one of ['bfloat16']
[later] more
  - not a reason
"""
    assert refusals.message(log).splitlines()[1:] == [
        "  - tp_size 2 is not one of ['1']",
        "  - dtype 'float16' is not one of ['bfloat16']",
    ]
    assert refusals.message("nothing here") == ""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_refusal_of_the_joint_case_has_its_own_launch(device):
    found = {case.name: case for case in refusals.cases(device)}
    alone = {pattern for case in found.values() if case.name != "all at once" for pattern in case.expected}
    assert set(found["all at once"].expected) <= alone
    assert len(found["all at once"].expected) == 8


def event(name, cat, ts, dur, correlation=None):
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "ts": ts,
        "dur": dur,
        "args": {} if correlation is None else {"correlation": correlation},
    }


def test_a_step_is_the_kernels_of_one_graph_launch():
    events = [event("cudaGraphLaunch", "cuda_runtime", 0, 5, 7), event("cudaGraphLaunch", "cuda_runtime", 5000, 5, 8)]
    events += [
        event("a", "kernel", 100, 1000, 7),
        event("b", "kernel", 600, 1000, 7),
        event("c", "kernel", 2000, 500, 7),
    ]
    events += [event("a", "kernel", 5100, 2000, 8), event("sampling", "kernel", 9000, 99, 3)]
    got = trace.summarize({"traceEvents": events})
    assert (got["method"], got["steps"], got["kernels"]) == ("correlation", 2, 2.0)
    assert got["busy_ms"] == pytest.approx((2.0 + 2.0) / 2)  # 100..1600 and 2000..2500; 5100..7100
    assert got["span_ms"] == pytest.approx((2.4 + 2.0) / 2)


def test_the_median_replay_is_told_kernel_by_kernel():
    events = [event("cudaGraphLaunch", "cuda_runtime", 1000 * i, 5, i) for i in (1, 2, 3)]
    for i, scale in ((1, 1), (2, 3), (3, 2)):  # the third has the median span
        events += [event("void ns::norm<float>(int)", "kernel", 1000 * i + 100 * scale, 10, i), event("gemm", "kernel", 1000 * i + 10, 100 * scale, i)]
    step = graph_trace.median_step({"traceEvents": events})
    assert [(k["name"], k["start_us"], k["us"]) for k in step] == [("gemm", 0, 200), ("ns::norm<float>", 190, 10)]
    assert graph_trace.summary([*step, {**step[1], "start_us": 250.0}]) == {
        "kernels": 3, "busy_us": 210, "span_us": 260, "by_name": [("gemm", 1, 200), ("ns::norm<float>", 2, 20)]
    }  # fmt: skip
    with pytest.raises(ValueError, match="no device events"):
        graph_trace.median_step({"traceEvents": events[:3]})


def test_without_correlation_the_total_is_divided_by_the_launches():
    events = [event("cudaGraphLaunch", "cuda_runtime", 0, 5), event("cudaGraphLaunch", "cuda_runtime", 50, 5)]
    events += [event("a", "kernel", 100, 1000), event("b", "kernel", 2000, 1000)]
    got = trace.summarize({"traceEvents": events})
    assert (got["method"], got["steps"], got["busy_ms"]) == ("total", 2, 1.0)


def test_a_trace_without_graph_launches_is_refused():
    with pytest.raises(ValueError, match="0 graph launches"):
        trace.summarize({"traceEvents": [event("a", "kernel", 0, 1)]})
