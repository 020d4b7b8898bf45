"""Number formats and roundings that several instructions share."""

from __future__ import annotations

import numpy as np

U, F, D = np.uint32, np.float32, np.float64


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of f32: the product is exact in f64, the sum rounds there and once more to f32."""
    return (x.astype(D) * y.astype(D) + z.astype(D)).astype(F)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """uint32 with the bf16 in its low half, rounded to nearest even; NaN becomes a quiet NaN."""
    raw = x.view(U)
    rounded = (raw + U(0x7FFF) + (raw >> U(16) & U(1))) >> U(16)
    return np.where(np.isnan(x), raw >> U(16) | U(0x40), rounded)


def bf16_to_f32(x: np.ndarray) -> np.ndarray:
    """f32 of uint16 bf16."""
    return (x.astype(U) << U(16)).view(F)


def to_u32(x: np.ndarray) -> np.ndarray:
    """f32 integers to uint32; NaN is 0, what is outside becomes the nearest bound."""
    return np.clip(np.nan_to_num(x.astype(D)), 0, 2**32 - 1).astype(U)


def to_i32(x: np.ndarray) -> np.ndarray:
    """f32 integers to int32; NaN is 0, what is outside becomes the nearest bound."""
    return np.clip(np.nan_to_num(x.astype(D)), -(2**31), 2**31 - 1).astype(np.int32)


def _small_float(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    return sign * (mantissa * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - bias))


def _e5m2(code: int) -> float:
    if code >> 2 & 31 == 31:
        return float("nan") if code & 3 else (-1.0 if code >> 7 else 1.0) * float("inf")
    return _small_float(code, 5, 2, 15)


def _e4m3fnuz(code: int) -> float:
    return float("nan") if code == 0x80 else _small_float(code, 4, 3, 8)


# f64 [256] or [16] of every code. gfx950 has the OCP formats, gfx942 the FNUZ ones.
E4M3 = np.array([float("nan") if code & 127 == 127 else _small_float(code, 4, 3, 7) for code in range(256)])
E5M2 = np.array([_e5m2(code) for code in range(256)])
E4M3_FNUZ = np.array([_e4m3fnuz(code) for code in range(256)])
E5M2_FNUZ = np.array([float("nan") if code == 0x80 else _small_float(code, 5, 2, 16) for code in range(256)])
E2M1 = np.array([_small_float(code, 2, 1, 1) for code in range(16)])
