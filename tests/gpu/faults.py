"""What the scripts faulty_*.py have in common: waiting for the records of launches that end themselves, and the trap behind them."""

import time
from collections.abc import Callable

import torch

LIMIT_S = 20.0


def await_records(records: Callable[[], list], start: float, wanted: int = 1) -> list:
    """The records once there are `wanted`, and "record after N s" printed, counted from `start`. Ends the script where they do not come."""
    while len(found := records()) < wanted:
        if time.monotonic() - start > LIMIT_S:
            raise SystemExit(f"{len(found)} of {wanted} records after {LIMIT_S:g} s")
        time.sleep(0.001)
    print(f"record after {time.monotonic() - start:.3f} s")
    return found


def only(record) -> list:
    """A kernel's one record, or none, as a list."""
    return [] if record is None else [record]


def print_trap(start: float) -> None:
    """Waits for the device, whose context the trap has ended, and prints the CUDA error."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"trapped after {time.monotonic() - start:.3f} s: {str(error).splitlines()[0]}")
