"""Why the spec serves several page sizes: the KV rows and req_to_token do not depend on the page size.

Oracle: SGLang's own pool and paged allocator, on the CPU.
"""

import pytest
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sgl_lowlatency.specs.nvidia.dense import PAGE_SIZES

HEADS, HEAD_DIM, SLOTS, LAYERS = 2, 64, 256, 2


def make_pool(page_size):
    return MHATokenToKVPool(
        SLOTS,
        page_size,
        torch.bfloat16,
        HEADS,
        HEAD_DIM,
        LAYERS,
        "cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )


@pytest.mark.parametrize("page_size", sorted(PAGE_SIZES))
def test_a_slot_is_a_row_whatever_the_page_size(page_size):
    pool = make_pool(page_size)
    for layer in range(LAYERS):
        for buffer in pool.get_kv_buffer(layer):
            assert buffer.shape == (SLOTS + page_size, HEADS, HEAD_DIM)
            assert buffer.is_contiguous() and buffer.dtype == torch.bfloat16


@pytest.mark.parametrize("page_size", sorted(PAGE_SIZES - {1}))
def test_the_allocator_hands_out_slots_not_pages(page_size):
    """req_to_token stores what the allocator returns; slot 0's page is the padding."""
    allocator = PagedTokenToKVPoolAllocator(
        SLOTS, page_size=page_size, dtype=torch.bfloat16, device="cpu", kvcache=make_pool(page_size), need_sort=False
    )
    slots = allocator.alloc(2 * page_size).view(2, page_size)
    assert slots.min() >= page_size and slots.max() < SLOTS + page_size
    torch.testing.assert_close(slots - slots[:, :1], torch.arange(page_size).expand(2, -1))
    assert (slots[:, 0] % page_size == 0).all()
