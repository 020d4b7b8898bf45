"""How SGLang splits the vocabulary over ranks, and pads it."""

import pytest

pytest.importorskip("sglang")

from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding, VocabParallelEmbeddingShardIndices  # noqa: E402

from sgl_lowlatency.kernels.geometry import VOCAB_PADDING, Geometry  # noqa: E402


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("vocab", [151936, 128256, 1000, 500, 60])
def test_a_rank_has_the_rows_that_its_geometry_says(vocab, num_ranks):
    geometry = Geometry(1, 64, num_ranks, num_ranks, 64, 64 * num_ranks, vocab, 64, 1e-6, False)
    rows = geometry.vocab_shard(num_ranks)
    padded = rows * num_ranks
    assert padded >= vocab and padded % VOCAB_PADDING == 0
    for rank in range(num_ranks):
        shard = VocabParallelEmbedding._get_indices(padded, padded, vocab, vocab, rank, num_ranks)
        assert isinstance(shard, VocabParallelEmbeddingShardIndices)
        assert (shard.padded_org_vocab_start_index, shard.num_elements_padded, shard.num_added_elements_padded) == (rank * rows, rows, 0)


def test_the_padding_is_sglangs():
    from sglang.srt.layers import vocab_parallel_embedding as theirs

    assert theirs.DEFAULT_VOCAB_PADDING_SIZE == VOCAB_PADDING
    for vocab in (151936, 1000, 60):
        for num_ranks in (2, 4, 8):
            padding = VOCAB_PADDING if theirs.pad_vocab_size(vocab, VOCAB_PADDING) % num_ranks == 0 else VOCAB_PADDING * num_ranks
            geometry = Geometry(1, 64, 8, 8, 64, 512, vocab, 64, 1e-6, False)
            assert geometry.vocab_shard(num_ranks) * num_ranks == theirs.pad_vocab_size(vocab, padding)
