"""A kernel that computes something else does not get to serve, and one that hangs ends the server with its record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sgl_lowlatency.cli import server_setup
from sgl_lowlatency.cli.server_process import ServerFailed, ServerProcess

LAUNCH_PLANTED = Path(__file__).with_name("launch_planted.py")
START_TIMEOUT_S = 300.0
WITHHELD_SIGNAL, MASK_OFF_BY_ONE, UNSCALED_HEAD = 3, 8, 21  # dialect::Planted


@pytest.mark.parametrize(
    "planted, self_check, message",
    [
        (MASK_OFF_BY_ONE, "1", r"decode_step self-check failed, the server is refused: 1 rows, .* is not within 0\.12"),
        (UNSCALED_HEAD, "1", r"self-check failed, the server is refused: 1 rows, .* FAILED: logits\.relative_l2 \S+ is not within 0\.12 \("),
        (WITHHELD_SIGNAL, "0", r"decode_step stopped: rank 0, SM \d, block \d waited \d+\.\d+ s for word \d+ of edge 'out_proj' of layer 0 \(residual stream after attention\)"),
    ],
    ids=["wrong", "wrong logits", "hanging"],
)
def test_a_planted_kernel_ends_the_server(planted, self_check, message, tiny_model, tmp_path):
    require_refusal(planted, self_check, message, tiny_model, tmp_path)


def require_refusal(planted: int, self_check: str, message: str, model: Path, folder: Path) -> None:
    """A server of `model` with this bug in the kernel ends by itself, and its log has the message."""
    setup = server_setup.server_setup(model)
    if "SGL_LOWLATENCY_EMULATE" not in setup.environment:
        pytest.skip("bugs are planted in host emulation only; a GPU takes a build with SGL_LOWLATENCY_PLANTED")
    arguments = [*setup.arguments, server_setup.PLUGIN_FLAG]
    environment = {**setup.environment, "PLANTED_BUG": str(planted), "SGL_LOWLATENCY_SELF_CHECK": self_check}
    server = ServerProcess(arguments, server_setup.free_port(), folder / "log", environment, [str(LAUNCH_PLANTED)])
    try:
        # SGLang's own warm-up request runs the first decode step, so the server is never ready
        with pytest.raises(ServerFailed, match="exited with code"):
            server.wait_ready(START_TIMEOUT_S, progress=print)
    finally:
        code = server.kill()
    assert code != 0
    log = server.log_text()
    assert re.search(message, log), log[-3000:]
    assert "Scheduler hit an exception" in log
