"""Host emulation without a server around it, for tests that build a step."""

import pytest
import torch

from sgl_lowlatency import config


@pytest.fixture
def emulated(monkeypatch):
    from sgl_lowlatency.runtime import sglang_state
    from sgl_lowlatency.runtime.coverage import Coverage

    monkeypatch.setattr(config, "get", lambda: config.Config(emulate=True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sglang_state, "capturing_graphs", lambda: False)
    monkeypatch.setattr(sglang_state, "metrics_enabled", lambda: False)
    # its line at exit would go to a stream that pytest has closed
    monkeypatch.setattr(Coverage, "start_reporting", lambda self, interval_s, with_metrics: None)
