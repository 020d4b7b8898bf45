"""fused_moe with mHC's mix and post, in emulation: coefficients to fp32 rounding, streams through the numerics gate; what a launch without them gives
is the same bits. Oracles: reference/fused_moe.py, reference/hyper_connection.py."""

import dataclasses

import pytest
import torch
from fused_moe_cases import Moe
from hyper_connection_cases import empty_post, seeded_hyper

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import EmulationOptions

SHAPES = [  # hidden, intermediate, experts, top_k, grid
    (256, 128, 32, 3, 4),
    (1280, 384, 48, 6, 5),
    (128, 128, 16, 2, 40),  # more blocks than units of the mix, than rows
    (384, 128, 96, 1, 1),  # a block alone
    (5120, 128, 16, 2, 3),  # DeepSeek-V4.1's width
]


@pytest.mark.parametrize(("hidden", "intermediate", "num_experts", "top_k", "grid"), SHAPES)
def test_rows(hidden, intermediate, num_experts, top_k, grid):
    """Launches of different rows, with streams and without, alternate on one workspace."""
    moe = Moe(hidden, intermediate, num_experts, top_k, grid=grid)
    for seed, rows in enumerate((1, 6, 12, 48, 1) if hidden < 5120 else (1, 6, 12)):
        moe.kernel.emulation.seed = seed
        x, streams = moe.inputs(rows, seed)[0], moe.streams(rows, seed)
        moe.run(x, streams=streams)
        assert moe.problems(x, streams=streams) == [], rows
        out, record, post = moe.out, moe.record, moe.post
        moe.run(x)
        assert torch.equal(moe.out, out) and torch.equal(moe.record.logits, record.logits) and torch.equal(moe.record.weights, record.weights)
        moe.run(x, streams=streams)
        assert all(torch.equal(moe.post[name], post[name]) for name in post), "bits repeat"


def test_out_and_coefficients_are_optional():
    moe = Moe()
    x, streams = moe.inputs(9)[0], moe.streams(9)
    moe.run(x, streams=streams)
    wanted = moe.post["streams_out"]
    behind = empty_post(9, 256)["streams_out"]
    moe.kernel.launch(moe.layer, x, None, streams=streams, streams_out=behind)
    assert torch.equal(behind, wanted)
    out = torch.full_like(moe.out, float("nan"))
    moe.kernel.launch(moe.layer, x, out, streams=streams, streams_out=behind.fill_(float("nan")))
    assert torch.equal(behind, wanted) and torch.equal(out, moe.out)


def test_rows_that_are_not_live_are_mixed_too():
    moe = Moe(alt=True)
    (x, token_ids), streams = moe.inputs(12), moe.streams(12)
    moe.run(x, token_ids, 9, streams=streams)
    assert moe.problems(x, token_ids, 9, streams) == []
    assert moe.record.ids[-3:].eq(-1).all()


def test_a_row_does_not_depend_on_the_others():
    moe = Moe(num_experts=64, top_k=4)
    x, streams = moe.inputs(48)[0], moe.streams(48)
    moe.run(x, streams=streams)
    together = moe.post
    for rows in (slice(0, 1), slice(5, 12), slice(20, 44)):
        moe.run(x[rows].contiguous(), streams=streams[rows].contiguous())
        assert all(torch.equal(moe.post[name], together[name][rows]) for name in together)


def test_coefficients_of_extreme_streams_are_finite():
    moe = Moe()
    x, streams = moe.inputs(3)[0], moe.streams(3)
    streams[0] = 0.0
    streams[1] *= 1e15
    moe.run(x, streams=streams)
    assert moe.post["coefficients"].isfinite().all() and moe.post["streams_out"][[0, 2]].isfinite().all()
    assert not [problem for problem in moe.problems(x, streams=streams) if problem.startswith("coefficients")]


TRANSPOSED_MIX, SHORT_SINKHORN, UNWEIGHTED_EXPERT = 42, 43, 24  # dialect::Planted


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize(("planted", "missed"), [
    (0, []), (TRANSPOSED_MIX, ["streams"]), (SHORT_SINKHORN, ["coefficients", "streams"]), (UNWEIGHTED_EXPERT, ["out", "streams"]),
])  # fmt: skip
def test_the_gates(planted, missed, rows):
    """A planted bug turns the comparisons red that must catch it, and leaves the others as they are."""
    moe = Moe(max_rows=12, emulation=EmulationOptions(planted=planted))
    x, streams = moe.inputs(rows)[0], moe.streams(rows)
    moe.run(x, streams=streams)
    found = moe.problems(x, streams=streams)
    assert [problem.removeprefix("MISS ").split(":")[0].split(" ")[0] for problem in found] == missed, found


def launch_of(moe, rows=4, **changes):
    """Calls launch with all of a launch with streams, but for `changes`."""
    arguments = {"x": moe.inputs(rows)[0], "out": None, "streams": moe.streams(rows), **empty_post(rows, moe.hidden)} | changes
    moe.kernel.launch(moe.layer, **arguments)


