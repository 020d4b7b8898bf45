"""Shapes that the bench measures: presets and configs by family. Oracle: the families' definitions."""

import dataclasses
import json

import pytest

from sgl_lowlatency.bench import shapes
from sgl_lowlatency.bench.shapes import PRESETS, cut, load_shape
from sgl_lowlatency.plan.presets import NAMED

LLAMA_1B = dict(
    architectures=["LlamaForCausalLM"], num_hidden_layers=16, hidden_size=2048, num_attention_heads=32, num_key_value_heads=8,
    head_dim=64, intermediate_size=8192, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
)  # fmt: skip


def write(folder, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_1B | changes))
    return folder


def test_presets_have_their_families_and_the_geometry_of_a_plan():
    assert {name for name, shape in PRESETS.items() if shape.has_qk_norm} == {n for n in NAMED if n.startswith("qwen3")}
    assert [name for name, shape in PRESETS.items() if shape.has_qkv_bias] == ["qwen2.5-7b"]
    assert {name: shape.geometry for name, shape in PRESETS.items()} == NAMED


@pytest.mark.parametrize("of", ["file", "folder"])
def test_a_config_gives_the_shape_of_the_preset(tmp_path, of):
    folder = write(tmp_path / "my-llama")
    assert load_shape(str(folder / "config.json" if of == "file" else folder)) == ("my-llama", PRESETS["llama-3.2-1b"])


def test_qwen2_has_a_bias_of_q_k_and_v(tmp_path):
    _, shape = load_shape(str(write(tmp_path, architectures=["Qwen2ForCausalLM"])))
    assert (shape.has_qk_norm, shape.has_qkv_bias) == (False, True)
    assert shape.layer_weight_elements - PRESETS["llama-3.2-1b"].layer_weight_elements == (32 + 2 * 8) * 64


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, r"architectures \['GptOssForCausalLM'\] is not one of Qwen3ForCausalLM, Llama"),
        ({"architectures": None}, r"architectures \[\] is not one of"),
        ({"head_dim": 96}, "head_dim 96 is not one of 64, 128"),
        ({"hidden_size": None}, "hidden_size is None"),
    ],
)
def test_a_config_that_the_kernel_cannot_run_is_refused_with_the_reason(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        load_shape(str(write(tmp_path, **changes)))


def test_an_unknown_name_lists_the_presets():
    with pytest.raises(ValueError, match="gpt-2 is neither one of qwen3-0.6b, .*qwen2.5-7b, qwen3-30b-a3b, qwen3-235b-a22b nor a config.json"):
        load_shape("gpt-2")


def test_a_cut_keeps_everything_but_layers():
    shape = PRESETS["qwen3-8b"]
    assert cut(shape, None) == shape
    assert dataclasses.replace(cut(shape, 3), num_layers=36) == shape
    for layers in (0, 37):
        with pytest.raises(ValueError, match=f"--layers {layers} is not within 1..36"):
            cut(shape, layers)


def test_every_architecture_that_the_plugin_serves_has_a_shape():
    from sgl_lowlatency.plugin import NVIDIA_SPECS

    assert set(shapes.FAMILIES) == set(NVIDIA_SPECS)


def test_experts_that_rows_take():
    """One row takes top_k; many rows all that there are. Between them, by hand: 128 (1 - (15 / 16)^2)."""
    shape = PRESETS["qwen3-30b-a3b"]
    assert shape.expected_experts(1) == 8 and shape.expected_experts(2) == pytest.approx(15.5) and shape.expected_experts(1000) == pytest.approx(128)
    assert PRESETS["qwen3-8b"].expected_experts(3) == PRESETS["qwen3-8b"].expert_elements == 0
    assert shape.expert_elements == 3 * 2048 * 768
    assert shape.layer_matrix_elements == 2048 * (2 * 4096 + 2 * 512) + 128 * 2048
