"""The rule of choice of DeepSeek-V4.1 is what fused_moe and its oracle have: SGLang's router kernel, in Triton's interpreter, in a process of its
own. And what vision_topk, the runner and the layer hand it, pinned in SGLang's text."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
from fused_moe_cases import Moe  # noqa: E402
from sglang_source import source  # noqa: E402

from sgl_lowlatency.reference import fused_moe as oracle  # noqa: E402

ALT = 77


def random_case(seed, num_experts=384, top_k=6, rows=12, live=None):
    g = torch.Generator().manual_seed(seed)
    logits, bias, bias_alt = (torch.randn(*shape, generator=g) for shape in ((rows, num_experts), (num_experts,), (num_experts,)))
    token_ids = torch.where(torch.arange(rows) % 3 == 1, ALT, torch.arange(rows))
    return logits * 4, bias * 0.1, bias_alt * 0.1, token_ids, ALT, top_k, None if live is None else torch.tensor([live], dtype=torch.int32)


def hard_case():
    """Equal scores, values above 20 and far below 0, infinities and NaN, in logits and in the bias."""
    logits, bias, bias_alt, token_ids, alt, top_k, live = random_case(5, 64, 6, 9)
    bias.zero_()
    logits[0] = 1.0
    logits[2] = 30.0
    logits[3] = -60.0
    logits[5, 7] = float("nan")
    logits[6, 9] = float("inf")
    logits[6, 40] = float("nan")
    logits[8, ::2] = float("-inf")
    bias_alt[11] = float("nan")
    return logits, bias, bias_alt, token_ids, alt, top_k, live


CASES = {
    "random": random_case(1), "padded": random_case(2, live=7), "one choice": random_case(3, 128, 1), "draft": random_case(4, 128, 3),
    "hard": hard_case(),
}  # fmt: skip


@pytest.fixture(scope="module")
def sglangs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routing")
    torch.save(CASES, folder / "cases.pt")
    script = Path(__file__).with_name("interpreted_vision_routing.py")
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "routed.pt")


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_chooses_as_sglangs_kernel(sglangs, name):
    logits, bias, bias_alt, token_ids, alt, top_k, live = CASES[name]
    weights = SimpleNamespace(bias=bias, bias_alt=bias_alt, alt_token_id=alt, top_k=top_k, routed_scaling=1.5)
    ids, factors, is_decided = oracle.route(weights, logits, token_ids, None if live is None else int(live))
    wanted_ids, wanted = sglangs[name]
    assert bool(is_decided.all())
    assert ids.tolist() == wanted_ids.tolist()
    assert torch.allclose(factors.float(), wanted, rtol=1e-5, atol=1e-30, equal_nan=True)


def test_the_kernel_chooses_as_sglangs_on_the_hard_rows(sglangs):
    """The logits are the router's rows: x is one-hot, so that each row of logits is a column of the router."""
    logits, bias, bias_alt, token_ids, alt, top_k, _ = CASES["hard"]
    moe = Moe(128, 128, 64, top_k, grid=3, alt=True)
    rows = [0, 1, 2, 3, 4, 7]  # finite: a product with NaN or infinity spreads over the others' zeros
    moe.weights.router.zero_()
    moe.weights.router[:, : len(rows)] = logits[rows].bfloat16().T
    moe.weights.bias.copy_(bias)
    moe.weights.bias_alt.copy_(bias_alt)
    x = torch.eye(128)[: len(rows)].bfloat16()
    moe.run(x, torch.where(token_ids[rows] == alt, moe.weights.alt_token_id, 0))
    equal = [0, 2, 3]  # positions of rows 0, 2, 3: logits that bf16 holds
    assert moe.record.ids[equal].tolist() == sglangs["hard"][0][[rows[i] for i in equal]].tolist()
    assert moe.record.ids[1, 0] == sglangs["hard"][0][1, 0] == 11, "a bias that is NaN"


def test_what_sglang_hands_its_router_and_keeps_of_experts():
    routing, method = source("srt.multimodal.dsv41.vl_routing"), source("srt.layers.quantization.mxfp4_flashinfer_cutlass_moe")
    assert "sqrtsoftplus_log1p=True" in routing and "renormalize_epsilon=_RENORMALIZE_SUM_EPSILON" in routing
    assert "_RENORMALIZE_SUM_EPSILON = 1e-20" in source("srt.layers.moe.topk")
    assert "fuse_routed_scaling_factor_in_topk = True" in method and '"flashinfer_cutlass_sm90"' in method
    assert "def load_up_proj_weight_first(self) -> bool:\n        \"\"\"Load W13 directly as ``[up; gate]``" in method
    layer = source("srt.models.deepseek_v2")
    for name in ("_shared_expert_tp1", "_enable_a2a_moe", "routed_scaling_factor_fused_in_topk", "is_hash", "moe_ep_size",
                 "e_score_correction_bias_vl"):  # fmt: skip
        assert f"self.{name}" in layer, name
    assert "def get_merged(self)" in layer and "input_ids_global: Optional[torch.Tensor] = None" in layer
