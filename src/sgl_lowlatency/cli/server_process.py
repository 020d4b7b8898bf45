"""A real SGLang server as a child process: started in its own process group, watched until ready, gone when stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

HOST = "127.0.0.1"
POLL_INTERVAL_S = 0.5
GRACEFUL_EXIT_S = 30.0  # SGLang looks for SIGTERM every 5 s, then gives its schedulers 15 s
TAIL_LINES = 40
GUARD = "import os, signal, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), signal.SIGKILL)"


class ServerFailed(RuntimeError):
    """The server did not come up or died; the message ends with the last lines of its log."""


class ServerProcess:
    """One `python -m sglang.launch_server` on 127.0.0.1:`port`, its output in `log`.

    launcher: what Python runs instead, with the same arguments.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        port: int,
        log: Path,
        environment: Mapping[str, str],
        launcher: Sequence[str] = ("-m", "sglang.launch_server"),
    ):
        self.port, self.log = port, log
        command = [sys.executable, *launcher, *arguments, "--host", HOST, "--port", str(port)]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # one process group for the server and all its workers
            )
        # Nothing outlives us, however we end: the guard's input closes with us, and then it kills the group.
        self._guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, str(self._process.pid)], stdin=subprocess.PIPE, start_new_session=True
        )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout_s: float, progress: Callable[[str], None]) -> float:
        """Returns the seconds until the server answers /health; calls `progress` with a line about every ten seconds.

        Raises ServerFailed when the process ends or `timeout_s` passes first.
        """
        start_s = told_s = time.monotonic()
        while not self._healthy():
            now_s = time.monotonic()
            if (code := self._process.poll()) is not None:
                raise self.failure(f"the server exited with code {code} before it was ready")
            if now_s - start_s > timeout_s:
                raise self.failure(f"the server was not ready within {timeout_s:.0f} s")
            if now_s - told_s >= 10.0:
                told_s = now_s
                progress(f"still starting, {now_s - start_s:.0f} s: {self._last_line()}")
            time.sleep(POLL_INTERVAL_S)
        return time.monotonic() - start_s

    def require_alive(self) -> None:
        """Raises ServerFailed when the server process has ended."""
        if (code := self._process.poll()) is not None:
            raise self.failure(f"the server exited with code {code}")

    def request_stop(self) -> None:
        """Asks the server to finish and exit; `stop` waits for it."""
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> int:
        """Stops the server and everything it started; returns its exit code. Safe to call twice and while it starts."""
        self.request_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACEFUL_EXIT_S)
        return self.kill()

    def kill(self) -> int:
        """Kills what is left of the server's process group and returns the server's exit code."""
        self._guard.kill()
        self._guard.communicate()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def failure(self, what: str) -> ServerFailed:
        """The exception that says `what`, followed by the last lines of the server's log."""
        lines = [line for line in self.log_text().splitlines() if line.strip()][-TAIL_LINES:]
        return ServerFailed(f"{what}\n--- last lines of {self.log} ---\n" + "\n".join(lines))

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False  # not listening yet, or 503 while it warms up

    def _last_line(self) -> str:
        lines = [line for line in self.log_text().splitlines() if line.startswith("[")]  # SGLang's, not a warning's source
        return lines[-1][:120] if lines else "no output yet"


@contextlib.contextmanager
def running(server: ServerProcess) -> Iterator[ServerProcess]:
    """Stops `server` at the end of the block; on an exception at once, without waiting for it to finish its requests."""
    try:
        yield server
    except BaseException:
        server.kill()
        raise
    server.stop()


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM, and SIGINT even where a shell left it ignored, stop the servers as Ctrl-C does."""

    def interrupt(_signum: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
