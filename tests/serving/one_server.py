"""One real server of a tiny model with the plugin: greedy answers to random prompts, and what its log says of the steps."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from generate import generate

from sgl_lowlatency.cli import server_setup
from sgl_lowlatency.cli.server_process import ServerProcess, running
from sgl_lowlatency.cli.tiny_model import TinyModel

START_TIMEOUT_S = 300.0
LENGTHS, NEW_TOKENS = (1, 63, 130), 12
_COVERAGE = r"coverage: decode_step ran (\d+) decode steps .*SGLang's forward ran \d+ eager steps \((.*)\)"


def start(model: Path, folder: Path, *extra: str, num_ranks: int = 1) -> ServerProcess:
    """The server, starting; `extra` are more of its arguments. folder: of the log."""
    setup = server_setup.server_setup(model, extra, num_ranks)
    folder.mkdir(parents=True, exist_ok=True)
    return ServerProcess([*setup.arguments, server_setup.PLUGIN_FLAG], server_setup.free_port(), folder / "log", setup.environment)


def ask(server: ServerProcess, start_limit_s: float, progress: Callable[[str], None]):
    """(answers, log): prompts of LENGTHS tokens one after the other, NEW_TOKENS each; the server stopped."""
    prompts = random.Random(5)
    with running(server):
        server.wait_ready(start_limit_s, progress)
        prompt_ids = [[prompts.randrange(3, TinyModel.vocab_size) for _ in range(length)] for length in LENGTHS]
        answers = [generate(server.url, ids, NEW_TOKENS) for ids in prompt_ids]
        server.require_alive()
        server.request_stop()
    return answers, server.log_text()


def serve(model: Path, folder: Path):
    """`ask` of a server of its own."""
    return ask(start(model, folder), START_TIMEOUT_S, print)


def require_every_decode_step(log: str) -> None:
    """The kernel ran the decode steps of all answers; SGLang's own warm-up request adds some. What it did not run is prefill."""
    steps, others = re.search(_COVERAGE, log).groups()
    assert int(steps) >= len(LENGTHS) * (NEW_TOKENS - 1)
    assert re.fullmatch(r"prefill: \d+", others), others
