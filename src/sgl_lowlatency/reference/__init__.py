"""Oracles in torch: what a decode step must compute, how far SGLang's own bf16 path is from it, and how far ours may be."""
