"""How much of K is in shared memory at a time, and how many ring stages the rest gives."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_lowlatency.kernels import abi

DEFAULT_PANEL_BUDGET_BYTES = 66 * 1024  # eight padded rows of K = 4096
MIN_STAGES = 2  # a ring of one stage would stop the weight stream at every tile


@dataclass(frozen=True)
class SharedMemory:
    """Shared memory of one block."""

    k_panel: dict[str, int]
    max_panel_bytes: int
    max_tiles_multi_panel: int
    num_stages: int
    total_bytes: int
    head_k_panel: int  # of the LM head, 0 without one
    panel_pairs: int  # MoE: pairs of a row and an expert whose activations are there at a time; 0 for dense layers


@dataclass(frozen=True)
class Experts:
    """What a MoE layer has in shared memory. num_pairs: of a step, rows * top_k. k_extent: of one expert's down. routing_bytes: of its routing."""

    num_pairs: int
    k_extent: int
    routing_bytes: int


WHOLE = ("router", "gate_up")  # of a MoE layer: one panel of all of K, which both multiply


def k_panel_for(rows: int, k_extent: int, budget_bytes: int, element_bytes: int = 2) -> int:
    """All of K if [rows, K] fits the budget (FP8: and a warp can keep its scales), else K cut into the fewest panels that fit, as equal as stages allow.

    Returns 0 when not even one stage's K fits.
    """
    stage_k = abi.stage_k(element_bytes)
    most = abi.MAX_SCALED_PANEL_K if element_bytes == 1 else k_extent
    if abi.panel_bytes(rows, k_extent) <= budget_bytes and k_extent <= most:
        return k_extent
    largest = min((budget_bytes // rows - abi.PANEL_PAD_BYTES) // 2, most) // stage_k * stage_k
    if largest <= 0:
        return 0
    num_panels = -(-k_extent // largest)
    return -(-k_extent // (num_panels * stage_k)) * stage_k


def lay_out(
    rows: int, k_extents: dict[str, int], max_tiles: dict[str, int], head_dim: int, budget_bytes: int, limit_bytes: int, element_bytes: int,
    head_k: int, experts: Experts | None = None,
) -> SharedMemory | None:
    """Panels within the budget, accumulators for ops of several panels, ring stages from the rest. None: does not fit.

    The LM head takes the layers' accumulators: with several panels it walks as many tiles at a time as there are (abi::tiles_at_once).
    Of MoE layers, what WHOLE names has one panel however large, and down, which k_extents leaves out, as many pairs as the budget holds, but
    those that one expert may have at least.
    """
    k_panel = {
        name: k if experts and name in WHOLE else k_panel_for(rows, k, budget_bytes, element_bytes) for name, k in k_extents.items()
    }
    head_k_panel = k_panel_for(rows, head_k, budget_bytes) if head_k else 0
    if 0 in k_panel.values() or (head_k and not head_k_panel):
        return None
    panel = max(abi.attention_panel_bytes(head_dim), *(abi.panel_bytes(rows, k) for k in (*k_panel.values(), head_k_panel)))
    panel_pairs = max(rows, min(experts.num_pairs, budget_bytes // abi.panel_bytes(1, experts.k_extent))) if experts else 0
    panel = max(panel, abi.panel_bytes(panel_pairs, experts.k_extent)) if experts else panel
    panel = -(-panel // 128) * 128
    tiles = max((max_tiles[name] for name in k_panel if k_panel[name] < k_extents[name]), default=0)
    tiles = max(tiles, 1) if head_k_panel < head_k else tiles
    routing_bytes = experts.routing_bytes if experts else 0
    without_ring = abi.smem_layout(rows, panel, tiles, 0, routing_bytes).total_bytes
    num_stages = min(abi.MAX_STAGES, (limit_bytes - without_ring) // abi.STAGE_BYTES)
    if num_stages < MIN_STAGES:
        return None
    total_bytes = abi.smem_layout(rows, panel, tiles, num_stages, routing_bytes).total_bytes
    return SharedMemory(k_panel, panel, tiles, num_stages, total_bytes, head_k_panel, panel_pairs)


def choose(
    rows: int, k_extents: dict[str, int], max_tiles: dict[str, int], head_dim: int, limit_bytes: int, budget_bytes: int, element_bytes: int = 2,
    head_k: int = 0, experts: Experts | None = None,
) -> SharedMemory | None:
    """The layout of the given budget; when it does not fit (too many accumulators), the best of the other budgets.

    head_k: K of the LM head, which is bf16; 0: the step has none. experts: of MoE layers.
    """
    others = limit_bytes, element_bytes, head_k, experts
    preferred = lay_out(rows, k_extents, max_tiles, head_dim, budget_bytes, *others)
    if preferred is not None:
        return preferred
    stage_k = abi.stage_k(element_bytes)
    panels = range(abi.panel_bytes(rows, stage_k), limit_bytes, rows * stage_k * 2)
    whole = (abi.panel_bytes(rows, k) for k in k_extents.values())
    layouts = (lay_out(rows, k_extents, max_tiles, head_dim, budget, *others) for budget in (*panels, *whole))
    return max((one for one in layouts if one is not None), key=lambda one: one.num_stages, default=None)
