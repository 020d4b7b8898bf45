"""Measures `decode_step` on the GPU that is there: time, byte floor, share. torch and a GPU, no SGLang."""
