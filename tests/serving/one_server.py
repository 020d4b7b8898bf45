"""One real server of a tiny model with the plugin: greedy answers to random prompts, and what its log says of the steps."""

from __future__ import annotations

import random
import re
from pathlib import Path

from generate import generate

from sgl_lowlatency.cli import server_setup
from sgl_lowlatency.cli.server_process import ServerProcess, running
from sgl_lowlatency.cli.tiny_model import TinyModel

START_TIMEOUT_S = 300.0
LENGTHS, NEW_TOKENS = (1, 63, 130), 12
_COVERAGE = r"coverage: decode_step ran (\d+) decode steps .*SGLang's forward ran \d+ eager steps \((.*)\)"


def serve(model: Path, folder: Path):
    """(answers, log): prompts of LENGTHS tokens one after the other, NEW_TOKENS each; the server stopped. folder: of the log."""
    setup, prompts = server_setup.server_setup(model), random.Random(5)
    server = ServerProcess([*setup.arguments, server_setup.PLUGIN_FLAG], server_setup.free_port(), folder / "log", setup.environment)
    with running(server):
        server.wait_ready(START_TIMEOUT_S, progress=print)
        prompt_ids = [[prompts.randrange(3, TinyModel.vocab_size) for _ in range(length)] for length in LENGTHS]
        answers = [generate(server.url, ids, NEW_TOKENS) for ids in prompt_ids]
        server.require_alive()
        server.request_stop()
    return answers, server.log_text()


def require_every_decode_step(log: str) -> None:
    """The kernel ran the decode steps of all answers; SGLang's own warm-up request adds some. What it did not run is prefill."""
    steps, others = re.search(_COVERAGE, log).groups()
    assert int(steps) >= len(LENGTHS) * (NEW_TOKENS - 1)
    assert re.fullmatch(r"prefill: \d+", others), others
