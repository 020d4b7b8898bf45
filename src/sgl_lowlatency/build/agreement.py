"""Do the ranks of a group agree? Each sends a claim to every other over the group's CPU side and compares all of them by itself.

Every rank decides from the same claims, so ranks that differ refuse together; one that does not come is named when the deadline is over.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

VERDICT_DEADLINE_S = 120.0  # of fallbacks and of a self-check's verdict: ranks check a width at the same time, and load kernels of SGLang's meanwhile
MESSAGE_BYTES = 16384  # of every claim, padded: whoever receives knows the size before it comes
_abandoned: list[object] = []  # messages under way when an exchange failed: gloo may still read and write their memory


class DisagreementError(RuntimeError):
    """Ranks that differ, or did not come; the message names each and what it is about."""


def exchange(claim: Mapping[str, Any], group: dist.ProcessGroup, deadline_s: float, what: str) -> list[dict]:
    """The claims of all ranks, in rank order. group: with a CPU backend (gloo). claim: JSON values.

    Raises DisagreementError naming the ranks from which nothing came within deadline_s (the group is of no use then), ValueError for a claim
    that is too long.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    text = json.dumps(claim).encode()
    if len(text) > MESSAGE_BYTES:
        raise ValueError(f"{what}: a claim of {len(text)} bytes is longer than {MESSAGE_BYTES}")
    own = torch.frombuffer(bytearray(text.ljust(MESSAGE_BYTES)), dtype=torch.uint8)
    others = [other for other in range(size) if other != rank]
    received = {other: torch.zeros(MESSAGE_BYTES, dtype=torch.uint8) for other in others}
    work = {other: [dist.irecv(received[other], group=group, group_src=other)] for other in others}
    for other in others:
        work[other].append(dist.isend(own, group=group, group_dst=other))
    end_s, missing = time.monotonic() + deadline_s, []
    for other in others:
        try:
            for one in work[other]:
                one.wait(datetime.timedelta(seconds=max(end_s - time.monotonic(), 0.001)))
        except RuntimeError:  # gloo's only word for a timeout and for a connection that the other side closed
            missing.append(other)
    if missing:
        _abandoned.append((own, received, work))
        names = ", ".join(f"rank {other}" for other in missing)
        raise DisagreementError(f"{what}: nothing came from {names} within {deadline_s:g} s (rank {rank} waited)")
    return [dict(claim) if other == rank else json.loads(bytes(received[other].tolist())) for other in range(size)]


def differences(claims: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the claims differ in, a line a key and value that is not most ranks': `rank 2 has grid 64, not 66`. Empty when they agree."""
    found = []
    for key in dict.fromkeys(key for claim in claims for key in claim):
        values = [claim.get(key) for claim in claims]
        common = max(values, key=values.count)  # of equally many, the lowest rank's
        found += [f"rank {rank} has {key} {value}, not {common}" for rank, value in enumerate(values) if value != common]
    return found


def require_agreement(claims: Sequence[Mapping[str, Any]], what: str) -> None:
    """Raises DisagreementError listing the differences."""
    found = differences(claims)
    if found:
        raise DisagreementError(f"{what}: the ranks differ:\n  - " + "\n  - ".join(found))
