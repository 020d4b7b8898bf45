"""How many requests draft_sampler takes where shared memory is short. Oracle: the layout of abi/draft_sampler.hpp added up by hand, 128 bytes of noise a
unit and request beside what a launch of any size has."""

import pytest

from sgl_lowlatency.kernels.draft_sampler import DraftSampler

QWEN3_VOCAB = 151936  # 4,748 units


@pytest.mark.parametrize(("blocks", "requests"), [(132, 16), (114, 15), (78, 10), (66, 8)])  # H200, H100 PCIe, H20, a half
def test_fewer_blocks_take_fewer_requests(blocks, requests):
    assert DraftSampler.most_that_fit(16, 5, 4096, QWEN3_VOCAB, blocks) == requests
    assert DraftSampler.most_that_fit(4, 5, 4096, QWEN3_VOCAB, blocks) == 4, "never more than were asked for"


def test_a_vocabulary_that_no_request_fits_is_zero():
    assert DraftSampler.most_that_fit(16, 5, 4096, QWEN3_VOCAB, 1) == 0
