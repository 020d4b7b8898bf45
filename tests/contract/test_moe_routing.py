"""SGLang's routing of a softmax MoE is what bitmap_routing does: ids and their order exactly, weights to rounding, bitmaps as its alignment.

Oracles: the router kernel that SGLang runs on CUDA (`moe_fused_gate`) and its alignment of few choices (`moe_align_small_numel`), both
in Triton's interpreter, in a process of their own; and the router's native form in topk.py. Their weights come from other exponentials than
the GPU's: here both sides are held to float32's rounding, and to each other in tests/gpu.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")
from routing_cases import hard_logits, random_logits, same_weights  # noqa: E402

from sgl_lowlatency.kernels.bitmap_routing import BitmapRouting  # noqa: E402
from sgl_lowlatency.reference import routing as oracle  # noqa: E402

CPU = torch.device("cpu")
BLOCK_SIZE = 16
FEW_CHOICES = 64  # moe_align_small_numel's SMALL_NUMEL_LIMIT
SHAPES = [(64, 8), (128, 8), (160, 6), (256, 8), (384, 6), (384, 8), (128, 1)]


def ours(logits, top_k, renormalizes):
    router = BitmapRouting(logits.shape[1], top_k, CPU, renormalizes)
    out = router.outputs(logits.shape[0])
    router.route(logits, out)
    return out


def cases():
    found = {}
    for num_experts, top_k in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for renormalizes in (True, False):
                name = f"{num_experts} {top_k} {dtype} {renormalizes}"
                found[f"random {name}"] = (random_logits(16, num_experts, num_experts, dtype), top_k, renormalizes)
                names, logits = hard_logits(num_experts, dtype)
                if dtype == torch.bfloat16:  # Triton's interpreter misreads bf16's subnormal numbers
                    logits = logits[[name != "subnormal" for name in names]]
                found[f"hard {name}"] = (logits, top_k, renormalizes)
    return found


CASES = cases()


@pytest.fixture(scope="module")
def sglangs(tmp_path_factory):
    """By case: (ids, weights, sorted_token_ids, expert_ids) as SGLang's kernels have them; the last two where the choices are few."""
    folder = tmp_path_factory.mktemp("routing")
    torch.save(CASES, folder / "cases.pt")
    script = Path(__file__).with_name("interpreted_routing.py")
    done = subprocess.run([sys.executable, script, folder, str(BLOCK_SIZE)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "routed.pt")


@pytest.mark.parametrize("name", CASES)
def test_choices_are_those_of_sglangs_kernel(sglangs, name):
    logits, top_k, renormalizes = CASES[name]
    ids, weights, _, _ = sglangs[name]
    out = ours(logits, top_k, renormalizes)
    assert out.ids.tolist() == ids.tolist()
    choices = oracle.choose(logits, top_k, renormalizes)
    assert choices.ids.tolist() == ids.tolist()
    assert same_weights(weights, choices.weights) and same_weights(out.weights, choices.weights)


def test_weights_are_nan_in_the_same_rows(sglangs):
    rows = 0
    for name, (logits, top_k, renormalizes) in CASES.items():
        nan = sglangs[name][1].isnan()
        assert torch.equal(ours(logits, top_k, renormalizes).weights.isnan(), nan), name
        rows += int(nan.all(1).sum())
        assert torch.equal(nan.any(1), nan.all(1))
    assert rows == 8 * len(CASES) // 2


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("random")])
def test_bitmaps_are_sglangs_alignment(sglangs, name):
    """Experts ascending, their rows ascending: a block of every active expert in order, of its choices in order."""
    logits, top_k, renormalizes = CASES[name]
    _, _, tokens, blocks = sglangs[name]
    rows = FEW_CHOICES // top_k  # as many as SGLang aligns by that kernel
    out = ours(logits[:rows], top_k, renormalizes)
    num_active = out.num_active.item()
    assert blocks.tolist() == out.experts[:num_active].tolist()
    expected = []
    for place, expert in enumerate(out.experts[:num_active].tolist()):
        row_ids = [row for row in range(out.ids.shape[0]) if out.row_bits[expert].item() >> row & 1]
        mine = [row * top_k + out.ids[row].tolist().index(expert) for row in row_ids]
        assert all(out.places.flatten()[choice] == place for choice in mine)
        expected += mine + [out.ids.numel()] * (BLOCK_SIZE - len(mine))
    assert tokens.tolist() == expected
    assert (expected, blocks.tolist()) == oracle.aligned(out.ids, logits.shape[1], BLOCK_SIZE)


@pytest.mark.parametrize("renormalizes", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), SHAPES)
def test_choices_are_those_of_the_native_router(num_experts, top_k, renormalizes):
    """On logits without ties, which torch.topk breaks as it likes."""
    from sglang.srt.layers.moe.topk import fused_topk_torch_native

    logits = torch.stack([torch.randperm(num_experts, generator=torch.Generator().manual_seed(row)) for row in range(16)]).float() / 16 - 4
    weights, ids = fused_topk_torch_native(torch.empty(16, 1), logits, top_k, renormalizes)
    out = ours(logits, top_k, renormalizes)
    assert out.ids.tolist() == ids.tolist()
    choices = oracle.choose(logits, top_k, renormalizes)
    assert same_weights(weights, choices.weights) and same_weights(out.weights, choices.weights)


def test_cuda_routes_softmax_through_the_kernel_compared_here():
    """fused_topk's branch on CUDA, and that Qwen3-MoE comes there: no bias, no groups, softmax."""
    import inspect

    from sglang.srt.layers.moe import topk
    from sglang.srt.models import qwen3_moe

    text = inspect.getsource(topk.fused_topk)
    softmax, _ = text.split('elif scoring_func == "sigmoid":', 1)
    assert "elif _is_cuda or use_rocm_triton:" in softmax and "_jit_moe_fused_gate(" in softmax
    block = inspect.getsource(qwen3_moe.Qwen3MoeSparseMoeBlock.__init__)
    assert "use_grouped_topk=False" in block and "renormalize=norm_topk_prob" in block and "scoring_func" not in block
