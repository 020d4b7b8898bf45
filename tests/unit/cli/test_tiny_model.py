"""The tiny checkpoint is a Qwen3 that transformers loads, at a scale where every part of it shows in the logits."""

from __future__ import annotations

import json

import pytest
import torch

from sgl_lowlatency.cli.greedy_oracle import GreedyOracle
from sgl_lowlatency.cli.tiny_model import FP8_CONFIGS, TinyModel, make_tiny_model
from sgl_lowlatency.kernels.decode_step_tensors import MATRICES
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


@pytest.mark.parametrize("weights", FP8_CONFIGS)
def test_fp8_projections_are_the_bf16_ones_rounded(directory, tmp_path, weights):
    """Names and shapes as FP8 checkpoints have them; the oracle reads matrices that differ by e4m3's rounding."""
    from safetensors.torch import load_file

    make_tiny_model(tmp_path, weights=weights)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    bf16, fp8 = load_file(directory / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    suffix, shape = {"fp8_block": ("_scale_inv", (4, 2)), "fp8_tensor": ("_scale", ())}[weights]
    assert {name for name in fp8 if name not in bf16} == {f"{name}{suffix}" for name in bf16 if name.endswith("_proj.weight")}
    assert fp8[f"model.layers.1.mlp.up_proj.weight{suffix}"].shape == shape
    assert all(torch.equal(fp8[name], bf16[name]) for name in bf16 if not name.endswith("_proj.weight"))
    oracle, exact = GreedyOracle(tmp_path), GreedyOracle(directory)
    assert oracle._weights.format == {"fp8_block": "fp8_block", "fp8_tensor": "fp8_channel"}[weights]
    for ours, theirs in zip(oracle._weights.layers, exact._weights.layers, strict=True):
        for name in MATRICES:
            meant, original = ours.dequantized(name, torch.float64), theirs.dequantized(name, torch.float64)
            assert 0.01 < float((meant - original).norm() / original.norm()) < 0.04, name
    logits, bounds = oracle.logits([5, 6, 7], [8, 9])
    assert bool(logits.isfinite().all()) and float(bounds.max()) < float(logits.std())


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
