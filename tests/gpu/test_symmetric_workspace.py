"""Memory that another process maps: a handle leads to the allocation that it was made of, however small the allocations are."""

import subprocess
import sys

from sgl_lowlatency.kernels import symmetric_workspace as symmetric

SIZES = (4096, 65536, 300_000, 2**20, 2**21 + 1, 65536, 4096)
CHILD = """
import sys, torch
from sgl_lowlatency.kernels import symmetric_workspace as symmetric
torch.zeros(1, device="cuda")
for word in sys.argv[1:]:
    mapped = symmetric.open_ipc(bytes.fromhex(word))
    print(symmetric.copy_from_device(mapped, 16).hex())
    symmetric.close_ipc(mapped)
"""


def test_handles_of_small_allocations_lead_to_their_beginning():
    memory = [symmetric.allocate(size) for size in SIZES]
    marks = [bytes([number] * 16) for number in range(len(SIZES))]
    for address, mark in zip(memory, marks, strict=True):
        symmetric.copy_to_device(address, mark)
    handles = [symmetric.ipc_handle(address).hex() for address in memory]
    found = subprocess.run([sys.executable, "-c", CHILD, *handles], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [mark.hex() for mark in marks]
    for address in memory:
        symmetric.free(address)
