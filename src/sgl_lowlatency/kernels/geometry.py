"""The shape of a decoder as the decode_step kernel takes it: run-time numbers, no model names."""

from __future__ import annotations

import dataclasses
from typing import Any

HEAD_DIMS = (64, 128)
TILE_ROWS, MAX_EXPERTS, MAX_TOP_K = 16, 384, 32  # of the router: abi::kTileRows, kMaxExperts, kMaxTopK, which the unit tests compare
VOCAB_PADDING = 64  # SGLang pads the vocabulary to a multiple of this, times the ranks where that does not divide
MAX_GROUP = 16  # query heads of one KV head; four attention items of kMaxHeadsPerItem
CHANNEL_MULTIPLE = {2: 64, 1: 128}  # of every K, by bytes of a weight: each consumer warp reads K in runs of 128 bytes
FP8_EXPERT_ROWS = 8  # of a step with FP8 experts: at eight ours takes 5.96 ms, SGLang's 6.8 served (DESIGN-moe.md); 16 were not compared


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of a dense decoder with grouped-query attention, per rank (TP1: of the whole model).

    num_layers: decoder layers. hidden, intermediate: channels. num_q_heads, num_kv_heads: attention heads.
    head_dim: channels of a head. vocab: rows of the embedding. max_position: rows of the cos/sin table.
    rms_eps: epsilon of every RMSNorm. tied_head: the LM head's weight is the embedding's.

    num_experts: 0 for dense layers; else every layer is a MoE layer, `intermediate` counts for nothing, and a row takes top_k experts
    of moe_intermediate channels, whose weights norm_topk_prob divides by their sum.
    """

    num_layers: int
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    rms_eps: float
    tied_head: bool
    num_experts: int = 0
    top_k: int = 0
    moe_intermediate: int = 0
    norm_topk_prob: bool = False

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def num_pairs_a_row(self) -> int:
        """Activations that a row hands from gate_up to down: one, or one an expert."""
        return self.top_k if self.is_moe else 1

    @property
    def mlp_channels(self) -> int:
        """Channels of a layer's MLP, or of one expert."""
        return self.moe_intermediate if self.is_moe else self.intermediate

    def vocab_shard(self, num_ranks: int) -> int:
        """Rows of the embedding and columns of logits of each of several ranks, padding included: rank r has ids r * vocab_shard and following."""
        padding = VOCAB_PADDING if -(-self.vocab // VOCAB_PADDING) * VOCAB_PADDING % num_ranks == 0 else VOCAB_PADDING * num_ranks
        return -(-self.vocab // padding) * padding // num_ranks

    def shard(self, num_ranks: int) -> Geometry:
        """What SGLang leaves each of several ranks: its heads, its channels of the MLP or of every expert, its rows of the vocabulary.

        Raises ValueError naming every field of the HF config that does not divide; of one rank, the geometry as it is.
        """
        if num_ranks == 1:
            return self
        channels = "moe_intermediate" if self.is_moe else "intermediate"
        divided = {"num_q_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", channels: f"{channels}_size"}
        bad = [
            f"config.{theirs} {getattr(self, ours)} is not a multiple of tp_size {num_ranks}"
            for ours, theirs in divided.items()
            if getattr(self, ours) % num_ranks
        ]
        if bad:
            raise ValueError("; ".join(bad))
        return dataclasses.replace(self, vocab=self.vocab_shard(num_ranks), **{name: getattr(self, name) // num_ranks for name in divided})

    def expected_experts(self, rows: int) -> float:
        """Distinct experts that `rows` rows take in a layer if each takes any top_k, equally likely and independently; 0 for dense layers."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** rows) if self.is_moe else 0.0

    @property
    def mlp_words(self) -> str:
        """What a layer's MLP is, for people to read."""
        return f"{self.num_experts} experts of {self.moe_intermediate}, {self.top_k} a row" if self.is_moe else f"intermediate {self.intermediate}"

    @classmethod
    def from_hf_config(cls, config: Any) -> Geometry:
        """The geometry of an HF config of a dense family, or of one with num_experts: Qwen3-MoE.

        head_dim defaults to hidden_size / num_attention_heads, norm_topk_prob to true, as in SGLang's models. max_position is the config's;
        a build replaces it by the rows of the cos/sin table that SGLang made.
        Raises ValueError naming every field that is missing or not a positive number (rms_norm_eps) or integer (all others).
        """
        fields = {
            "num_layers": "num_hidden_layers",
            "hidden": "hidden_size",
            "num_q_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "intermediate": "intermediate_size",
            "vocab": "vocab_size",
            "max_position": "max_position_embeddings",
            "rms_eps": "rms_norm_eps",
        }
        is_moe = bool(getattr(config, "num_experts", None))
        if is_moe:
            del fields["intermediate"]
            fields |= {"num_experts": "num_experts", "top_k": "num_experts_per_tok", "moe_intermediate": "moe_intermediate_size"}
        values = {ours: getattr(config, theirs, None) for ours, theirs in fields.items()}
        bad = [
            f"config.{theirs} is {values[ours]!r}, not a positive {'number' if ours == 'rms_eps' else 'integer'}"
            for ours, theirs in fields.items()
            if not isinstance(values[ours], (int, float) if ours == "rms_eps" else int)
            or isinstance(values[ours], bool)
            or values[ours] <= 0
        ]
        if bad:
            raise ValueError("; ".join(bad))
        head_dim = getattr(config, "head_dim", None) or values["hidden"] // values["num_q_heads"]
        if is_moe:
            values |= {"intermediate": 0, "norm_topk_prob": bool(getattr(config, "norm_topk_prob", True))}
        return cls(**values, head_dim=head_dim, tied_head=bool(getattr(config, "tie_word_embeddings", False)))

    def reasons(self, element_bytes: int = 2) -> list[str]:
        """Why the kernel cannot run this geometry, one line a field, in the HF config's names; empty when it can.

        element_bytes: of a weight, 2 (bf16) or 1 (FP8).
        """
        multiple = CHANNEL_MULTIPLE[element_bytes]
        reasons = []
        if self.head_dim not in HEAD_DIMS:
            reasons.append(f"config.head_dim {self.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
        channels = "moe_intermediate_size" if self.is_moe else "intermediate_size"
        for name, value in (("hidden_size", self.hidden), (channels, self.mlp_channels)):
            if value % multiple:
                reasons.append(f"config.{name} {value} is not a multiple of {multiple}")
        if self.head_dim in HEAD_DIMS and self.num_q_heads * self.head_dim % multiple:
            reasons.append(f"config.num_attention_heads {self.num_q_heads} of {self.head_dim} channels are not a multiple of {multiple}")
        if self.num_q_heads % self.num_kv_heads:
            reasons.append(
                f"config.num_attention_heads {self.num_q_heads} is not a multiple of "
                f"config.num_key_value_heads {self.num_kv_heads}"
            )
        elif self.num_q_heads // self.num_kv_heads > MAX_GROUP:
            reasons.append(
                f"config.num_attention_heads {self.num_q_heads} over config.num_key_value_heads {self.num_kv_heads} "
                f"is more than {MAX_GROUP} query heads a KV head"
            )
        if self.is_moe:
            if self.num_experts % TILE_ROWS or self.num_experts > MAX_EXPERTS:
                reasons.append(f"config.num_experts {self.num_experts} is not a multiple of {TILE_ROWS} up to {MAX_EXPERTS}")
            if not 1 <= self.top_k <= min(self.num_experts, MAX_TOP_K):
                reasons.append(f"config.num_experts_per_tok {self.top_k} is outside 1..{min(self.num_experts, MAX_TOP_K)}")
        return reasons
