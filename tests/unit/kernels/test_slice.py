"""What the slices have alike: the memory whose order the emulation checks is all that a launch writes."""

import attention_in_cases
import attention_out_cases
import pytest
import torch

from sgl_lowlatency import _C
from sgl_lowlatency.kernels import slice as slices
from sgl_lowlatency.kernels.decode_step import EmulationOptions


@pytest.fixture
def checked(monkeypatch):
    """{name: (address, bytes)} of the newest launch of either kernel."""
    found = {}
    for name in ("attention_in_emulate", "attention_out_emulate"):
        emulate = getattr(_C, name)

        def recorded(*arguments, emulate=emulate):
            found.clear()
            found.update({name: (address, num_bytes) for name, address, num_bytes, _ in arguments[-1]})
            return emulate(*arguments)

        monkeypatch.setattr(_C, name, recorded)
    return found


def test_the_extent_of_rows_that_are_apart():
    wide = torch.zeros(3, 10, dtype=torch.bfloat16)
    assert slices.extent_bytes(wide) == 60
    assert slices.extent_bytes(wide[:, :4]) == (2 * 10 + 4) * 2
    assert slices.extent_bytes(wide[:, :4].unflatten(1, (2, 2))) == (2 * 10 + 4) * 2


def test_attention_in(checked):
    layer = attention_in_cases.Layer(emulation=EmulationOptions(check_order=True))
    inputs = layer.inputs(3)
    layer.run(*inputs, padding=512)
    assert layer.q.stride(0) == 1024 + 512 and checked.keys() == {"workspace", "state", "cache", "x", "q_lora", "q"}
    assert checked["q"] == (layer.q.data_ptr(), (2 * 1536 + 1024) * 2)
    assert checked["cache"] == (layer.cache.pages.data_ptr(), layer.cache.pages.numel())
    assert layer.kernel.last_report.num_races == 0 and layer.problems(*inputs) == []


def test_attention_out(checked):
    layer = attention_out_cases.Layer(emulation=EmulationOptions(check_order=True))
    inputs = layer.inputs(3)
    layer.run(*inputs)
    assert checked.keys() == {"workspace", "state", "streams_out", "out", "coefficients"}
    assert checked["coefficients"] == (layer.coefficients.data_ptr(), 3 * 24 * 4)
    assert layer.kernel.last_report.num_races == 0 and layer.problems(*inputs) == []
