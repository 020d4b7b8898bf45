"""sglang_runner without SGLang's model: a step that is run again meets what it met at first."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang.benchmark import one_batch  # noqa: E402

from benchmark.kernels import sglang_runner  # noqa: E402


@pytest.fixture
def runner(monkeypatch):
    """A model runner whose steps' logits are its Engram history, which they move on as SGLang's decode does."""
    history = torch.tensor([[0, 0], [0, 0]])
    made = SimpleNamespace(model=SimpleNamespace(model=SimpleNamespace(engram_hasher=SimpleNamespace(history=history))))
    made.req_to_token_pool = made.token_to_kv_pool_allocator = SimpleNamespace(clear=lambda: None)
    scheduled = SimpleNamespace(prepare_for_decode=lambda: None)

    def extend(requests, runner):
        history.copy_(torch.tensor([[3, 4], [5, 6]]))
        return torch.tensor([7, 8]), None, scheduled

    def forward(runner, prompts, scheduled, within):
        logits = history.clone()
        history.copy_(torch.stack([history[:, 1], scheduled.input_ids], 1))
        return sglang_runner.Step(prompts, scheduled.input_ids.clone(), logits, None, scheduled, False)

    monkeypatch.setattr(one_batch, "prepare_synthetic_inputs_for_latency_test", lambda *args: [])
    monkeypatch.setattr(one_batch, "extend", extend)
    monkeypatch.setattr(sglang_runner, "_forward", forward)
    return made


def test_a_step_run_again_hashes_the_same_tokens(runner):
    first = sglang_runner.decode(runner, rows=2, context=9, vocab=50)
    assert first.logits.tolist() == [[3, 4], [5, 6]] and sglang_runner.engram_history(runner).tolist() == [[4, 7], [6, 8]]
    second = sglang_runner.again(runner, first)
    third = sglang_runner.again(runner, second)
    assert torch.equal(second.logits, first.logits) and torch.equal(third.logits, first.logits)
    assert sglang_runner.engram_history(runner).tolist() == [[4, 7], [6, 8]], "as behind one step"


def test_a_model_without_engram_has_no_history(runner):
    del runner.model.model.engram_hasher
    assert sglang_runner.engram_history(runner) is None
    assert sglang_runner.decode(runner, rows=2, context=9, vocab=50).history is None
