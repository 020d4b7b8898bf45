"""The record a kernel leaves when it cannot go on, in words."""

from __future__ import annotations

from sgl_lowlatency.kernels import abi  # first: raises with what to do when the extension is missing
from sgl_lowlatency import _C

_KIND_NAMES = {value: name for name, value in _C.abi.kFaultKinds.items()}
EDGE_CONTENT = {  # what a layer hands over, by the edge's name
    "qkv": "q, k and v",
    "partial": "attention of one split of a row",
    "attention": "attention output",
    "out_proj": "residual stream after attention",
    "gate_up": "SwiGLU activations",
    "down": "residual stream after the MLP",
    "router": "router logits",
}
_PEER_KINDS = ("peer_tile", "peer_abort")
_INPUT_NAMES = {
    "bad_token_id": ("input id", "the vocabulary size"),
    "bad_position": ("position", "the rows of the rope table"),
    "bad_length": ("sequence length", "the columns of req_to_token, less the new tokens that lengths do not count"),
    "bad_request_row": ("request row", "the rows of req_to_token"),
    "bad_slot": ("KV slot", "the slots of the KV pool"),
}


class DecodeStepFault(RuntimeError):
    """A launch that ended itself; the message is describe_fault's."""


class BitmapRoutingFault(RuntimeError):
    """The same of bitmap_routing."""


class DraftSamplerFault(RuntimeError):
    """A draft_sampler launch that ended itself; the message is describe_draft_fault's."""


class FusedMoeFault(RuntimeError):
    """A fused_moe launch that ended itself; the message is describe_moe_fault's."""


class AttentionOutFault(RuntimeError):
    """An attention_out launch that ended itself; the message is describe_attention_out_fault's."""


class AttentionInFault(RuntimeError):
    """An attention_in launch that ended itself; the message is describe_attention_in_fault's."""


class MonokernelFault(RuntimeError):
    """The same of k1 or k2; of several ranks, their messages one after the other."""


class EpilogueMulticastFault(RuntimeError):
    """The same of epilogue_multicast; of several ranks, their messages one after the other."""


_PEER_OPS = {
    _C.abi.kPeerTiles: "", _C.abi.kPeerOutProj: " of out_proj", _C.abi.kPeerDown: " of down", _C.abi.kPeerWoB: " of wo_b",
    _C.abi.kPeerExperts: " of the experts",
}  # fmt: skip


def describe_part(rank: int, layer: int, tile: int, phase: int) -> str:
    """What one rank waits for of another; phase: abi::PeerPhase."""
    if phase == _C.abi.kPeerEmbedding:
        return f"rank {rank}'s rows of the embedding, tile {tile}"
    return f"rank {rank}'s part of tile {tile}{_PEER_OPS[phase]} of layer {layer}"


def _describe_peers(record, stopped: str, has_layer: bool = True) -> str:
    """Of a record that concerns another rank. Its edge is the rank that was waited for, expected the tile and its phase. stopped: what stopped where.
    has_layer: whether the kernel's own records name a layer."""
    own = describe_part(record.edge, record.layer, record.expected & 0xFFFFFF, record.expected >> 24) if record.edge >= 0 else None
    if _KIND_NAMES[record.kind] == "peer_tile":
        return f"{stopped} waited {record.waited_ns / 1e9:.2f} s for {own}"
    waiter, awaited, layer, tile, phase = _C.abort_reason(record.waited_ns)
    meanwhile = f", while it waited for {own}" if own else ""
    if phase == _C.abi.kPeerNothing:
        where = f" in layer {layer}" if has_layer else ""
        return f"{stopped}: rank {waiter} stopped by itself{where}{meanwhile}"
    return f"{stopped}: rank {waiter} gave up waiting for {describe_part(awaited, layer, tile, phase)}{meanwhile}"


