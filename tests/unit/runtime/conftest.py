"""The runtime's tests drive it as SGLang does: a forward context with an attention backend, a KV pool, a ForwardBatch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")
sys.path.insert(0, str(Path(__file__).parent))  # tiny_serving.py


@pytest.fixture
def make_serving():
    """make_serving(**sizes) -> TinyServing, its attention backend being the running forward's."""
    from sglang.srt.model_executor.forward_context import ForwardContext, set_forward_context
    from tiny_serving import TinyServing

    previous = []

    def make(**sizes):
        serving = TinyServing(**sizes)
        previous.append(set_forward_context(ForwardContext(attn_backend=serving.backend)))
        return serving

    yield make
    if previous:
        set_forward_context(previous[0])


@pytest.fixture
def serving(make_serving):
    return make_serving()
