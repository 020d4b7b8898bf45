"""Coverage counts what the device executed and why the host fell back, and says so where an operator looks."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import prometheus_client
import pytest
from sgl_lowlatency.runtime.coverage import (
    DRAFT_MODEL,
    PREFILL,
    VERIFY,
    WARN_AFTER_FALLBACKS,
    Coverage,
    CoverageCounts,
    CoverageMetrics,
)

LINE = (
    "decode_step ran 7 decode steps (1 rows: 3, 4 rows: 4); SGLang's forward ran 3 eager steps (24 rows, built for 1 to 16: 1, prefill: 2)"
)


def test_counts_leave_out_discounted_launches():
    executed = {1: 0, 4: 0}
    coverage = Coverage(lambda: dict(executed))
    executed.update({1: 9, 4: 5})
    coverage.discount(1, 9)
    assert coverage.counts().executed == {1: 0, 4: 5}
    executed.update({1: 12, 4: 9})
    assert coverage.counts().executed == {1: 3, 4: 9}, "steps of other rows and later ones stay counted"


def test_launches_of_the_body_are_never_seen_by_other_threads():
    """The metrics thread once read between a self-check's launches and their discount, and counted them for good."""
    executed, seen = {5: 2}, []
    coverage = Coverage(lambda: dict(executed))
    with coverage.uncounted(5):
        executed[5] += 3
        reader = threading.Thread(target=lambda: seen.append(coverage.counts().executed))
        reader.start()
        reader.join(0.1)
        assert reader.is_alive() and not seen, "a reader waits while uncounted launches run"
        assert coverage.counts().executed == {5: 5}, "the thread that runs them may look"
    reader.join(5)
    assert seen == [{5: 2}]
    executed[5] += 1
    assert coverage.counts().executed == {5: 3}


def test_a_discounted_launch_still_in_flight_does_not_go_negative():
    coverage = Coverage(lambda: {2: 1})
    coverage.discount(2, 3)
    assert coverage.counts().executed == {2: 0}


def test_the_line_names_rows_and_reasons():
    assert str(CoverageCounts({1: 3, 2: 0, 4: 4}, {PREFILL: 2, "24 rows, built for 1 to 16": 1})) == LINE
    assert str(CoverageCounts({}, {})) == "decode_step ran 0 decode steps; SGLang's forward ran 0 eager steps"


def test_the_same_counts_are_logged_once(caplog):
    executed = {1: 1}
    coverage = Coverage(lambda: dict(executed))
    with caplog.at_level(logging.INFO):
        coverage.log()
        coverage.log()
        executed[1] = 2
        coverage.log()
    assert [record.message for record in caplog.records] == [
        f"sgl-lowlatency coverage: decode_step ran {n} decode steps (1 rows: {n}); SGLang's forward ran 0 eager steps" for n in (1, 2)
    ]


def test_a_server_without_coverage_is_warned_of_once(caplog):
    coverage = Coverage(lambda: {})
    for _ in range(100):
        coverage.count_fallback(PREFILL)
    assert not caplog.records, "prefill is not a fallback worth a warning"
    for _ in range(3 * WARN_AFTER_FALLBACKS):
        coverage.count_fallback("LoRA")
    assert [record.message for record in caplog.records] == [
        f"sgl-lowlatency: none of the first {WARN_AFTER_FALLBACKS} decode steps ran decode_step (LoRA: {WARN_AFTER_FALLBACKS})"
    ]


def test_a_server_with_coverage_is_not_warned_of(caplog):
    coverage = Coverage(lambda: {1: 1})
    for _ in range(3 * WARN_AFTER_FALLBACKS):
        coverage.count_fallback("LoRA")
    assert not caplog.records


def test_metrics_outlive_a_count_that_is_lower_for_a_moment():
    registry = prometheus_client.CollectorRegistry()
    metrics = CoverageMetrics(registry)
    for count in (4, 3, 4, 6):
        metrics.update(CoverageCounts({1: count}, {}))
    assert registry.get_sample_value("sgl_lowlatency:decode_steps_total", {"mode": "decode", "rows": "1"}) == 6


