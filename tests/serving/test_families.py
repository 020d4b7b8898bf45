"""A real server of every other family than the pair's: its tokens judged by float64, every decode step in the kernel."""

from __future__ import annotations

import pytest
from one_server import NEW_TOKENS, require_every_decode_step, serve

from sgl_lowlatency.cli.greedy_oracle import GreedyOracle
from sgl_lowlatency.cli.tiny_model import make_tiny_model
from sgl_lowlatency.guard.family import LLAMA, QWEN2


@pytest.mark.parametrize("family", [LLAMA, QWEN2], ids=lambda family: family.name)
def test_tokens_are_what_float64_decides(family, tmp_path):
    model = tmp_path / "model"
    make_tiny_model(model, family=family, seed=5)
    answers, log = serve(model, tmp_path)
    oracle = GreedyOracle(model)
    for answer in answers:
        assert len(answer.output_ids) == NEW_TOKENS
        assert [choice for choice in oracle.judge(answer.prompt_ids, answer.output_ids) if not choice.is_right] == []
    assert f"sgl_lowlatency decode_step ({family.name})" in log
    require_every_decode_step(log)
