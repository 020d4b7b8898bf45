"""Tables of weight maps: what a matrix must be for the ring to read it. What a map brings is tests/emulation's."""

import pytest

from sgl_lowlatency import _C

ADDRESS = 0x7F0000000000


def test_a_map_is_128_bytes_a_matrix_in_order():
    one, other = (ADDRESS, 32, 128, 1, 2), (ADDRESS + 4096, 64, 64, 2, 2)
    table = _C.pack_weight_maps([one, other], is_cuda=False)
    assert len(table) == 2 * 128
    assert table == _C.pack_weight_maps([one], is_cuda=False) + _C.pack_weight_maps([other], is_cuda=False)
    assert table[:128] != table[128:]


@pytest.mark.parametrize(
    "matrix, message",
    [
        ((0, 32, 128, 1, 2), "address is null or not a multiple of 16"),
        ((ADDRESS + 2, 32, 128, 1, 1), "address is null or not a multiple of 16"),
        ((ADDRESS, 24, 128, 2, 2), "num_rows 24 is not a positive multiple of 16"),
        ((ADDRESS, 0, 128, 1, 2), "num_rows 0 is not positive"),
        ((ADDRESS, 32, 96, 1, 2), "k_extent 96 is not a positive multiple of 64"),
        ((ADDRESS, 32, 192, 1, 1), "k_extent 192 is not a positive multiple of 128"),
        ((ADDRESS, 32, 128, 1, 4), "element_bytes 4 is not 1 or 2"),
        ((ADDRESS, 32, 128, 3, 2), "num_parts 3 is neither 1 nor a positive even number"),
        ((ADDRESS, 48, 128, 4, 2), "4 equal parts of num_rows 48 are no multiples of 8 rows"),
    ],
)
def test_a_matrix_that_the_ring_cannot_read_is_refused_by_its_field(matrix, message):
    with pytest.raises(ValueError, match=message):
        _C.pack_weight_maps([matrix], is_cuda=False)


@pytest.mark.parametrize(("matrix", "words"), [((ADDRESS, 192, 128, 1, 1), "1 of 192"), ((ADDRESS, 256, 128, 2, 1), "2 of 256")])
def test_tall_stages_have_whole_tiles_of_one_part(matrix, words):
    _C.pack_weight_maps([matrix], is_cuda=False)
    with pytest.raises(ValueError, match=f"tall stages need one part of a multiple of 128 rows, not {words}"):
        _C.pack_weight_maps([matrix], is_cuda=False, box=_C.abi.WeightBox.tall)


@pytest.mark.parametrize(("box", "fits", "matrix", "words"), [
    ("pair", (ADDRESS, 64, 128, 1, 1), (ADDRESS, 48, 128, 1, 1), "1 equal parts of num_rows 48 are no multiples of the box's 32 rows"),
    ("pair", (ADDRESS, 64, 128, 4, 1), (ADDRESS, 96, 128, 4, 1), "4 equal parts of num_rows 96 are no multiples of the box's 16 rows"),
    ("wide", (ADDRESS, 48, 128, 1, 2), (ADDRESS, 40, 128, 1, 2), "1 equal parts of num_rows 40 are no multiples of the box's 16 rows"),
    ("fp4_pair", (ADDRESS, 64, 192, 1, 1), (ADDRESS, 64, 96, 1, 1), "k_extent 96 is not a positive multiple of 64"),
    ("fp4_pair", (ADDRESS, 64, 192, 2, 1), (ADDRESS, 64, 128, 2, 2), "FP4 is bytes of two columns, not elements of 2 bytes"),
])  # fmt: skip
def test_a_pair_of_tiles_has_whole_tiles(box, fits, matrix, words):
    box = getattr(_C.abi.WeightBox, box)
    assert len(_C.pack_weight_maps([fits], is_cuda=False, box=box)) == 128
    with pytest.raises(ValueError, match=words):
        _C.pack_weight_maps([matrix], is_cuda=False, box=box)


def test_a_build_without_cuda_makes_no_cuda_maps():
    if "cuda" in _C.backends():
        pytest.skip("this build has CUDA kernels")
    with pytest.raises(ValueError, match="no CUDA kernels"):
        _C.pack_weight_maps([(ADDRESS, 32, 128, 1, 2)], is_cuda=True)
