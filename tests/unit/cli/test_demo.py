"""The demo's verdicts and endings; what it does with real servers is tests/serving's and the demo's own run."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path

import pytest

from sgl_lowlatency.cli import demo, main, openai_client, server_setup
from sgl_lowlatency.cli.greedy_oracle import Choice
from sgl_lowlatency.cli.openai_client import Answer
from sgl_lowlatency.cli.server_process import ServerFailed


class Oracle:
    def __init__(self, gap):
        self.gap = gap

    def judge(self, prompt_ids, output_ids):
        return [Choice(i, token, 1, self.gap if i else 0.0, bound=0.2) for i, token in enumerate(output_ids)]


SAME, OTHER = Answer("ab", [1], [5, 6]), Answer("ac", [1], [5, 7])
MARGIN = "float64 puts token 7 {:.3f} below the best logit, rounding explains 0.200"


@pytest.mark.parametrize(
    "ours, gap, accepted, text",
    [
        (SAME, 9.0, True, "'p': 2 tokens equal"),
        (OTHER, 0.1, True, f"'p': differs from token 1 on: {MARGIN.format(0.1)}: not decided"),
        (OTHER, 0.3, False, f"'p': differs from token 1 on: {MARGIN.format(0.3)}: WRONG"),
    ],
)
def test_verdicts(capsys, ours, gap, accepted, text):
    assert demo._Reporter(as_json=False).verdict("p", SAME, ours, Oracle(gap)) is accepted
    assert capsys.readouterr().out == f"[demo] {text}\n"


class FakeServer:
    """Stands for ServerProcess: records its life, answers at once."""

    log_of = []
    temporary = set()

    def __init__(self, arguments, port, log, environment):
        self.name = "plugin" if server_setup.PLUGIN_FLAG in arguments else "standard"
        self.url, self.log = f"http://{self.name}", log
        FakeServer.log_of.append((self.name, "start"))
        temporary = Path(environment["TMPDIR"])
        assert temporary.is_dir()
        FakeServer.temporary.add(temporary)

    def wait_ready(self, timeout_s, progress):
        return 1.0

    def require_alive(self):
        pass

    def failure(self, what):
        return ServerFailed(f"{what}\nlast lines")

    def request_stop(self):
        FakeServer.log_of.append((self.name, "asked to stop"))

    def stop(self):
        FakeServer.log_of.append((self.name, "stop"))

    def kill(self):
        FakeServer.log_of.append((self.name, "kill"))


@pytest.fixture
def faked(monkeypatch):
    FakeServer.log_of, FakeServer.temporary = [], set()
    monkeypatch.setattr(demo, "ServerProcess", FakeServer)
    monkeypatch.setattr(demo, "METRICS_SETTLE_S", 0.0)
    monkeypatch.setattr(demo, "MAX_TOKENS", len(SAME.output_ids))
    monkeypatch.setattr(server_setup, "missing_requirement", lambda: None)

    def answer(url, prompt, max_tokens, on_text):
        on_text("piece")
        return SAME

    monkeypatch.setattr(openai_client, "complete", answer)
    monkeypatch.setattr(openai_client, "chat", answer)
    monkeypatch.setattr(
        openai_client,
        "metrics",
        lambda url, prefix: {
            'sgl_lowlatency:decode_steps_total{mode="decode",rows="1"}': 30.0,
            'sgl_lowlatency:fallback_steps_total{reason="prefill"}': 6.0,
        },
    )
    return monkeypatch


def test_success_ends_in_the_success_line(faked, capsys):
    assert main.main(["demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("demo: OK: 6 requests, 12 tokens, 30 steps by decode_step, ")
    assert '[demo]   fallback_steps_total{reason="prefill"} 6' in lines
    assert any("completion 'the people of water': piece" in line for line in lines)
    assert FakeServer.log_of == [
        ("standard", "start"), ("standard", "asked to stop"), ("plugin", "start"), ("plugin", "stop"), ("standard", "stop"),
    ]


def test_json_is_the_only_thing_on_stdout(faked, capsys):
    assert main.main(["demo", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True and len(report["requests"]) == 6 and report["requests"][0]["tokens"] == [5, 6]


def test_a_server_whose_kernel_never_ran_is_a_failure(faked, capsys):
    faked.setattr(openai_client, "metrics", lambda url, prefix: {'sgl_lowlatency:fallback_steps_total{reason="LoRA"}': 9.0})
    assert main.main(["demo"]) == 1
    assert "demo: FAILED: no decode step ran the kernel" in capsys.readouterr().out


@pytest.mark.parametrize("error", [ServerFailed("the server exited with code 3"), KeyboardInterrupt()])
def test_failures_kill_both_servers(faked, capsys, error):
    def fails(url, prompt, max_tokens, on_text):
        if "plugin" in url:
            raise error
        return SAME

    faked.setattr(openai_client, "chat", fails)
    assert main.main(["demo"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "demo: FAILED: " + (str(error) or "interrupted; both servers are stopped")
    assert ("plugin", "kill") in FakeServer.log_of and ("standard", "kill") in FakeServer.log_of


@pytest.mark.parametrize(
    "ending, message",
    [
        (ConnectionResetError("reset by peer"), "a request failed: reset by peer"),
        (http.client.IncompleteRead(b""), "a request failed: IncompleteRead(0 bytes read)"),
        (None, "the answer to 'the people of water' ended after 1 of 2 tokens"),
    ],
)
def test_an_answer_cut_short_is_reported_with_the_log(faked, capsys, ending, message):
    def cut_short(url, prompt, max_tokens, on_text):
        if ending is not None:
            raise ending
        return Answer("a", [1], [5])

    faked.setattr(openai_client, "complete", cut_short)
    assert main.main(["demo"]) == 1
    assert capsys.readouterr().out.endswith(f"demo: FAILED: {message}\nlast lines\n")
    assert FakeServer.log_of[-1] == ("standard", "kill")


@pytest.mark.parametrize(
    "variable, reason",
    [
        ("SGL_LOWLATENCY_FOO", "SGL_LOWLATENCY_FOO is not a variable of sgl-lowlatency; there are "),
        ("SGL_LOWLATENCY_EMULATE", "SGL_LOWLATENCY_EMULATE='x' is not 0 or 1"),
    ],
)
def test_a_bad_variable_is_named_before_a_server_starts(faked, capsys, variable, reason):
    faked.setenv(variable, "x")
    assert main.main(["demo"]) == 1
    assert capsys.readouterr().out.startswith(f"demo: FAILED: {reason}") and FakeServer.log_of == []


@pytest.mark.parametrize("port", ["-5", "65535", "99999"])
def test_a_port_that_cannot_be_is_named_before_a_server_starts(faked, capsys, port):
    assert main.main(["demo", f"--port={port}"]) == 1
    assert capsys.readouterr().out == f"demo: FAILED: --port {port} is outside 1..65534\n" and FakeServer.log_of == []


@pytest.mark.parametrize("offset", [0, 1])
def test_a_taken_port_is_named_before_a_server_starts(faked, capsys, offset):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main.main(["demo", "--port", str(port - offset)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("demo: FAILED: port ") and str(port) in out and "cannot be listened on" in out
    assert FakeServer.log_of == []


def test_a_folder_that_cannot_be_made_is_named(faked, capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main.main(["demo", "--keep-logs", str(tmp_path / "file" / "logs")]) == 1
    assert capsys.readouterr().out == f"demo: FAILED: --keep-logs {tmp_path / 'file' / 'logs'} cannot be made: Not a directory\n"


def test_what_the_servers_leave_in_their_temporary_folder_goes_with_the_demo(faked, tmp_path):
    assert main.main(["demo", "--keep-logs", str(tmp_path / "logs")]) == 0
    (folder,) = FakeServer.temporary
    assert not folder.exists() and (tmp_path / "logs" / "model").exists()


def test_a_missing_sglang_is_named(monkeypatch, capsys):
    monkeypatch.setattr(server_setup.importlib.util, "find_spec", lambda name: None)
    assert main.main(["demo"]) == 1
    assert "SGLang is not installed in this environment: pip install sglang==0.5.23" in capsys.readouterr().out


def test_a_missing_entry_point_is_named(monkeypatch):
    monkeypatch.setattr(server_setup.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(server_setup.importlib.metadata, "entry_points", lambda group: [])
    assert server_setup.missing_requirement().startswith("sgl-lowlatency is not installed in this environment")