@pytest.mark.parametrize(("changes", "words"), [
    ({"streams": torch.zeros(4, 4, 128, dtype=torch.bfloat16)}, r"streams: shape \(4, 4, 128\) is not \(4, 4, 256\)"),
    ({"streams": torch.zeros(4, 4, 256)}, "streams: dtype torch.float32 is not torch.bfloat16"),
    ({"streams": torch.zeros(4, 256, 4, dtype=torch.bfloat16).transpose(1, 2)}, "streams: strides .* are not contiguous"),
    ({"streams_out": torch.zeros(3, 4, 256, dtype=torch.bfloat16)}, r"streams_out: shape \(3, 4, 256\) is not \(4, 4, 256\)"),
    ({"coefficients": torch.zeros(4, 24, dtype=torch.bfloat16)}, "coefficients: dtype torch.bfloat16 is not torch.float32"),
    ({"coefficients": torch.zeros(4, 28)[:, :24]}, "coefficients: strides .* are not contiguous"),
    ({"streams_out": None}, "streams_out is missing: a launch with streams leaves those behind the MoE there"),
    ({"streams": None}, "out is missing in a launch without streams: pass streams too"),
    ({"streams": None, "out": torch.zeros(4, 256, dtype=torch.bfloat16)}, "streams_out is there in a launch without streams"),
    ({"streams": None, "out": torch.zeros(4, 256, dtype=torch.bfloat16), "streams_out": None}, "coefficients is there in a launch without streams"),
])  # fmt: skip
def test_launches_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        launch_of(Moe(max_rows=8), **changes)


def test_streams_need_a_layer_that_was_prepared_for_them_and_a_place_of_their_own():
    moe = Moe(max_rows=8)
    streams = moe.streams(4)
    with pytest.raises(ValueError, match="streams_out is streams, which other blocks still read when it is written"):
        launch_of(moe, streams=streams, streams_out=streams)
    moe.layer = moe.kernel.prepare(moe.weights)
    with pytest.raises(ValueError, match="the layer was prepared without a hyper-connection: pass prepare its hyper"):
        launch_of(moe)


@pytest.mark.parametrize(("change", "words"), [
    ({"mix": torch.zeros(24, 512)}, r"mix: shape \(24, 512\) is not \(24, 1024\)"), ({"mix_scale": torch.zeros(4)}, "mix_scale: shape"),
    ({"mix_base": torch.zeros(24).double()}, "mix_base: dtype torch.float64 is not torch.float32"),
    ({"sinkhorn_iterations": 0}, "sinkhorn_iterations 0 is below 1"), ({"mix_rms_eps": float("nan")}, "mix_rms_eps nan is negative or no number"),
])  # fmt: skip
def test_hyper_connections_that_do_not_fit_are_refused(change, words):
    moe = Moe(max_rows=8)
    with pytest.raises(ValueError, match=words):
        moe.kernel.prepare(moe.weights, hyper=dataclasses.replace(seeded_hyper(256, 0), **change))


def test_the_launch_refuses_what_the_front_never_passes():
    moe = Moe(max_rows=4)
    out, post = torch.empty(2, 256, dtype=torch.bfloat16), empty_post(2, 256)
    streams = moe.streams(2)
    params = moe.kernel.params(moe.layer, moe.inputs(2)[0], out, streams=streams, **post)

    def refusal(**fields):
        changed, before = {}, {}
        for name, value in fields.items():
            owner = params if hasattr(params, name) else params.hyper
            before[name], changed[name] = getattr(owner, name), owner
            setattr(owner, name, value)
        with pytest.raises(ValueError) as error:
            _C.fused_moe_emulate(params, 4)
        for name, owner in changed.items():
            setattr(owner, name, before[name])
        return str(error.value)

    assert refusal(sinkhorn_iterations=0) == "fused_moe: sinkhorn_iterations 0 is below 1"
    assert refusal(mix_eps=-1.0) == "fused_moe: mix_eps -1.000000 is negative"
    assert refusal(mix_rms_eps=-1.0) == "fused_moe: mix_rms_eps -1.000000 is negative"
    assert refusal(mix_base=0) == "fused_moe: a pointer of the hyper-connection is null"
    assert refusal(streams_out=streams.data_ptr()) == "fused_moe: streams_out is streams"
    assert refusal(streams=0, out=0) == "fused_moe: out is null in a launch without streams"
    assert refusal(streams=0) == "fused_moe: streams_out and coefficients are there with streams, and null without"
    words = _C.moe_handover(_C.abi.MoeGeometry(256, 128, 32, 3), 2)
    assert refusal(generation_words=words.mix) == "fused_moe: generation_words are too few for the rows"
    params.hyper.streams = params.hyper.streams_out = params.hyper.coefficients = 0
    params.generation_words = words.mix
    assert _C.fused_moe_emulate(params, 4).status == "ok", "a launch without streams has no use for the words of a mix"
