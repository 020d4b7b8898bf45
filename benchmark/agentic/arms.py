"""The two servers of a comparison, started here or attached to, and what must hold of them before and after a run."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmark.agentic.setup import Setup
from benchmark.serve import coverage, server, warm_kernels
from benchmark.serve.client import Client, random_prompt
from sgl_lowlatency.cli import server_setup
from sgl_lowlatency.cli.server_process import ServerProcess, running

OFF, ON = "off", "on"
WARM_LIMIT_S = 30.0  # after the servers are ready, for what still compiles: nothing may run beside a measurement
FLAG = "enable_nvidia_megakernel"
LOCAL = ("127.0.0.1", "localhost", "::1")
# Of /server_info: what may differ between two servers that do the same work, the plugin's flag apart.
MAY_DIFFER = {FLAG, "host", "port", "nccl_port", "random_seed", "launch_command", "internal_states", "startup_time"}
MAY_DIFFER |= {"grpc_port", "smg_http_sidecar_port"}
NAMED = {"model_path", "version", "served_model_name", "tokenizer_path"}  # compared by themselves, or follow from model_path


class ArmsRefused(RuntimeError):
    """The servers cannot be compared; the message has every reason, a line each."""


@dataclass(frozen=True)
class Arm:
    """One server. process: None where it was attached to."""

    name: str
    url: str
    client: Client
    process: ServerProcess | None = None

    def info(self) -> dict:
        """SGLang's own account of its arguments. Raises ArmsRefused when the server cannot be reached."""
        return json.loads(self._get("/server_info"))

    def counts(self) -> coverage.Counts:
        """The plugin's counters. Raises ArmsRefused when the server cannot be reached or exports no metrics."""
        return coverage.parse(server.parse_metrics(self._get("/metrics").decode()))

    def _get(self, path: str) -> bytes:
        try:
            status, payload = self.client.call("GET", path, timeout_s=20)
        except OSError as error:
            raise ArmsRefused(f"{self.name}: no server answers at {self.url}: {error}") from None
        if status != 200:
            hint = "; start it with --enable-metrics" if path == "/metrics" else ""
            raise ArmsRefused(f"{self.name}: {self.url}{path} answers {status}{hint}")
        return payload


def attach(name: str, url: str) -> Arm:
    """An arm at http://127.0.0.1:PORT. Raises ArmsRefused for another host: what GPU it has could not be told."""
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or port is None or parts.path not in ("", "/"):
        raise ArmsRefused(f"--{name}-url {url} is not of the form http://127.0.0.1:PORT")
    if parts.hostname not in LOCAL:
        raise ArmsRefused(f"--{name}-url {url}: only servers of this host are attached to, or a result could not name their GPU")
    return Arm(name, f"http://{parts.hostname}:{port}", Client(port, host=parts.hostname, timeout_s=3600))


def launch_arguments(setup_arguments: list[str], name: str) -> list[str]:
    """The arguments of an arm's server."""
    return [*setup_arguments, server_setup.PLUGIN_FLAG] if name == ON else list(setup_arguments)


@contextlib.contextmanager
def started(made: Setup, logs: Path, limit_s: float, say: Callable[[str], None]) -> Iterator[tuple[Arm, Arm]]:
    """(off, on), both ready, started together; stopped at the end of the block, killed on an exception. Raises ServerFailed."""
    with _up(made, {OFF: logs / f"{OFF}.log", ON: logs / f"{ON}.log"}, limit_s, say, compiles=True) as (off, on):
        yield off, on


@contextlib.contextmanager
def alone(made: Setup, name: str, log: Path, limit_s: float, say: Callable[[str], None], *, compiles: bool) -> Iterator[Arm]:
    """The same of one arm. compiles: kernels that are compiled at a first start, beside it."""
    with _up(made, {name: log}, limit_s, say, compiles=compiles) as (arm,):
        yield arm


