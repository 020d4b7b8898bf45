"""Refusals of tensor parallelism, as pure functions of stand-ins."""

from types import SimpleNamespace

import pytest
from guard_cases import hf_config, server

from sgl_lowlatency.guard import parallel
from sgl_lowlatency.guard.config import config_disable_reasons
from sgl_lowlatency.kernels.geometry import Geometry

GEOMETRY = Geometry(2, 256, 8, 4, 128, 1024, 1000, 4096, 1e-6, False)


def group(tp_size, **fields):
    served = {name: values[0] for name, values, _ in parallel.SERVER_ARGUMENTS}
    return server(**{**served, "tp_size": tp_size, **fields})


def reasons(tp_size, hf=None, emulate=False, **fields):
    return config_disable_reasons(group(tp_size, **({"device": "cpu"} if emulate else {}), **fields), hf or hf_config(), emulate=emulate)


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_groups_that_divide_the_model_are_served(tp_size):
    assert reasons(tp_size) == []


def test_sizes_that_the_specs_do_not_name_are_sglangs_to_refuse():
    assert reasons(3) == [] and parallel.TP_SIZES == (1, 2, 4, 8)


@pytest.mark.parametrize("name", [row[0] for row in parallel.SERVER_ARGUMENTS])
def test_what_splits_otherwise_is_refused_with_several_ranks_alone(name):
    (reason,) = reasons(2, **{name: 16})
    assert reason.startswith(f"--{name.replace('_', '-')} 16 is not served: ")
    assert reasons(1, **{name: 16}) == []


def test_each_argument_must_exist():
    cfg = group(2)
    del cfg.enable_layernorm_sp
    (reason,) = config_disable_reasons(cfg, hf_config(), emulate=False)
    assert "no server argument 'enable_layernorm_sp'" in reason


@pytest.mark.parametrize(("tp_size", "fields", "wanted"), [
    (8, {"num_key_value_heads": 4}, ["config.num_key_value_heads 4 is not a multiple of tp_size 8"]),
    (4, {"num_attention_heads": 6, "num_key_value_heads": 2},
     ["config.num_attention_heads 6 is not a multiple of tp_size 4", "config.num_key_value_heads 2 is not a multiple of tp_size 4"]),
    (4, {"intermediate_size": 3008 + 64}, []),
    (4, {"intermediate_size": 3008 + 192}, ["of each of 4 ranks: config.intermediate_size 800 is not a multiple of 64"]),
    (2, {"head_dim": 64}, ["config.head_dim 64 on several GPUs is not 128, the one that the CUDA kernels have"]),
])
def test_a_model_that_does_not_divide_is_named(tp_size, fields, wanted):
    assert reasons(tp_size, hf_config(**fields)) == wanted


def test_what_no_rank_count_changes_is_said_once():
    assert reasons(2, hf_config(head_dim=96)) == ["config.head_dim 96 is not one of 64, 128"]


def test_emulation_has_heads_of_64():
    assert reasons(2, hf_config(head_dim=64), emulate=True) == []


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "DFLASH", "DSPARK"])
def test_what_one_gpu_speculates_with_several_do(algorithm):
    assert reasons(2, speculative_algorithm=algorithm) == []


def test_drafts_that_ranks_might_not_share_are_refused_by_name():
    found = reasons(2, speculative_algorithm="NGRAM", speculative_ngram_external_sam_budget=3, speculative_use_rejection_sampling=True)
    assert found == [
        "--speculative-ngram-external-sam-budget 3 is not served: a corpus that is added would reach the drafts of one rank before another's",
        "--speculative-use-rejection-sampling True is not served: every rank would draw drafts of its own, which has not been tested",
    ]


@pytest.mark.parametrize(("tp_size", "algorithm", "sites", "refused"), [
    (2, "DSPARK", "rng", True), (8, "DFLASH", "all,-dflash-target", True), (2, "DFLASH", "all", False), (1, "DSPARK", "off", False), (2, "NGRAM", "off", False),
    (2, None, "off", False),
])  # fmt: skip
def test_ranks_that_do_not_follow_rank_0_are_refused(tp_size, algorithm, sites, refused):
    found = parallel.synchronisation_reasons(SimpleNamespace(tp_size=tp_size, speculative_algorithm=algorithm), sites)
    why = "ranks would not all follow rank 0, and could verify other drafts than each other; unset it"
    assert found == ([f"SGLANG_SPEC_TP_SYNC={sites!r} is not served with {algorithm} on several GPUs: {why}"] if refused else [])


def embedding(begin, rows, added=0):
    return SimpleNamespace(
        shard_indices=SimpleNamespace(padded_org_vocab_start_index=begin, num_elements_padded=rows + added, num_added_elements_padded=added)
    )


def test_a_rank_has_its_rows_of_the_vocabulary():
    local = GEOMETRY.shard(4)
    assert local.vocab == 256 and (local.num_q_heads, local.num_kv_heads, local.intermediate) == (2, 1, 256)
    assert list(parallel.vocabulary_reasons("lm_head", embedding(512, 256), local, 2)) == []
    (reason,) = parallel.vocabulary_reasons("lm_head", embedding(500, 256), local, 2)
    assert reason == "lm_head of rank 2 has 256 rows of the vocabulary from 500 on, not 256 from 512 on"
    several = list(parallel.vocabulary_reasons("lm_head", embedding(512, 256, 64), local, 2))
    assert several[0].startswith("lm_head of rank 2 has 320 rows") and several[1] == "lm_head has 64 rows of an added vocabulary"


@pytest.mark.parametrize(("vocab", "num_ranks", "rows"), [(151936, 8, 18992), (151936, 2, 75968), (1000, 8, 128), (1000, 4, 256), (500, 8, 64), (60, 8, 8), (1000, 3, 384)])
def test_rows_of_the_vocabulary_of_a_rank(vocab, num_ranks, rows):
    """As SGLang pads it: to 64, or to 64 for every rank (tests/contract/test_parallel_shards.py)."""
    assert Geometry(2, 256, 8, 4, 128, 1024, vocab, 4096, 1e-6, False).vocab_shard(num_ranks) == rows


def test_one_rank_has_the_model_as_it_is():
    assert GEOMETRY.shard(1) is GEOMETRY


def test_every_field_that_does_not_divide_is_named():
    with pytest.raises(ValueError, match="config.num_key_value_heads 4 is not a multiple of tp_size 8$"):
        GEOMETRY.shard(8)
