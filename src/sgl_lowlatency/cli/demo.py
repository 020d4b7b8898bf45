"""Starts the real SGLang HTTP server on a tiny Qwen3 twice, without and with the plugin, and compares what they answer.

On a machine with a GPU the kernels run on it; without one SGLang runs on the CPU and the kernels in host emulation.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from sgl_lowlatency import config
from sgl_lowlatency.cli import openai_client, server_setup
from sgl_lowlatency.cli.openai_client import Answer
from sgl_lowlatency.cli.server_process import ServerFailed, ServerProcess, running, signals_interrupt

MAX_TOKENS = 16
COMPLETIONS = ("the people of water", "once again they came to this old place and")
CHAT = "how many people came?"
TOGETHER = ("one", "two different years", "look at the water")  # sent at the same time: steps of several rows
METRICS_SETTLE_S = 2.0  # the coverage counters are exported every second


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--port, --timeout, --keep-logs and --json."""
    parser.add_argument("--port", type=int, default=0, help="the first server's port, the second takes the next (default: any)")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="seconds a server may take to start (default 180)")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="write the model and the servers' logs there and keep them")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of text")


def run(args: argparse.Namespace) -> int:
    """Runs the demo. Returns 0 when every token agrees as far as float64 decides it and the kernels ran."""
    say = _Reporter(args.json)
    start_s = time.monotonic()
    refusal = server_setup.missing_requirement() or _environment_reason() or _port_reason(args.port)
    if refusal is not None:
        return say.fail(refusal)
    with signals_interrupt(), contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sgl-lowlatency-demo-")))
        directory = args.keep_logs or scratch
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return say.fail(f"--keep-logs {directory} cannot be made: {error.strerror}")
        try:
            return _compare(directory, scratch, args, say, start_s)
        except ServerFailed as error:
            return say.fail(str(error))
        except KeyboardInterrupt:
            return say.fail("interrupted; both servers are stopped")


def _environment_reason() -> str | None:
    """SGLang would log a bad variable of ours, start without the plugin, and fail for another reason."""
    try:
        config.parse(os.environ)
    except ValueError as error:
        return str(error)
    return None


def _port_reason(port: int) -> str | None:
    """Why the servers cannot listen on `port` and the next, None when they can; 0 is any."""
    if port == 0:
        return None
    if not 0 < port < 65535:
        return f"--port {port} is outside 1..65534"
    taken = [str(each) for each in (port, port + 1) if not server_setup.is_free_port(each)]
    return f"port {' and '.join(taken)} of 127.0.0.1 cannot be listened on: pass another --port, or none" if taken else None


def _compare(directory: Path, scratch: Path, args: argparse.Namespace, say: _Reporter, start_s: float) -> int:
    from sgl_lowlatency.cli.greedy_oracle import GreedyOracle
    from sgl_lowlatency.cli.tiny_model import make_tiny_model

    model = directory / "model"
    say.line("making a tiny Qwen3 with real-scale random weights: it runs like a real model, and its words are noise")
    make_tiny_model(model)
    setup = server_setup.server_setup(model)
    setup.environment["TMPDIR"] = str(scratch)  # SGLang leaves sockets and port files there
    say.line(f"SGLang runs on {setup.where}")
    ports = [args.port, args.port + 1] if args.port else [server_setup.free_port(), server_setup.free_port()]

    off = ServerProcess(setup.arguments, ports[0], directory / "standard.log", setup.environment)
    with running(off):
        standard = _ask(off, "standard path", args.timeout, say)
        off.request_stop()
        plugin_arguments = [*setup.arguments, server_setup.PLUGIN_FLAG]
        on = ServerProcess(plugin_arguments, ports[1], directory / "plugin.log", setup.environment)
        with running(on):
            ours = _ask(on, "plugin", args.timeout, say)
            time.sleep(METRICS_SETTLE_S)
            coverage = openai_client.metrics(on.url, "sgl_lowlatency:")
            on.require_alive()
    say.line("both servers are stopped")

    steps = {name: value for name, value in coverage.items() if name.startswith("sgl_lowlatency:decode_steps_total")}
    say.coverage(coverage)
    oracle = GreedyOracle(model)
    verdicts = [say.verdict(prompt, standard[prompt], ours[prompt], oracle) for prompt in standard]
    seconds = time.monotonic() - start_s
    if not steps:
        return say.fail(f"no decode step ran the kernel; the reasons are above and in {on.log.name} (--keep-logs DIR keeps it)")
    if not all(verdicts):
        return say.fail("tokens differ where float64 decides them")
    return say.succeed(len(standard), sum(len(answer.output_ids) for answer in ours.values()), sum(steps.values()), seconds)