@contextlib.contextmanager
def _up(made: Setup, logs: dict[str, Path], limit_s: float, say: Callable[[str], None], *, compiles: bool) -> Iterator[list[Arm]]:
    for log in logs.values():
        log.parent.mkdir(parents=True, exist_ok=True)
    folder = next(iter(logs.values())).parent
    warming = warm_kernels.start(made.kernels_of, [], algorithm=None, work=folder) if made.kernels_of and compiles else []
    with contextlib.ExitStack() as stack:
        # SGLang leaves its sockets and counters' files behind; the path of a socket must be short
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="sgl-lowlatency-", ignore_cleanup_errors=True))
        arms, environment = [], made.environment | {"TMPDIR": scratch}
        for name, log in logs.items():
            process = ServerProcess(launch_arguments(made.arguments, name), server_setup.free_port(), log, environment)
            stack.enter_context(running(process))
            arms.append(Arm(name, process.url, Client(process.port, timeout_s=3600), process))
            say(f"{name}: starting SGLang at {process.url}, log in {process.log.name}")
        for arm in arms:
            arm.process.wait_ready(limit_s, lambda line, name=arm.name: say(f"{name}: {line}"))
            say(f"{arm.name}: ready")
        if warming:
            say("kernels: " + warm_kernels.finish(warming, limit_s=WARM_LIMIT_S))
        yield arms
        for arm in arms:  # asked together, they end side by side
            arm.process.request_stop()


def warm(*arms: Arm, longest: int, widths: int, vocab: int) -> None:
    """Runs what a measurement must not be the first to run: steps of 1 to `widths` requests, a prompt of `longest` tokens and its return
    from the prefix cache. Raises RuntimeError with the server's words."""
    for arm in arms:
        for width in range(1, widths + 1):
            arm.client.timed([random_prompt(4, vocab=vocab, seed=width * 100 + row) for row in range(width)], 3)
        for _ in range(2):
            arm.client.timed([random_prompt(longest, vocab=vocab, seed=0)], 2)


@dataclass(frozen=True)
class Account:
    """What a server says of itself, also when it is gone. counts: whether it exports the plugin's counters. startup: what the plugin logged at its
    start, where the log is ours."""

    info: dict
    counts: bool
    startup: tuple[str, ...]
    attached: bool


def account_of(arm: Arm) -> Account:
    """Raises ArmsRefused when the server cannot be reached or exports no metrics."""
    lines = arm.process.log_text().splitlines() if arm.process else []
    told = [line[:400] for line in lines if re.search(server.STARTUP, line) and "server_args=" not in line]
    return Account(arm.info(), bool(arm.counts().seen), tuple(told[:20]), arm.process is None)


def compare(off: Account | None, on: Account | None) -> None:
    """Raises ArmsRefused with every reason why the two cannot be compared; of one alone, what is wrong with it."""
    problems = []
    if off and on:
        left, right = off.info, on.info
        if left.get("model_path") != right.get("model_path"):
            problems.append(f"different models on the arms: {left.get('model_path')} off, {right.get('model_path')} on")
        if left.get("version") != right.get("version"):
            problems.append(f"different SGLang on the arms: {left.get('version')} off, {right.get('version')} on")
        others = sorted((left.keys() | right.keys()) - MAY_DIFFER - NAMED)
        problems += [f"different {key} on the arms: {left.get(key)} off, {right.get(key)} on" for key in others if left.get(key) != right.get(key)]
    if off and off.info.get(FLAG):
        problems.append("the off server has the plugin's flag, --enable-nvidia-megakernel")
    if on and not on.info.get(FLAG):
        problems.append("plugin not active: the on server was started without --enable-nvidia-megakernel")
    elif on and not on.counts:
        problems.append("plugin not active: the on server exports no sgl_lowlatency counters")
    if off and off.counts:
        problems.append("the off server exports sgl_lowlatency counters: the plugin runs there")
    if problems:
        raise ArmsRefused("\n".join(problems))


TOLD = ("version", "dtype", "quantization", "kv_cache_dtype", "tp_size", "attention_backend", "page_size", "context_length", "max_total_num_tokens")
TOLD += ("chunked_prefill_size", "max_running_requests", "speculative_algorithm", "speculative_num_draft_tokens", "disable_radix_cache")


def told(off: Account, on: Account) -> dict:
    """What the report says of the servers: arguments that both share, and what the plugin logged at its start. Raises ArmsRefused as `compare`."""
    compare(off, on)
    return {"arguments": {key: off.info.get(key) for key in TOLD}, "startup": list(on.startup), "attached": on.attached}
