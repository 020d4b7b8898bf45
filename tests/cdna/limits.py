"""The one table of what each kernel may take: a change of a kernel that breaks a line fails tests/unit/cdna/test_resource_gate.py.

Every kernel of csrc/launch/*.hip has a line. Bounds are a little above what was compiled when they were set, by clang 22: a change that needs more
changes the line, with its reason. One workgroup of eight waves takes a CU, so that a lane may have 256 registers.
"""

from __future__ import annotations

from cdna.resources import LDS_BYTES, Limits

# Of every kernel that is shipped: no memory that the compiler put there, no access that is one of LDS too, no call.
CLEAN = {"vgpr_spills": 0, "sgpr_spills": 0, "scratch_bytes": 0, "scratch_accesses": 0, "flat": 0, "calls": 0}


def _kernel(isa: str, most: dict[str, int], least: dict[str, int]) -> Limits:
    return Limits(CLEAN | {"lds_bytes": LDS_BYTES[isa]} | most, {"workgroups": 1} | least)


# k1 hands over by words that are their own flags: no fence but the one of a fault's record, which is of system scope.
# k2 releases and acquires once among the GPU's workgroups, when the last one closes the launch, and acquires what other ranks pushed.
_K1 = {"vgprs": 128, "agent_releases": 0, "agent_acquires": 0, "system_acquires": 0, "barriers": 6}
_K2 = {"vgprs": 192, "agent_releases": 1, "agent_acquires": 1, "system_acquires": 3, "barriers": 32}
# (kernel, instruction set) -> limits
LIMITS: dict[tuple[str, str], Limits] = {
    ("k1", "gfx942"): _kernel("gfx942", _K1, {"mfma": 2, "lds_dma": 8, "traps": 1}),
    ("k1", "gfx950"): _kernel("gfx950", _K1, {"mfma": 1, "lds_dma": 4, "traps": 1}),
    ("k2", "gfx942"): _kernel("gfx942", _K2, {"mfma": 16, "lds_dma": 16, "traps": 1}),
    ("k2", "gfx950"): _kernel("gfx950", _K2, {"mfma": 8, "lds_dma": 8, "traps": 1}),
}
