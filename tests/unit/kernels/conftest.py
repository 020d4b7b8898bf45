"""A HIP runtime for tests of what is launched through it."""

import pytest
from hip_stub import build

from sgl_lowlatency.kernels import hip


@pytest.fixture
def log(tmp_path, monkeypatch):
    """The calls so far, as lines."""
    path = tmp_path / "log"
    monkeypatch.setenv("STUB_LOG", str(path))
    return lambda: path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def runtime(tmp_path, log):
    return hip.HipRuntime(build(tmp_path))
