"""The tiny checkpoint is a Qwen3 that transformers loads, at a scale where every part of it shows in the logits."""

from __future__ import annotations

import json

import pytest
import torch

from sgl_lowlatency.cli.greedy_oracle import GreedyOracle
from sgl_lowlatency.cli.tiny_model import TinyModel, make_tiny_model
from sgl_lowlatency.kernels.geometry import Geometry

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(directory)
    return directory


def test_the_kernel_can_run_it(directory):
    config = transformers.AutoConfig.from_pretrained(directory)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert Geometry.from_hf_config(config).reasons() == []


def test_the_same_seed_makes_the_same_weights(directory, tmp_path):
    from safetensors.torch import load_file

    make_tiny_model(tmp_path / "again")
    make_tiny_model(tmp_path / "other", seed=1)
    first, again, other = (load_file(d / "model.safetensors") for d in (directory, tmp_path / "again", tmp_path / "other"))
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_tied_head_has_no_head_of_its_own(tmp_path):
    from safetensors.torch import load_file

    make_tiny_model(tmp_path, TinyModel(tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


def test_the_tokenizer_keeps_text_and_renders_chats(directory):
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    text = "the people of water, héllo ✓"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer) <= TinyModel.vocab_size and tokenizer("<|im_end|>")["input_ids"] == [2]


def test_the_oracle_is_transformers_forward(directory):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    prompt, output = [7, 300, 45, 9], [11, 12, 13]
    with torch.no_grad():
        expected = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    exact, bounds = GreedyOracle(directory).logits(prompt, output)
    assert torch.allclose(exact, expected, atol=1e-4), float((exact - expected).abs().max())
    assert bounds.shape == (3,) and 0 < float(bounds.min()) and float(bounds.max()) < float(exact.std())


def test_context_decides_the_logits(directory):
    """A token attends to what came before it: other contexts move its logits by more than rounding does."""
    oracle = GreedyOracle(directory)
    one, bounds = oracle.logits([5, 6, 7, 8], [9])
    other, _ = oracle.logits([105, 6, 7, 8], [9])
    assert float((one - other).abs().max()) > 3 * float(bounds[0])
