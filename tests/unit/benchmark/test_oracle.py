"""The float32 oracle against transformers' own Qwen3 and Qwen3-MoE, and its causality."""

import pytest

from benchmark import models, oracle, random_weights

torch = pytest.importorskip("torch")
SHAPE = models.Shape(2, 128, 4, 2, 32, 192, 300, 128, 1e-6, False)


def test_logits_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    directory = models.write_model(tmp_path, SHAPE)
    config = transformers.Qwen3Config.from_pretrained(directory)
    model = transformers.Qwen3ForCausalLM(config).to(torch.float32).eval()
    missing, unexpected = model.load_state_dict(
        {name: x.float() for name, x in random_weights.all_weights(directory, "cpu")}, strict=False
    )
    assert not missing and not unexpected
    ids = [5, 250, 17, 17, 99, 3, 42]
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0, 2:]
    got = oracle.Oracle(directory, "cpu").logits([ids], [2])[0]
    assert got.shape == (5, 300)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_logits_of_a_moe_model_are_those_of_transformers(tmp_path, norm_topk_prob):
    transformers = pytest.importorskip("transformers")
    shape = models.Shape(
        2, 128, 4, 2, 32, 0, 300, 128, 1e-6, False, num_experts=16, top_k=4, moe_intermediate=64, norm_topk_prob=norm_topk_prob
    )
    directory = models.write_model(tmp_path, shape)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig.from_pretrained(directory)).to(torch.float32).eval()
    weights = {name: x.float() for name, x in random_weights.all_weights(directory, "cpu")}
    for name in model.state_dict():  # transformers keeps the experts' matrices of a layer in one
        if name.endswith("experts.gate_up_proj"):
            at = name.removesuffix("gate_up_proj")
            pairs = [[weights.pop(f"{at}{expert}.{part}_proj.weight") for part in ("gate", "up")] for expert in range(16)]
            weights[name] = torch.stack([torch.cat(pair) for pair in pairs])
        elif name.endswith("experts.down_proj"):
            weights[name] = torch.stack([weights.pop(f"{name.removesuffix('down_proj')}{expert}.down_proj.weight") for expert in range(16)])
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not missing and not unexpected
    sequences = [[5, 250, 17, 17, 99, 3, 42], [1, 2, 3]]
    got = oracle.Oracle(directory, "cpu").logits(sequences, [2, 0])
    for ids, first, ours in zip(sequences, [2, 0], got, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(ours, model(torch.tensor([ids])).logits[0, first:], rtol=1e-4, atol=1e-4)


def test_a_position_does_not_see_later_tokens(tmp_path):
    one = oracle.Oracle(models.write_model(tmp_path, SHAPE), "cpu")
    short, long = one.logits([[9, 8, 7], [9, 8, 7, 6, 5]], [0, 0])
    torch.testing.assert_close(short, long[:3])


def test_fp8_weights_are_what_codes_and_scales_mean(tmp_path):
    """Against transformers with every matrix replaced by codes times scales, element by element."""
    transformers = pytest.importorskip("transformers")
    directory = models.write_model(tmp_path, SHAPE, fp8=True)
    stored = dict(random_weights.all_weights(directory, "cpu"))
    state = {}
    for name, tensor in stored.items():
        if f"{name}_scale_inv" in stored:
            rows, columns = (torch.arange(size) // 128 for size in tensor.shape)
            tensor = tensor.float() * stored[f"{name}_scale_inv"][rows][:, columns]
        if not name.endswith("_scale_inv"):
            state[name] = tensor.float()
    plain = models.write_model(tmp_path / "bf16", SHAPE)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config.from_pretrained(plain)).to(torch.float32).eval()
    assert model.load_state_dict(state, strict=False) == ([], [])
    ids = [5, 250, 17, 99, 3, 42]
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0, 2:]
    got = oracle.Oracle(directory, "cpu").logits([ids], [2])[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    rounded = oracle.Oracle(plain, "cpu").logits([ids], [2])[0]
    assert (got - rounded).abs().max() > 0.05, "the codes are not the bf16 weights"


def test_one_pass_answers_for_every_sequence_it_was_given(tmp_path):
    one = oracle.Oracle(models.write_model(tmp_path, SHAPE), "cpu")
    sequences, first = [[9, 8, 7], [5, 4], [9, 8, 7]], [1, 0, 1]
    remembered = oracle.Remembered(one, sequences, first)
    for sequence, begin in zip(sequences, first, strict=True):
        torch.testing.assert_close(remembered.logits([sequence], [begin]), one.logits([sequence], [begin]))
    with pytest.raises(KeyError):
        remembered.logits([[9, 8]], [1])
