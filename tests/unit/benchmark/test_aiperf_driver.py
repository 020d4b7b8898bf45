"""aiperf's commands, its raw records, and that nothing of it outlives a run. Oracle: lines as aiperf 0.13.0 writes them, shortened."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from benchmark.agentic import aiperf_driver, records
from benchmark.agentic.aiperf_driver import FIXED, SCENARIO, AiperfFailed
from benchmark.serve.server import free_port


def event(at_ms, **delta):
    usage = delta.pop("usage", None)
    value = {"choices": [] if usage else [{"delta": {"role": "assistant", **delta}}], "usage": usage}
    return {"perf_ns": 1_000_000_000 + int(at_ms * 1e6), "packets": [{"name": "data", "value": json.dumps(value)}]}


def line(conversation="a", turn=0, phase="profiling", responses=None, **changes):
    metadata = {"conversation_id": conversation, "source_trace_id": conversation.split("::")[0], "turn_index": turn, "benchmark_phase": phase}
    usage = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}}
    made = [event(50, content=""), event(50, content="x"), event(54, reasoning_content="y"), event(60, content="z"), event(60, usage=usage)]
    made.append({"perf_ns": 2_000_000_000, "packets": [{"name": "data", "value": "[DONE]"}]})
    value = {"metadata": metadata | {"request_start_ns": 5_000_000 * (turn + 1)}, "start_perf_ns": 1_000_000_000}
    value |= {"responses": made if responses is None else responses}
    return value | {"payload": {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, "error": None} | changes


def parsed(tmp_path, *lines):
    (tmp_path / aiperf_driver.RAW).write_text("".join(json.dumps(each) + "\n" for each in lines))
    return aiperf_driver.parse(tmp_path / aiperf_driver.RAW)


def test_a_record_is_read(tmp_path):
    first, second = parsed(tmp_path, line(), line("a::fa:000", 1), line(phase="warmup"))
    assert (first.key, second.key) == (("a", "root", 0), ("a", "fa:000", 1))
    assert (first.ttft_ms, first.e2e_ms, first.gaps_ms) == (50.0, 60.0, (4.0, 6.0))
    assert (first.input_tokens, first.output_tokens, first.cached_tokens, first.error) == (100, 3, 64, None)
    assert first.output_sha == records.digest("xyz") and (first.start_ms, second.start_ms) == (0.0, 5.0)
    other_model, other_prompt = (line(payload={"model": m, "messages": [{"role": "user", "content": c}]}) for m, c in (("n", "hi"), ("m", "ho")))
    same, different = parsed(tmp_path, other_model, other_prompt)
    assert same.prompt_sha == first.prompt_sha != different.prompt_sha


def test_tokens_without_text_of_their_own_are_spread_over_the_events(tmp_path):
    usage = {"prompt_tokens": 100, "completion_tokens": 4}
    (found,) = parsed(tmp_path, line(responses=[event(10, content="a"), event(20, content="b"), event(20, usage=usage)]))
    assert (found.output_tokens, found.gaps_ms) == (4, (5.0, 5.0)) and found.cached_tokens is None


def test_failed_requests_and_foreign_lines(tmp_path):
    broken, silent = parsed(tmp_path, line(error={"message": "500: no"}, responses=[]), line(responses=[]))
    assert (broken.error, silent.error) == ("500: no", "no token")
    with pytest.raises(ValueError, match=r"raw.jsonl line 2 is not a raw record of aiperf 0.13.0: KeyError\('metadata'\)"):
        parsed(tmp_path, line(), {"x": 1})


def command(mode):
    return aiperf_driver.profile_command(
        Path("/env"), "http://h:1", "m", "tok", Path("traces"), Path("out"),
        mode=mode, concurrency=4, conversations=16, max_context=70000, duration_s=900, seed=42,
    )


def test_the_modes_differ_in_what_they_should():
    fixed, scenario = command(FIXED), command(SCENARIO)
    assert fixed[0] == "/env/bin/aiperf"
    shared = ["--custom-dataset-type weka_trace", "--concurrency 4", "--max-context-length 70000", "--export-level raw", "--random-seed 42"]
    for words in map(" ".join, (fixed, scenario)):
        assert all(part in words for part in shared)
    assert "--num-conversations 16 --ignore-trace-delays --extra-inputs ignore_eos:true" in " ".join(fixed) and "--scenario" not in fixed
    assert "--scenario inferencex-agentx-mvp --benchmark-duration 900 --unsafe-override" in " ".join(scenario)
    assert "--ignore-trace-delays" not in scenario and "--num-conversations" not in scenario


def test_wheels_are_the_only_source_where_they_are_given(tmp_path):
    assert aiperf_driver.install_commands(Path("/env"), None)[1][-1] == "aiperf==0.13.0"
    assert ["--no-index", "--find-links", "w"] == aiperf_driver.install_commands(Path("/env"), Path("w"))[1][-4:-1]
    with pytest.raises(AiperfFailed, match="has no aiperf-0.13.0 wheel; fill it with: pip download aiperf==0.13.0"):
        aiperf_driver.install(tmp_path / "env", tmp_path, print)


def test_a_registry_that_is_not_there_is_an_error_with_a_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{free_port()}/simple")
    with pytest.raises(AiperfFailed, match="aiperf 0.13.0 cannot be installed; carry its wheels .* or use --driver direct:") as failed:
        aiperf_driver.install(tmp_path / "env", None, print)
    assert "No matching distribution found for aiperf==0.13.0" in str(failed.value)
    assert not (tmp_path / "env/complete").exists()


def test_a_registry_that_never_answers_ends_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(aiperf_driver, "INSTALL_LIMIT_S", 1.0)
    silent = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(aiperf_driver, "install_commands", lambda environment, wheels: [silent])
    with pytest.raises(AiperfFailed, match="did not end within 1 s"):
        aiperf_driver.install(tmp_path / "env", None, print)


def script(tmp_path, body):
    """A stand-in for aiperf."""
    path = tmp_path / "aiperf.py"
    path.write_text(body)
    return [sys.executable, str(path)]


def test_a_run_that_fails_ends_with_its_last_lines(tmp_path):
    with pytest.raises(AiperfFailed, match="aiperf exited with 3\n--- last lines of .*run.log ---\nthe reason"):
        aiperf_driver.run(script(tmp_path, "print('the reason'); raise SystemExit(3)"), tmp_path / "run", 30)
    with pytest.raises(AiperfFailed, match="aiperf wrote no profile_export_raw.jsonl"):
        aiperf_driver.run(script(tmp_path, ""), tmp_path / "run", 30)


def test_a_run_past_its_limit_leaves_no_process_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(aiperf_driver, "STOP_GRACE_S", 0.5)
    body = "import os, subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    body += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(600)"
    with pytest.raises(AiperfFailed, match="did not finish within 3 s"):
        aiperf_driver.run(script(tmp_path, body), tmp_path / "run", 3)
    pid, limit = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while time.monotonic() < limit and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid):
    """Whether a process is there and no zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