def describe_fault(record, kernel: str = "decode_step") -> str:
    """One line for an operator: which rank, SM, block and layer waited for what, or which input was out of range. kernel: whose record it is."""
    kind = _KIND_NAMES[record.kind]
    block = f"rank {record.rank}, SM {record.sm}, block {record.block}"
    signed = record.waited_ns - 2**64 if record.waited_ns >= 2**63 else record.waited_ns  # of a value, the whole of it, int64
    if kind in _PEER_KINDS:
        return _describe_peers(record, f"{kernel} stopped: {block}", has_layer=kernel != "fused_moe")  # whose own records have an op there
    if kind == "bad_expert_id":
        return f"bitmap_routing stopped: {block}: row {record.edge} has expert {signed}, outside -1..{record.expected - 1} (-1: none)"
    if kind == "edge_deadline":  # layer: that fills the word; expected: the word's index in its buffer
        edge = abi.EDGE_NAMES[record.edge]
        content = "embedding" if record.layer < 0 else EDGE_CONTENT[edge]
        return (
            f"{kernel} stopped: {block} waited {record.waited_ns / 1e9:.2f} s for word {record.expected} of edge {edge!r} of "
            f"layer {record.layer} ({content}), which no block has written"
        )
    where = f"{block}, layer {record.layer}"
    if kind in ("ring_full", "ring_empty"):
        what = "weights to arrive in" if kind == "ring_full" else "the consumers to free"
        return f"{kernel} stopped: {where} waited {record.waited_ns / 1e9:.2f} s for {what} ring stage {record.edge}"
    if kind == "routing":
        return f"{kernel} stopped: {where} waited {record.waited_ns / 1e9:.2f} s for its own routing"
    if kind == "partial":
        return f"{kernel} stopped: {where} waited {record.waited_ns / 1e9:.2f} s for its warps to finish a tile of {abi.OP_NAMES[record.edge]}"
    what, limit = _INPUT_NAMES[kind]
    return f"{kernel} stopped: {where}: row {record.edge} has {what} {signed}, outside 0..{record.expected - 1} ({limit})"


def describe_mono_fault(record) -> str:
    """As describe_fault, of a record that k1 or k2 left."""
    return describe_fault(record, "monokernel")


def describe_draft_fault(record) -> str:
    """As describe_fault, of a record that draft_sampler left."""
    kind = _KIND_NAMES[record.kind]
    block = f"draft_sampler stopped: rank {record.rank}, SM {record.sm}, block {record.block}"
    if kind == "bad_token_id":
        signed = record.waited_ns - 2**64 if record.waited_ns >= 2**63 else record.waited_ns
        return f"{block}: request {record.edge} has anchor token {signed}, outside 0..{record.expected - 1} (the vocabulary size)"
    waited = f"{block} waited {record.waited_ns / 1e9:.2f} s"
    if kind in ("ring_full", "ring_empty"):
        return f"{waited} for {'weights to arrive in' if kind == 'ring_full' else 'the consumers to free'} ring stage {record.edge}"
    rank, missed = divmod(record.seen, record.expected)
    return f"{waited} for block {missed} of rank {rank} to answer in step {record.layer} for request {record.edge}"


def describe_moe_fault(record) -> str:
    """As describe_fault, of a record that fused_moe left."""
    kind = _KIND_NAMES[record.kind]
    if kind in _PEER_KINDS:
        return describe_fault(record, "fused_moe")
    waited = f"fused_moe stopped: rank {record.rank}, SM {record.sm}, block {record.block} waited {record.waited_ns / 1e9:.2f} s"
    if kind in ("ring_full", "ring_empty"):
        what = "weights to arrive in" if kind == "ring_full" else "the consumers to free"
        return f"{waited} for {what} ring stage {record.edge} of {_C.abi.kMoeOpNames[record.layer]}"
    if kind == "routing":
        return f"{waited} for its own routing"
    return f"{waited} for word {record.expected} of {_C.abi.kMoeEdgeNames[record.edge]}, which no block has written"


def describe_attention_out_fault(record) -> str:
    """As describe_fault, of a record that attention_out left."""
    return _describe_slice_fault(record, "attention_out", _C.abi.kAttnOutOpNames, _C.abi.kAttnOutEdgeNames)


def describe_attention_in_fault(record) -> str:
    """As describe_fault, of a record that attention_in left."""
    return _describe_slice_fault(record, "attention_in", _C.abi.kAttnInOpNames, _C.abi.kAttnInEdgeNames)


def _describe_slice_fault(record, kernel: str, op_names: list[str], edge_names: list[str]) -> str:
    kind = _KIND_NAMES[record.kind]
    block = f"{kernel} stopped: rank {record.rank}, SM {record.sm}, block {record.block}"
    if kind in _PEER_KINDS:
        return _describe_peers(record, block)
    if kind in _INPUT_NAMES:
        signed = record.waited_ns - 2**64 if record.waited_ns >= 2**63 else record.waited_ns
        what, limit = _INPUT_NAMES[kind]
        return f"{block}: row {record.edge} has {what} {signed}, outside 0..{record.expected - 1} ({limit})"
    waited = f"{block} waited {record.waited_ns / 1e9:.2f} s"
    if kind in ("ring_full", "ring_empty"):
        what = "weights to arrive in" if kind == "ring_full" else "the consumers to free"
        return f"{waited} for {what} ring stage {record.edge} of {op_names[record.layer]}"
    if kind == "partial":
        return f"{waited} for its warps to deliver a tile of {op_names[record.layer]}"
    return f"{waited} for word {record.expected} of {edge_names[record.edge]}, which no block has written"
