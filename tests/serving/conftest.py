"""One pair of real SGLang HTTP servers for all serving tests: the standard path, and the plugin (host emulation without a GPU)."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

pytest.importorskip("sglang")
sys.path.insert(0, str(Path(__file__).parent))  # generate.py, serving_pair.py

from serving_pair import CHUNK, Servers  # noqa: E402

from sgl_lowlatency.cli import server_setup  # noqa: E402
from sgl_lowlatency.cli.greedy_oracle import GreedyOracle  # noqa: E402
from sgl_lowlatency.cli.server_process import ServerProcess  # noqa: E402
from sgl_lowlatency.cli.tiny_model import make_tiny_model  # noqa: E402

START_TIMEOUT_S = 300.0
EXTRA = ("--chunked-prefill-size", str(CHUNK))


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.serving)
    # servers of their own first: they need not run beside the pair that then stays up for everything else
    items.sort(key=lambda item: "servers" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-qwen3")
    make_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def servers(tiny_model, tmp_path_factory):
    logs = tmp_path_factory.mktemp("servers")
    setup = server_setup.server_setup(tiny_model, EXTRA)
    started, children = [], []
    try:
        for name, flags in (("off", []), ("on", [server_setup.PLUGIN_FLAG])):
            arguments = [*setup.arguments, *flags]
            started.append(ServerProcess(arguments, server_setup.free_port(), logs / f"{name}.log", setup.environment))
        for server in started:
            server.wait_ready(START_TIMEOUT_S, progress=print)
        yield Servers(*started, tiny_model, GreedyOracle(tiny_model))
        for server in started:
            server.require_alive()
            children += psutil.Process(server.pid).children(recursive=True)
        for server in started:
            server.request_stop()
    finally:
        for server in started:
            server.stop()
    assert children and not [child for child in children if _runs(child)], "a stopped server left processes behind"
    assert "sgl-lowlatency coverage: decode_step ran" in started[1].log_text(), "no coverage line at exit"
    assert "coverage" not in started[0].log_text()


@pytest.fixture
def progress(request):
    """Prints a line at once, past pytest's capture: a start that takes minutes is seen to take them."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{request.node.name}: {line}", end="", flush=True)

    return say


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
