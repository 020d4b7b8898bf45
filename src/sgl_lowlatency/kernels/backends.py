"""What the compiled extension of this installation can run."""

from __future__ import annotations


def compiled_backends() -> dict[str, list[str]]:
    """For example {"emulation": ["host"], "cuda": ["sm_90a", "sm_100a", "sm_103a"]}; no "cuda" in a host-only build.

    Raises ImportError, with what to do about it, when the extension is missing or does not load.
    """
    try:
        from sgl_lowlatency import _C
    except ImportError as error:
        raise ImportError(
            f"the compiled extension sgl_lowlatency._C does not load ({error}): reinstall sgl-lowlatency"
        ) from error
    return _C.backends()
