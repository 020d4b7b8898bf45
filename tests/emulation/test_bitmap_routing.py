"""bitmap_routing in emulation against the oracle: ids, bitmaps and places exactly, weights to float32's rounding."""

import pytest
import torch
from routing_cases import hard_logits, problems, random_logits, same_weights

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.bitmap_routing import BitmapRouting
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fault import BitmapRoutingFault
from sgl_lowlatency.reference import routing as oracle

CPU = torch.device("cpu")
POISON = 0x7FFFFFFF


def outputs(router, rows):
    out = router.outputs(rows)
    out.buffer.fill_(POISON)
    return out


def route(logits, top_k, renormalizes=True, num_live_rows=None, **options):
    """(Routing, oracle's choices)."""
    rows, num_experts = logits.shape
    router = BitmapRouting(num_experts, top_k, CPU, renormalizes, emulation=EmulationOptions(**options))
    out = outputs(router, rows)
    router.route(logits, out, None if num_live_rows is None else torch.tensor([num_live_rows], dtype=torch.int32))
    return out, oracle.choose(logits, top_k, renormalizes, num_live_rows)


def route_ids(ids, weights, num_experts, num_live_rows=None, **options):
    """(Routing, what the given choices are)."""
    router = BitmapRouting(num_experts, ids.shape[1], CPU, emulation=EmulationOptions(**options))
    out = outputs(router, ids.shape[0])
    router.route_ids(ids, weights, out, None if num_live_rows is None else torch.tensor([num_live_rows], dtype=torch.int32))
    live = torch.arange(ids.shape[0])[:, None] < (ids.shape[0] if num_live_rows is None else num_live_rows)
    taken = torch.where(live, ids, -1)
    return out, oracle.Choices(taken.long(), torch.where(taken >= 0, weights, 0.0).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_experts", [64, 128, 160, 256, 384])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 31, 32])
def test_random_logits(rows, num_experts, dtype):
    """bf16 logits of this size tie in most rows."""
    for seed, top_k in enumerate((8, 1 + rows % 8)):
        logits = random_logits(rows, num_experts, rows * 1000 + num_experts + seed, dtype)
        out, choices = route(logits, top_k, renormalizes=seed == 0, seed=rows + seed)
        assert problems(out, choices, num_experts) == []


@pytest.mark.parametrize("rows", range(1, 33))
def test_every_number_of_rows(rows):
    out, choices = route(random_logits(rows, 128, rows), 8, seed=rows)
    assert problems(out, choices, 128) == []


ODD_SIZES = [(1, 1), (2, 2), (7, 3), (31, 31), (33, 32), (60, 4), (97, 9), (129, 16), (257, 6), (383, 32), (384, 10)]


@pytest.mark.parametrize(("num_experts", "top_k"), ODD_SIZES)
def test_odd_numbers_of_experts_and_choices(num_experts, top_k):
    for dtype in (torch.float32, torch.bfloat16):
        out, choices = route(random_logits(5, num_experts, num_experts, dtype), top_k, seed=top_k)
        assert problems(out, choices, num_experts) == []


@pytest.mark.parametrize("renormalizes", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_experts", [40, 128, 256, 384])
def test_ties_infinities_and_nan(num_experts, dtype, renormalizes):
    names, logits = hard_logits(num_experts, dtype)
    out, choices = route(logits, 8, renormalizes)
    wrong = [name for name, ids, wanted in zip(names, out.ids.tolist(), choices.ids.tolist(), strict=True) if ids != wanted]
    assert wrong == [] and problems(out, choices, num_experts) == []


def test_identical_rows_are_one_set_of_experts_with_every_row():
    out, choices = route(random_logits(1, 128, 3).repeat(32, 1), 8)
    assert problems(out, choices, 128) == []
    assert out.num_active.item() == 8 and out.row_bits[out.experts[:8].long()].tolist() == [-1] * 8


def test_rows_that_share_no_expert():
    logits = random_logits(32, 384, 4)
    for row in range(32):
        logits[row, row * 12 : row * 12 + 12] += 100
    out, choices = route(logits, 12)
    assert problems(out, choices, 384) == []
    assert out.num_active.item() == 384 and out.experts.tolist() == list(range(384))


def test_all_rows_choose_the_last_expert_alone():
    logits = random_logits(32, 384, 5)
    logits[:, 383] = 100.0
    out, choices = route(logits, 1)
    assert problems(out, choices, 384) == []
    assert out.experts[:2].tolist() == [383, -1] and out.row_bits[383].item() == -1


def test_no_rows():
    out, choices = route(random_logits(0, 128, 6), 8)
    assert problems(out, choices, 128) == [] and out.num_active.item() == 0
    out, choices = route_ids(torch.empty(0, 8, dtype=torch.int32), torch.empty(0, 8), 128)
    assert problems(out, choices, 128) == []


@pytest.mark.parametrize("num_live_rows", [0, 1, 5, 9, 40])
def test_rows_that_pad_a_graph_choose_nothing(num_live_rows):
    """Whatever they hold, and with ids that no expert has."""
    logits = random_logits(9, 128, 7)
    logits[num_live_rows:] = float("nan")
    out, choices = route(logits, 8, num_live_rows=num_live_rows)
    assert problems(out, choices, 128) == []
    ids = oracle.choose(logits, 8, True).ids.int()
    ids[num_live_rows:] = 12345
    out, choices = route_ids(ids, torch.rand(9, 8), 128, num_live_rows)
    assert problems(out, choices, 128) == []


def test_strided_logits():
    wide = random_logits(5, 300, 8)
    out, choices = route(wide[:, 100:228], 8)
    assert problems(out, choices, 128) == []


@pytest.mark.parametrize("num_experts", [64, 128, 384])
@pytest.mark.parametrize("rows", [1, 8, 16, 32])
def test_given_choices_with_gaps_and_repetitions(rows, num_experts):
    generator = torch.Generator().manual_seed(rows + num_experts)
    ids = torch.randint(-1, num_experts, (rows, 6), generator=generator, dtype=torch.int32)
    ids[:, 2] = -1
    ids[0, 4] = ids[0, 5] = num_experts - 1
    ids[-1] = -1
    weights = torch.rand(rows, 6, generator=generator)
    out, choices = route_ids(ids, weights, num_experts, seed=rows)
    assert problems(out, choices, num_experts) == []
    assert torch.equal(out.weights, torch.where(ids >= 0, weights, 0.0)), "weights are taken bit by bit"


def test_given_choices_place_like_the_routers_own():
    logits = random_logits(16, 128, 10)
    own, _ = route(logits, 8)
    given, _ = route_ids(own.ids.clone(), own.weights.clone(), 128)
    assert torch.equal(own.buffer, given.buffer)


@pytest.mark.parametrize("bad", [128, -2, 2**31 - 1, -(2**31)])
def test_an_id_that_no_expert_has_ends_the_launch(bad):
    ids = torch.zeros(3, 4, dtype=torch.int32)
    ids[1, 2] = bad
    router = BitmapRouting(128, 4, CPU)
    out = router.outputs(3)
    message = f"bitmap_routing stopped: rank 0, SM 0, block 0: row 1 has expert {bad}, outside -1..127 \\(-1: none\\)"
    with pytest.raises(BitmapRoutingFault, match=f"^{message}$"):
        router.route_ids(ids, torch.zeros(3, 4), out)
    with pytest.raises(BitmapRoutingFault, match=f"an earlier launch failed: {message}"):
        router.route_ids(torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 4), out)


def test_results_repeat_bit_by_bit_under_every_schedule():
    logits = random_logits(16, 256, 11)
    first, choices = route(logits, 8, seed=0)
    assert problems(first, choices, 256) == []
    for seed in range(1, 12):
        assert torch.equal(first.buffer, route(logits, 8, seed=seed)[0].buffer)


def test_a_steps_consumer_warps_route_more_rows_than_they_are():
    """The stage alone, on shared memory: selftest_routing.cpp."""
    rows, num_experts, top_k = 27, 300, 5
    for seed in range(6):
        result = _C.emulation_selftest("routing_by_consumers", seed)
        assert (result["status"], result["message"], result["num_races"]) == ("ok", "", 0)
        sizes = [rows * num_experts] + [rows * top_k] * 3 + [num_experts] * 2 + [1]
        logits, ids, places, weights, row_bits, experts, (num_active,) = torch.tensor(result["values"], dtype=torch.float64).split(sizes)
        choices = oracle.choose(logits.view(rows, num_experts), top_k, True)
        wanted = oracle.place(choices.ids, num_experts)
        assert ids.view(rows, top_k).tolist() == choices.ids.tolist() and places.view(rows, top_k).tolist() == wanted.places
        assert same_weights(weights.view(rows, top_k), choices.weights)
        assert row_bits.tolist() == wanted.row_bits and num_active == len(wanted.experts)
        assert experts.tolist() == wanted.experts + [-1] * (num_experts - len(wanted.experts))


TIE_TO_HIGHER_ID, NAN_OUTRANKS, SHIFTED_ROW_BITS, PLACE_COUNTS_ITSELF, UNSYNCED_CHOICES = 15, 16, 17, 18, 19  # dialect::Planted


@pytest.mark.parametrize(
    ("planted", "wrong"),
    [
        (TIE_TO_HIGHER_ID, {"ids", "row_bits", "experts", "places", "active_words"}),
        (NAN_OUTRANKS, {"ids", "row_bits"}),
        (SHIFTED_ROW_BITS, {"row_bits"}),
        (PLACE_COUNTS_ITSELF, {"experts", "places"}),
    ],
    ids=["tie to the higher id", "NaN outranks", "shifted row bits", "place counts itself"],
)
def test_planted_bugs_are_found_and_blamed(planted, wrong):
    """On the rows that rules of choice are about; what a bug does not touch stays right."""
    _, logits = hard_logits(128)
    out, choices = route(logits, 8, planted=planted)
    found = set(problems(out, choices, 128))
    assert wrong <= found, found
    assert "weights" not in found or planted == TIE_TO_HIGHER_ID


@pytest.mark.parametrize("num_experts", [64, 384])
@pytest.mark.parametrize("planted", [TIE_TO_HIGHER_ID, SHIFTED_ROW_BITS, PLACE_COUNTS_ITSELF])
def test_planted_bugs_are_found_on_ordinary_logits(planted, num_experts):
    """In 32 rows of bf16 logits some tie at the last choice, or among the chosen."""
    out, choices = route(random_logits(32, num_experts, 12, torch.bfloat16), 8, planted=planted)
    assert problems(out, choices, num_experts) != []


def test_places_before_the_choices_are_found():
    """With most schedules: shared memory that no row has written is poison."""
    logits = random_logits(16, 128, 13)
    found = [bool(problems(*route(logits, 8, seed=seed, planted=UNSYNCED_CHOICES), 128)) for seed in range(6)]
    assert sum(found) >= 3, found


def test_the_launch_refuses_what_the_front_never_passes():
    params = _C.abi.BitmapRoutingParams()

    def refusal(**fields):
        for name, value in fields.items():
            setattr(params, name, value)
        with pytest.raises(ValueError) as error:
            _C.bitmap_routing_emulate(params)
        return str(error.value)

    assert refusal(rows=33) == "bitmap_routing: rows 33 is outside 0..32"
    assert refusal(rows=4, num_experts=385) == "bitmap_routing: num_experts 385 is outside 1..384"
    assert refusal(num_experts=20, top_k=21) == "bitmap_routing: top_k 21 is outside 1..20"
    assert refusal(top_k=8, at=_C.routing_layout(4, 20, 7)) == "bitmap_routing: the layout is not that of rows, num_experts and top_k"
    assert refusal(at=_C.routing_layout(4, 20, 8)) == "bitmap_routing: it takes either logits or ids"
    memory = torch.zeros(1024, dtype=torch.int32)
    assert refusal(ids=memory.data_ptr()) == "bitmap_routing: ids and weights come together"
    assert refusal(ids=0, logits=memory.data_ptr(), logits_stride=19) == "bitmap_routing: logits_stride 19 is below num_experts 20"
    assert refusal(logits_stride=20, out=memory.data_ptr() + 4) == "bitmap_routing: the address of out is null or not a multiple of 16"
    assert refusal(out=(memory.data_ptr() + 15) // 16 * 16) == "bitmap_routing: there is no fault record"
