"""What is read of SGLang is checked before a kernel trusts it, and what is lent is put back."""

from __future__ import annotations

import pytest
import torch
from sgl_lowlatency.runtime import sglang_state


def test_the_pools_are_read_without_copies(make_serving):
    serving = make_serving(page_size=16)
    kv = sglang_state.read_kv_state(serving.view.kv_pool.pool, serving.geometry)
    assert [t.data_ptr() for t in (*kv.k, *kv.v)] == [t.data_ptr() for t in (*serving.kv.k, *serving.kv.v)]
    assert kv.req_to_token is serving.kv.req_to_token
    assert (kv.page_size, kv.num_slots) == (16, 4096)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s.kv.k.__setitem__(1, s.kv.k[1].float()), "k of layer 1 is .* torch.float32"),
        (lambda s: s.kv.v.__setitem__(0, s.kv.v[0][:, :1]), "v of layer 0 is"),
        (lambda s: s.kv.v.__setitem__(1, s.kv.v[1][:99]), "v of layer 1 is laid out unlike k of layer 0"),
        (lambda s: s.kv.k.__setitem__(1, s.kv.k[1].transpose(1, 2).contiguous().transpose(1, 2)), "k of layer 1"),
        (lambda s: setattr(s.backend.req_to_token_pool, "req_to_token", s.kv.req_to_token.long()), "req_to_token is .* torch.int64"),
    ],
)
def test_another_layout_is_named(serving, change, message):
    change(serving)
    with pytest.raises(RuntimeError, match=f"cannot read SGLang's KV pool:\n  - {message}"):
        sglang_state.read_kv_state(serving.view.kv_pool.pool, serving.geometry)


@pytest.mark.parametrize("fails", [False, True])
def test_attention_metadata_comes_back(serving, fails):
    before = dict(vars(serving.backend))
    try:
        with sglang_state.attention_metadata_kept():
            sglang_state.plan_attention("a batch")
            serving.backend.added = 1
            assert serving.backend.forward_metadata == "of planned batch 1"
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert vars(serving.backend) == before


def test_a_decode_batch_is_a_changed_copy(serving):
    template = serving.batch(3)
    template.next_token_logits_buffer = torch.zeros(3, 4)
    tensors = {
        name: torch.arange(2) + at
        for at, name in enumerate(("input_ids", "positions", "seq_lens", "req_pool_indices", "out_cache_loc"))
    }
    made = sglang_state.check_batch(template, **tensors)
    assert all(getattr(made, name) is tensor for name, tensor in tensors.items())
    assert (made.batch_size, made.seq_lens_sum, made.next_token_logits_buffer) == (2, 5, None)
    assert torch.equal(made.seq_lens_cpu, tensors["seq_lens"]) and made.orig_seq_lens is tensors["seq_lens"]
    assert template.batch_size == 3 and template.next_token_logits_buffer is not None
    assert made.forward_mode.is_decode()


def test_a_verify_batch_has_the_mask_and_the_tokens_of_its_own_chains(make_serving):
    serving = make_serving(drafts=3)
    template = serving.batch(1)
    tensors = {name: torch.arange(6) + at for at, name in enumerate(("input_ids", "positions", "out_cache_loc"))}
    tensors |= {"seq_lens": torch.tensor([2, 1]), "req_pool_indices": torch.tensor([5, 6])}
    made = sglang_state.check_batch(template, **tensors)
    assert made.forward_mode.is_target_verify() and (made.batch_size, made.seq_lens_sum) == (2, 3)
    # of every request [drafts, prefix + drafts]: the prefix, then the drafts up to its own
    first = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    second = [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    expected = torch.cat([torch.tensor(mask, dtype=torch.bool).flatten() for mask in (first, second)])
    assert torch.equal(made.spec_info.custom_mask, expected)
    assert made.spec_info.draft_token is tensors["input_ids"] and made.spec_info.positions is tensors["positions"]
    assert made.spec_info.draft_token_num == 3 and made.spec_info.is_verify_input()
    assert template.spec_info.custom_mask.numel() == 12 and template.spec_info.positions is None, "the live step's is its own"


def test_a_draft_model_is_known_while_it_is_built():
    from sglang.srt.runtime_context import get_flags

    assert sglang_state.building_draft_model() is False
    get_flags().moe.in_speculative_scope = True
    try:
        assert sglang_state.building_draft_model() is True
    finally:
        get_flags().moe.in_speculative_scope = False