def _ask(server: ServerProcess, name: str, timeout_s: float, say: _Reporter) -> dict[str, Answer]:
    """The answers by prompt. Raises ServerFailed when the server does not start, dies, or leaves a request unanswered."""
    say.line(f"starting SGLang, {name}")
    ready_s = server.wait_ready(timeout_s, say.line)
    say.line(f"ready after {ready_s:.0f} s")
    answers = {}
    try:
        for prompt in COMPLETIONS:
            say.start(f"completion {prompt!r}:")
            answers[prompt] = openai_client.complete(server.url, prompt, MAX_TOKENS, say.piece)
        say.start(f"chat {CHAT!r}:")
        answers[CHAT] = openai_client.chat(server.url, CHAT, MAX_TOKENS, say.piece)
        say.line(f"{len(TOGETHER)} completions at once")
        with concurrent.futures.ThreadPoolExecutor(len(TOGETHER)) as pool:
            answers.update(zip(TOGETHER, pool.map(lambda prompt: _complete_silently(server.url, prompt), TOGETHER)))
    except (OSError, http.client.HTTPException) as error:
        raise server.failure(f"a request failed: {error}") from error
    for prompt, answer in answers.items():
        if len(answer.output_ids) != MAX_TOKENS:
            raise server.failure(f"the answer to {prompt!r} ended after {len(answer.output_ids)} of {MAX_TOKENS} tokens")
    return answers


def _complete_silently(url: str, prompt: str) -> Answer:
    return openai_client.complete(url, prompt, MAX_TOKENS, lambda _piece: None)


class _Reporter:
    """Text as things happen, or with `as_json` one object at the end (what happens then goes to stderr)."""

    def __init__(self, as_json: bool):
        self._as_json = as_json
        self._out = sys.stderr if as_json else sys.stdout
        self._report: dict[str, object] = {"requests": []}
        self._line_is_open = False

    def line(self, text: str) -> None:
        self.end()
        print(f"[demo] {text}", file=self._out, flush=True)

    def start(self, text: str) -> None:
        self.end()
        print(f"[demo] {text} ", end="", file=self._out, flush=True)
        self._line_is_open = True

    def piece(self, text: str) -> None:
        print(text.replace("\n", "\\n"), end="", file=self._out, flush=True)

    def end(self) -> None:
        if self._line_is_open:
            print(file=self._out, flush=True)
        self._line_is_open = False

    def coverage(self, samples: dict[str, float]) -> None:
        self.line("where the plugin server's steps ran:")
        for name, value in sorted(samples.items()):
            if "_total" in name:
                self.line(f"  {name.removeprefix('sgl_lowlatency:')} {value:.0f}")
        self._report["coverage"] = samples

    def verdict(self, prompt: str, standard: Answer, ours: Answer, oracle: object) -> bool:
        """Prints how the two answers compare; False when a token differs that float64 decides."""
        wrong = []
        if ours.output_ids == standard.output_ids:
            text = f"{len(ours.output_ids)} tokens equal"
        else:
            choices = oracle.judge(ours.prompt_ids, ours.output_ids)
            wrong = [choice for choice in choices if not choice.is_right]
            first = next(i for i, pair in enumerate(zip(ours.output_ids, standard.output_ids)) if pair[0] != pair[1])
            at = wrong[0] if wrong else choices[first]
            text = (
                f"differs from token {first} on: float64 puts token {at.token} {at.gap:.3f} below the best logit, "
                f"rounding explains {at.bound:.3f}: " + ("WRONG" if wrong else "not decided")
            )
        self.line(f"{prompt!r}: {text}")
        self._report["requests"].append({"prompt": prompt, "verdict": text, "tokens": ours.output_ids, "text": ours.text})
        return not wrong

    def succeed(self, num_requests: int, num_tokens: int, num_steps: float, seconds: float) -> int:
        steps = f"{num_steps:.0f} steps by decode_step"
        self._finish(True, f"OK: {num_requests} requests, {num_tokens} tokens, {steps}, {seconds:.0f} s")
        return 0

    def fail(self, why: str) -> int:
        self._finish(False, f"FAILED: {why}")
        return 1

    def _finish(self, ok: bool, text: str) -> None:
        self.end()
        if self._as_json:
            print(json.dumps({"ok": ok, "message": text, **self._report}))
        else:
            print(f"demo: {text}", flush=True)
