"""MonoSpec objects for AMD: a decoder layer in two launches, k1 and k2."""
