"""The kernel behind bench's read bandwidth reads every byte: its exclusive or is that of the words."""

import pytest
import torch

from sgl_lowlatency.kernels.read_bytes import read_bytes


@pytest.mark.parametrize("num_words", [4, 64, 4096 + 12, 1_000_004, 50_000_000])
def test_the_exclusive_or_of_all_words(num_words):
    words = torch.randint(-(2**31), 2**31 - 1, (num_words,), dtype=torch.int32, device="cuda")
    out = torch.full((1,), 77, dtype=torch.int32, device="cuda")
    read_bytes(words, out)
    bits = words.cpu().view(torch.uint8).view(-1, 4)
    counts = torch.stack([((bits >> bit) & 1).to(torch.int64).sum(0) % 2 << bit for bit in range(8)]).sum(0)
    expected = int.from_bytes(bytes(counts.tolist()), "little", signed=True)
    assert out.item() == expected


def test_misaligned_memory_is_refused():
    words = torch.zeros(8, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="multiple of 16"):
        read_bytes(words[1:5], words[:1])
