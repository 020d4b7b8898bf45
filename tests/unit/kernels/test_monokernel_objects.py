"""k1 and k2 through a HIP runtime that writes down its calls: two launches a layer in order, residency, memory of the host. Oracle: the log, and the
bytes of the parameters."""

import ctypes

import pytest
import torch
from hip_stub import needs_compiler
from monokernel_cases import tiny

from sgl_lowlatency import _C
from sgl_lowlatency.kernels import code_objects
from sgl_lowlatency.kernels.monokernel import MonoInputs, Monokernels
from sgl_lowlatency.kernels.monokernel_objects import MonokernelObjects
from sgl_lowlatency.reference.inputs import random_step, random_weights

pytestmark = needs_compiler
G = tiny(2, 64, 2, 1, 64, 64)


@pytest.fixture
def objects(runtime, monkeypatch):
    monkeypatch.setattr(code_objects, "read", lambda kernel, isa: b"\x7fELF" + kernel.encode())
    return MonokernelObjects(runtime, "gfx950", compute_units=256)


def make(objects):
    weights, step = random_weights(G, seed=0), random_step(G, [3, 4], seed=1)
    kernels = Monokernels(G, weights.layers, weights.cos_sin, isa="gfx950", grid=256, widths=[(2, 1)], deadline_s=1.0, objects=objects)
    kernels.attach_kv(step.k_buffers, step.v_buffers, step.req_to_token)
    inputs = MonoInputs(step.positions, step.out_cache_loc, step.seq_lens, step.req_pool_indices)
    return kernels, weights.embedding[step.input_ids].contiguous(), inputs


def test_a_step_is_two_launches_a_layer(objects, log, monkeypatch):
    kernels, x, inputs = make(objects)
    sent = []
    for name, function in objects._functions.items():
        monkeypatch.setattr(function, "launch", lambda name=name, launch=function.launch, **call: (sent.append((name, call)), launch(**call)))
    kernels.launch(x, inputs, stream=0x77)
    launches = [line for line in log() if line.startswith("launch")]
    assert len(launches) == 4 and all(line.startswith("launch 0x2000 256 1 1 512 1 1 0 stream 0x77") for line in launches)
    assert [name for name, _ in sent] == ["k1", "k2"] * G.num_layers
    assert [call["params"] for _, call in sent] == [params.to_bytes() for params in kernels.params(x, inputs)]
    assert [len(call["params"]) for _, call in sent[:2]] == [_C.abi.kK1ParamsBytes, _C.abi.kK2ParamsBytes]


def test_parameters_that_do_not_fit_are_not_launched(objects, log):
    kernels, x, inputs = make(objects)
    launches = kernels.params(x, inputs)
    launches[1].counted_tokens = 2
    with pytest.raises(ValueError, match="counted_tokens is neither 0 nor rows_per_request"):
        objects.launch(launches, 0)
    assert sum(line.startswith("launch") for line in log()) == 1


def test_the_grid_must_be_resident(objects):
    """The stub's runtime holds three workgroups a CU."""
    objects.require_resident(3 * 256)
    with pytest.raises(RuntimeError, match="k1 needs 769 workgroups resident at once; this GPU, of 256 CUs, holds 768"):
        objects.require_resident(3 * 256 + 1)


def test_a_fault_record_and_the_counters_lie_in_memory_that_the_device_sees(objects, log):
    kernels, _, _ = make(objects)
    assert kernels.fault() is None and kernels.executed() == {}
    assert any(line.startswith("host malloc ") for line in log())
    address = kernels._host.address
    assert ctypes.string_at(address, 64) == bytes(64)
    assert all(params.launch.fault == address for params in kernels.params(*make_step(kernels)))


def make_step(kernels):
    step = random_step(G, [3, 4], seed=1)
    return torch.zeros(2, G.hidden, dtype=torch.bfloat16), MonoInputs(step.positions, step.out_cache_loc, step.seq_lens, step.req_pool_indices)
