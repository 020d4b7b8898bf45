import math

import pytest

from benchmark import models, random_weights
from sgl_lowlatency.bench import floors


def elements(shape):
    return sum(math.prod(dims) for _, dims, _, _ in random_weights.tensor_plan(models.hf_config(shape)))


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19), ("qwen3-14b", 14.77), ("qwen3-32b", 32.76), ("qwen3-30b-a3b", 30.53)]
)
def test_parameters_are_those_of_the_named_models(name, billions):
    assert elements(models.SHAPES[name]) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
def test_step_bytes_with_head_are_the_tensors_read(name):
    shape = models.SHAPES[name]
    read = elements(shape) - (0 if shape.tied_head else shape.vocab * shape.hidden)  # of an untied embedding one row is read
    got = floors.step_bytes(shape, rows=1, context=0, with_head=True)
    assert got == 2 * (read + shape.hidden)


def test_step_bytes_of_a_moe_model_are_those_of_the_experts_that_rows_take():
    """Of 128 experts a layer the step reads 8 at one row, or as many as are given; everything else once."""
    shape = models.SHAPES["qwen3-30b-a3b"]
    rest = elements(shape) - 48 * 128 * 3 * 2048 * 768 - shape.vocab * shape.hidden
    for rows, experts, counted in ((1, None, 8), (4, 20.5, 20.5)):
        got = floors.step_bytes(shape, rows=rows, context=0, with_head=True, experts=experts)
        assert got == 2 * (rest + 48 * counted * 3 * 2048 * 768 + rows * shape.hidden)


def test_a_moe_config_is_read_as_the_shape_it_was_made_of():
    config = models.hf_config(models.SHAPES["qwen3-30b-a3b"])
    assert (config["architectures"], config["model_type"]) == (["Qwen3MoeForCausalLM"], "qwen3_moe")
    assert models.Shape.from_config(config) == models.SHAPES["qwen3-30b-a3b"]


def test_fp8_weights_and_their_scales_are_counted():
    """Qwen3-8B: matrices of 4,096 x 6,144, 4,096 x 4,096, 4,096 x 24,576 and 12,288 x 4,096 a layer, half of their bytes and a scale a block."""
    shape = models.SHAPES["qwen3-8b"]
    bf16, fp8 = (floors.step_bytes(shape, rows=2, context=100, with_head=False, fp8=fp8) for fp8 in (False, True))
    blocks = 32 * 48 + 32 * 32 + 32 * 192 + 96 * 32
    assert bf16 - fp8 == 36 * blocks * (128 * 128 - 4)


def test_a_cached_token_costs_k_and_v_of_every_layer():
    shape = models.SHAPES["qwen3-8b"]
    more = floors.step_bytes(shape, rows=3, context=11, with_head=False) - floors.step_bytes(
        shape, rows=3, context=10, with_head=False
    )
    assert more == 3 * 36 * 2 * 8 * 128 * 2


def test_an_unknown_geometry_names_the_known_ones():
    with pytest.raises(KeyError, match="qwen3-8b"):
        models.named_shape("gpt-2")


def test_draws_repeat_and_differ_by_name_and_seed():
    torch = pytest.importorskip("torch")
    draw = lambda name, seed: random_weights.draw(name, (64, 32), 0.5, 2.0, seed=seed, device="cpu")  # noqa: E731
    first = draw("a", 0)
    assert torch.equal(first, draw("a", 0))
    assert not torch.equal(first, draw("b", 0))
    assert not torch.equal(first, draw("a", 1))
    assert first.dtype == torch.bfloat16
    assert first.float().mean().item() == pytest.approx(0.5, abs=0.15)
    assert first.float().std().item() == pytest.approx(2.0, abs=0.15)


def test_fp8_blocks_are_near_the_weights_and_use_the_whole_range():
    torch = pytest.importorskip("torch")
    weight = random_weights.draw("a", (200, 300), 0.0, 0.02, seed=0, device="cpu")
    weight[128:, 256:] *= 50  # a block of its own scale
    quantized, scale = random_weights.quantize_blocks(weight)
    assert (quantized.dtype, quantized.shape, scale.dtype, scale.shape) == (torch.float8_e4m3fn, (200, 300), torch.float32, (2, 3))
    back = quantized.float() * scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert ((back - weight.float()).norm() / weight.float().norm()).item() < 0.04  # e4m3 has three bits behind the point
    for block, s in ((weight[:128, :128], scale[0, 0]), (weight[128:, 256:], scale[1, 2])):
        assert s.item() == pytest.approx(block.float().abs().max().item() / 448)


def test_an_fp8_model_has_a_scale_for_every_matrix_of_a_layer(tmp_path):
    torch = pytest.importorskip("torch")
    shape = models.SHAPES["qwen3-tiny"]
    directory = models.write_model(tmp_path, shape, fp8=True)
    found = dict(random_weights.all_weights(directory, "cpu"))
    scaled = {name.removesuffix("_scale_inv") for name in found if name.endswith("_scale_inv")}
    assert len(scaled) == 7 * shape.num_layers
    assert {name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn} == scaled
    plain = dict(random_weights.all_weights(models.write_model(tmp_path / "bf16", shape), "cpu"))
    assert plain.keys() == found.keys() - {f"{name}_scale_inv" for name in scaled}


def test_the_hook_is_found_as_an_entry_point(tmp_path):
    import importlib.metadata

    path = random_weights.install_hook(tmp_path).split(":")
    points = [e for d in importlib.metadata.distributions(path=path) for e in d.entry_points if e.group == "sglang.srt.plugins"]
    assert [e.name for e in points] == ["benchmark_random_weights"]
    assert points[0].load() is random_weights.register
