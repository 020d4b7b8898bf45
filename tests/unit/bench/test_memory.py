"""Whether a model fits a GPU, and what is said when it does not. Oracle: the tensors' own bytes, and the text."""

import dataclasses
import re

import pytest

from sgl_lowlatency.bench import memory
from sgl_lowlatency.bench.shapes import PRESETS

SHAPE = PRESETS["qwen3-8b"]


def test_weights_are_those_of_the_model():
    assert memory.weight_bytes(SHAPE) == pytest.approx(8.19e9 * 2 + 40960 * 128 * 4, rel=2e-3)


def test_what_fits_has_no_reason():
    needed = memory.needed_bytes(SHAPE, rows=16, context=8000)
    assert memory.reason("q", SHAPE, rows=16, context=8000, free_bytes=needed, gpu="G") is None


def test_too_little_memory_names_the_layers_that_fit():
    text = memory.reason("qwen3-8b", SHAPE, rows=8, context=1024, free_bytes=12 * 10**9, gpu="Card X")
    assert text.startswith("qwen3-8b needs ") and "Card X has 12.0 GB free" in text
    layers = int(re.search(r"--layers (\d+) would fit", text)[1])
    fits = [memory.needed_bytes(dataclasses.replace(SHAPE, num_layers=n), rows=8, context=1024) <= 12 * 10**9 for n in (layers, layers + 1)]
    assert fits == [True, False]


def test_no_layer_fits():
    assert "not even --layers 1 fits" in memory.reason("q", SHAPE, rows=1, context=32, free_bytes=10**9, gpu="G")


def test_a_long_context_of_many_rows_is_counted():
    less, more = (memory.needed_bytes(SHAPE, rows=16, context=context) for context in (30000, 30001))
    assert more - less == 16 * 36 * 2 * 8 * 128 * 2


def test_all_experts_are_counted():
    assert memory.weight_bytes(PRESETS["qwen3-30b-a3b"]) == pytest.approx(30.53e9 * 2 + 40960 * 128 * 4, rel=2e-3)
