"""What a benchmark needs to know of a model: its geometry and what its family adds to a layer."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

from sgl_lowlatency.guard.family import LLAMA, QWEN2, QWEN3, QWEN3_MOE, Family
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan.presets import NAMED, read_config

FAMILIES = {family.architecture: family for family in (QWEN3, LLAMA, QWEN2, QWEN3_MOE)}
# by the name before the first dash; all others are Qwen3 or Qwen3-MoE, whose layers have the same norms
_FAMILY_OF_PRESET = {"llama": LLAMA, "qwen2.5": QWEN2}


@dataclasses.dataclass(frozen=True)
class Shape(Geometry):
    """A geometry whose layers have q and k norms (Qwen3), a bias of qkv (Qwen2), or neither (Llama)."""

    has_qk_norm: bool = True
    has_qkv_bias: bool = False

    @classmethod
    def of(cls, geometry: Geometry, family: Family) -> Shape:
        return cls(**vars(geometry), has_qk_norm=family.has_qk_norm, has_qkv_bias=family.has_qkv_bias)

    @classmethod
    def from_config(cls, config: dict) -> Shape:
        """The shape of an HF config. Raises ValueError for an architecture that decode_step does not compute."""
        names = config.get("architectures") or []
        if len(names) != 1 or names[0] not in FAMILIES:
            raise ValueError(f"config.architectures {names!r} is not one of {', '.join(FAMILIES)}")
        return cls.of(Geometry.from_hf_config(SimpleNamespace(**config)), FAMILIES[names[0]])

    @property
    def geometry(self) -> Geometry:
        """What plans and kernels take: the sizes alone, so that a plan's hash is a server's."""
        return Geometry(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Geometry)})

    @property
    def layer_matrix_elements(self) -> int:
        """Elements of one layer's matrices that every step reads: of a MoE layer not its experts'."""
        q, kv = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden * (2 * q + 2 * kv) + self.hidden * (self.num_experts if self.is_moe else 3 * self.intermediate)

    @property
    def expert_elements(self) -> int:
        """Elements of one expert's matrices; 0 for dense layers."""
        return 3 * self.hidden * self.moe_intermediate

    @property
    def layer_weight_elements(self) -> int:
        """Elements of layer_matrix_elements, norms and bias."""
        q, kv = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        extras = (2 * self.head_dim if self.has_qk_norm else 0) + (q + 2 * kv if self.has_qkv_bias else 0)
        return self.layer_matrix_elements + 2 * self.hidden + extras

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of bf16 K and V of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 2


PRESETS = {name: Shape.of(geometry, _FAMILY_OF_PRESET.get(name.split("-")[0], QWEN3)) for name, geometry in NAMED.items()}


def cut(shape: Shape, layers: int | None) -> Shape:
    """The shape with its first `layers` layers only; None keeps all. Raises ValueError for none, or more than there are."""
    if layers is None:
        return shape
    if not 1 <= layers <= shape.num_layers:
        raise ValueError(f"--layers {layers} is not within 1..{shape.num_layers}")
    return dataclasses.replace(shape, num_layers=layers)


def load_shape(name: str) -> tuple[str, Shape]:
    """(short name, shape) of a preset, or of a model's config.json or the folder that holds it.

    Raises ValueError when it is neither, or a model that decode_step cannot run, with every reason.
    """
    if name in PRESETS:
        return name, PRESETS[name]
    path, config = read_config(name)
    try:
        shape = Shape.from_config(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if reasons := shape.reasons():
        raise ValueError(f"{path}: {'; '.join(reasons)}")
    return path.resolve().parent.name, shape
