"""Draft directories: their configs, and why their drafts are the target's successors. Oracles: float32 (benchmark.oracle), the definition of rope."""

import dataclasses
import json
import math

import pytest

from benchmark import drafts, forced_text, models, oracle, random_weights

torch = pytest.importorskip("torch")
QWEN3_8B = dataclasses.replace(models.named_shape("qwen3-8b"), tied_head=False)
SMALL = models.Shape(8, 256, 2, 1, 128, 128, 512, 512, 1e-6, False)


def config(tmp_path, algorithm, target=QWEN3_8B, **more):
    return json.loads((drafts.write_draft(tmp_path, algorithm, target, drafts=4, period=64, **more) / "config.json").read_text())


def test_an_eagle3_draft_takes_embedding_and_head_of_the_target(tmp_path):
    got = config(tmp_path, "eagle3")
    assert (got["architectures"], got["model_type"], got["num_hidden_layers"]) == (["LlamaForCausalLMEagle3"], "llama", 1)
    assert got["draft_vocab_size"] is None and got["norm_output"] is True and got["vocab_size"] == 151936
    assert got["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 17, 32], "inputs of layers 2, 18 and 33, SGLang's default"


@pytest.mark.parametrize("algorithm, block, has_bias", [("dflash", 4, True), ("dspark", 3, False)])
def test_a_block_draft_names_block_mask_and_layers(tmp_path, algorithm, block, has_bias):
    got = config(tmp_path, algorithm)
    assert got["architectures"] == [drafts.ARCHITECTURES[algorithm]] and got["block_size"] == block
    assert got["dflash_config"] == {"mask_token_id": 151935, "target_layer_ids": [1, 17, 32]} and got["num_target_layers"] == 36
    assert got["attention_bias"] is has_bias
    assert (got.get("markov_rank"), got.get("markov_head_type")) == ((256, "vanilla") if algorithm == "dspark" else (None, None))


@pytest.mark.parametrize("family, architecture", [("qwen3", "Qwen3ForCausalLM"), ("llama", "LlamaForCausalLM")])
def test_a_standalone_draft_has_the_targets_vocabulary(tmp_path, family, architecture):
    got = config(tmp_path, "standalone", family=family)
    assert (got["architectures"], got["num_hidden_layers"], got["hidden_size"]) == ([architecture], 1, 1024)
    assert (got["vocab_size"], got["max_position_embeddings"], got["tie_word_embeddings"]) == (151936, QWEN3_8B.max_position, False)


def test_a_target_without_three_layers_to_read_is_refused(tmp_path):
    assert drafts.captured_layers(8) == [1, 3, 4]
    with pytest.raises(ValueError, match="6 layers has no three layers"):
        drafts.write_draft(tmp_path, "eagle3", dataclasses.replace(SMALL, num_layers=6), drafts=4, period=64)


@pytest.mark.parametrize("family", drafts.FAMILIES)
def test_float32_follows_the_text_with_a_standalone_draft(tmp_path, family):
    target = dataclasses.replace(SMALL, vocab=1000)
    directory = drafts.write_draft(tmp_path, "standalone", target, drafts=4, period=64, family=family)
    sequence = [5, 250, 17, 62, *forced_text.text(62, 12, vocab=1000, period=64)]
    logits = oracle.Oracle(directory, "cpu").logits([sequence[:-1]], [3])[0]
    best, second = logits.topk(2, dim=-1).values.T
    assert logits.argmax(dim=-1).tolist() == sequence[4:] and (best - second).min() > 20


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_a_query_looks_back_exactly_its_distance(theta):
    """Scores of a key 0 to 1,500 positions behind: no other one comes near the distance meant, and both are of unit mean square."""
    query, key = (torch.tensor(x, dtype=torch.float64) for x in drafts.look_back(128, theta, 65))
    assert float(query.square().mean()) == pytest.approx(1) and float(key.square().mean()) == pytest.approx(1)
    angles = torch.arange(1501, dtype=torch.float64)[:, None] * theta ** (-torch.arange(64, dtype=torch.float64) / 64)
    rotated = torch.cat((query[:64] * angles.cos() - query[64:] * angles.sin(), query[64:] * angles.cos() + query[:64] * angles.sin()), 1)
    scores = rotated @ key * drafts.LOOK_BACK_GAIN**2 / math.sqrt(128)
    best, second = scores.topk(2).values
    assert int(scores.argmax()) == 65 and float(best - second) > 25


def test_a_markov_head_knows_the_successors(tmp_path):
    tensors = dict(random_weights.all_weights(drafts.write_draft(tmp_path, "dspark", SMALL, drafts=4, period=16), "cpu"))
    w1, w2 = (tensors[f"markov_head.markov_{name}.weight"].float() for name in ("w1", "w2"))
    logits = w1 @ w2.T
    assert logits.argmax(1).tolist() == [forced_text.successor(token, vocab=512, period=16) for token in range(512)]
    best, second = logits.topk(2, dim=1).values.T
    assert float((best - second).min()) > 60


@pytest.mark.parametrize("algorithm", drafts.ALGORITHMS)
def test_files_take_the_markers_place(tmp_path, algorithm):
    from safetensors.torch import load_file

    directory = drafts.write_draft(tmp_path, algorithm, SMALL, drafts=4, period=16)
    drawn = dict(random_weights.all_weights(directory, "cpu"))
    file = drafts.write_files(directory)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"] and file.parent == tmp_path
    found = load_file(file)
    assert found.keys() == drawn.keys() and all(torch.equal(found[name], drawn[name]) for name in drawn)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
