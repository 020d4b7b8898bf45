"""Low-latency decode kernels that SGLang loads as a kernel plugin."""

__version__ = "0.1.0"

# The SGLang release the contract tests run against. Another release is not refused here: its own checks and the
# self-check decide.
TESTED_SGLANG = "0.5.23"
