"""MonoSpec objects for AMD. None exists yet, so SGLang refuses --enable-amd-monokernel on every model."""
