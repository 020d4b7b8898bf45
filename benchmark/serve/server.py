"""Real SGLang HTTP servers as children: start, wait, read the log, stop, nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmark import random_weights
from benchmark.common import deadline
from benchmark.serve.client import Client

MAX_RUNNING = 16  # requests a server admits, the widest step of the kernel
FLAG = "--enable-nvidia-megakernel"
STARTUP = r"megakernel|lowlatency|decode_step|self-check"  # log lines that tell how the plugin started


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(work: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
    """The child's environment: this process's, the load hook first on PYTHONPATH, nothing fetched from anywhere."""
    env = dict(os.environ)
    path = [random_weights.install_hook(work / "hook"), *filter(None, [env.get("PYTHONPATH")])]
    env |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    env |= {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}  # else a crashing server sleeps a minute before it exits
    return env | (extra or {})


def launch_command(model: Path, port: int | str, arguments: list[str]) -> list[str]:
    """The command of a server of `model` that takes and returns token ids."""
    head = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--skip-tokenizer-init"]
    return [*head, "--host", "127.0.0.1", "--port", str(port), *arguments]


class Server:
    """One server process. `name` names its log, `work`/`name`.log."""

    def __init__(self, name: str, model: Path, arguments: list[str], *, work: Path, env: dict[str, str] | None = None) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.name, self.port = name, free_port()
        self.ready_s: float | None = None  # seconds from the start of the process until it answered, once it did
        self.log_path = work / f"{name}.log"
        self.client = Client(self.port)
        self.command = launch_command(model, self.port, arguments)
        self.started = time.monotonic()
        with self.log_path.open("wb") as log:
            self.process = deadline.spawn(self.command, stdout=log, stderr=subprocess.STDOUT, env=environment(work, env))

    def log(self) -> str:
        """Everything the server and its children have printed."""
        return self.log_path.read_text(errors="replace")

    def tail(self, lines: int = 25) -> str:
        """The last lines of the log."""
        return "\n".join(line[:300] for line in self.log().splitlines()[-lines:])

    def last_words(self) -> str:
        """SGLang's last log line, not a warning's or a progress bar's."""
        return ["no log line yet", *self.grep(r"^\[\d{4}-")][-1][:200]

    def grep(self, pattern: str) -> list[str]:
        """The log lines that match a regular expression."""
        return [line for line in self.log().splitlines() if re.search(pattern, line)]

    def answers(self) -> bool:
        """Whether /health answers 200 now, which `ready_s` then tells. Raises RuntimeError with the end of the log when the server has
        exited."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} exited with {self.process.returncode}:\n{self.tail()}")
        try:
            status, _ = self.client.call("GET", "/health", timeout_s=5)
        except OSError:
            return False  # not listening yet
        if status == 200 and self.ready_s is None:
            self.ready_s = time.monotonic() - self.started
        return status == 200

    def wait_ready(self, limit_s: float) -> float:
        """Wait for /health to answer 200; returns the seconds since start.

        Raises RuntimeError with the end of the log when the server exits or is not ready in time."""
        wait_ready((self,), limit_s)
        return self.ready_s

    def wait_exit(self, limit_s: float) -> int | None:
        """The exit status, or None when the server still runs after `limit_s`."""
        try:
            return self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace_s: float = 20.0) -> int:
        """End the server and all its children; returns its exit status."""
        return deadline.stop(self.process, grace_s=grace_s)

    def metrics(self) -> dict[str, float]:
        """Prometheus samples, "name{labels}" -> value. Empty when the server was started without --enable-metrics."""
        status, payload = self.client.call("GET", "/metrics", timeout_s=10)
        return parse_metrics(payload.decode()) if status == 200 else {}


def parse_metrics(text: str) -> dict[str, float]:
    """The samples of a Prometheus text page."""
    samples = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.rpartition(" ")
            samples[key] = float(value)
    return samples


def gpu_processes() -> list[str]:
    """nvidia-smi's compute processes, one line each; empty on a machine without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return [line for line in done.stdout.splitlines() if line.strip()]


def gpu_memory_mib() -> int | None:
    """MiB in use on GPU 0, or None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    return int(done.stdout.split()[0])


def gpu_arguments(*, context: int, max_batch: int, max_tokens: int, radix: bool = False) -> list[str]:
    """Server arguments of the GPU measurements: full decode graphs up to `max_batch`, no prefill graphs, a pool of `max_tokens` tokens."""
    arguments = [
        "--context-length",
        str(context),
        "--max-running-requests",
        str(MAX_RUNNING),
        "--max-total-tokens",
        str(max_tokens),
    ]
    arguments += ["--cuda-graph-max-bs-decode", str(max_batch), "--cuda-graph-backend-prefill", "disabled"]
    arguments += ["--mem-fraction-static", "0.9", "--disable-flashinfer-autotune", "--sampling-backend", "pytorch"]
    arguments += ["--grammar-backend", "none", "--enable-metrics", "--watchdog-timeout", "300", "--random-seed", "1"]
    return arguments if radix else [*arguments, "--disable-radix-cache"]


def cpu_arguments(*, context: int, max_batch: int, max_tokens: int, radix: bool = False) -> list[str]:
    """The same for a machine without a GPU: CPU device, torch attention, no graphs."""
    arguments = ["--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.3"]
    arguments += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    arguments += [
        "--context-length",
        str(context),
        "--max-running-requests",
        str(MAX_RUNNING),
        "--max-total-tokens",
        str(max_tokens),
    ]
    arguments += [
        "--grammar-backend",
        "none",
        "--sampling-backend",
        "pytorch",
        "--enable-metrics",
        "--random-seed",
        "1",
    ]
    return arguments if radix else [*arguments, "--disable-radix-cache"]


def wait_ready(servers: Sequence[Server], limit_s: float) -> None:
    """Wait until all of them answer, each asked about every quarter of a second; says every 15 s what those that do not logged last.

    Raises RuntimeError with the end of the log when one exits, or is not ready `limit_s` after its start."""
    said = time.monotonic()
    while waiting := [server for server in servers if not server.answers()]:
        for server in waiting:
            if time.monotonic() - server.started > limit_s:
                raise RuntimeError(f"{server.name} is not ready after {limit_s:.0f} s:\n{server.tail()}")
        if time.monotonic() - said >= 15:
            said = time.monotonic()
            for server in waiting:
                deadline.say(f"{server.name} is starting: {server.last_words()}")
        time.sleep(0.25)


def start_pair(
    model: Path, arguments: list[str], *, work: Path, limit_s: float, env: dict[str, str] | None = None
) -> tuple[Server, Server]:
    """The standard server and the plugin's server of one model on the same GPUs, started together, both ready. Raises RuntimeError as
    `wait_ready`."""
    off = Server("off", model, arguments, work=work, env=env)
    on = Server("on", model, [*arguments, FLAG], work=work, env=env)
    wait_ready((off, on), limit_s)
    for server in (off, on):
        deadline.say(f"{server.name}: ready after {server.ready_s:.1f} s")
    for line in on.grep(STARTUP):
        if "server_args=" not in line:
            deadline.say("on:", line[:400])
    return off, on


def stop_pair(pair: Sequence[Server]) -> dict[str, int]:
    """Exit status by name; the servers end side by side."""
    with ThreadPoolExecutor(len(pair)) as pool:
        return dict(zip([one.name for one in pair], pool.map(Server.stop, pair)))