def test_metrics_grow_by_what_the_counts_gained():
    registry = prometheus_client.CollectorRegistry()
    metrics = CoverageMetrics(registry)
    metrics.update(CoverageCounts({1: 3}, {PREFILL: 1}))
    metrics.update(CoverageCounts({1: 5, 2: 1}, {PREFILL: 1, "LoRA": 4}))

    def value(name, **labels):
        return registry.get_sample_value(f"sgl_lowlatency:{name}_total", labels)

    assert value("decode_steps", mode="decode", rows="1") == 5 and value("decode_steps", mode="decode", rows="2") == 1
    assert value("fallback_steps", reason=PREFILL) == 1 and value("fallback_steps", reason="LoRA") == 4


def test_verify_steps_are_counted_apart(caplog):
    registry = prometheus_client.CollectorRegistry()
    coverage = Coverage(lambda: {4: 3, 8: 1}, VERIFY)
    CoverageMetrics(registry).update(coverage.counts())
    assert registry.get_sample_value("sgl_lowlatency:decode_steps_total", {"mode": "verify", "rows": "4"}) == 3
    assert registry.get_sample_value("sgl_lowlatency:decode_steps_total", {"mode": "decode", "rows": "4"}) is None
    with caplog.at_level(logging.INFO):
        coverage.log()
    assert caplog.messages == [
        "sgl-lowlatency coverage: decode_step ran 4 verify steps (4 rows: 3, 8 rows: 1); SGLang's forward ran 0 eager steps"
    ]


def test_a_draft_models_steps_are_counted_beside_the_targets_and_warned_of_never(caplog):
    registry = prometheus_client.CollectorRegistry()
    target, draft = Coverage(lambda: {4: 3}, VERIFY), Coverage(dict, of=" (draft model)")
    for _ in range(2 * WARN_AFTER_FALLBACKS):
        draft.count_fallback(DRAFT_MODEL)
    assert not caplog.records
    for coverage in (target, draft):  # a registry takes a name once
        CoverageMetrics(registry).update(coverage.counts())
    reason = {"reason": "a draft model's step"}
    assert registry.get_sample_value("sgl_lowlatency:fallback_steps_total", reason) == 2 * WARN_AFTER_FALLBACKS
    with caplog.at_level(logging.INFO):
        draft.log()
    assert caplog.messages == [
        "sgl-lowlatency coverage (draft model): decode_step ran 0 decode steps; SGLang's forward ran 32 eager steps "
        "(a draft model's step: 32)"
    ]


PROCESS = """
import logging, sys, time
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from sgl_lowlatency.runtime.coverage import Coverage
executed = {1: 1}
coverage = Coverage(lambda: dict(executed))
coverage.start_reporting(interval_s=float(sys.argv[1]), with_metrics=False)
print("ready", flush=True)
sys.stdin.readline()
executed[1] = 2
"""


@pytest.fixture
def reporting_process():
    started = []

    def start(interval_s):
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", PROCESS, str(interval_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_line_comes_on_the_signal_and_at_exit(reporting_process):
    process = reporting_process(0)
    os.kill(process.pid, signal.SIGUSR1)
    assert "decode_step ran 1 decode steps" in process.stdout.readline()
    output, _ = process.communicate("go on\n", timeout=30)
    assert output.count("coverage:") == 1 and "decode_step ran 2 decode steps" in output
    assert process.returncode == 0


def test_the_line_comes_every_interval_when_it_changed(reporting_process):
    process = reporting_process(0.05)
    assert "decode_step ran 1 decode steps" in process.stdout.readline()
    time.sleep(0.3)
    output, _ = process.communicate("go on\n", timeout=30)
    assert output.count("coverage:") == 1 and "decode_step ran 2 decode steps" in output
