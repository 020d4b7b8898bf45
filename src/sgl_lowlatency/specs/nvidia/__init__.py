"""MegakernelSpec objects, one module per model family."""
