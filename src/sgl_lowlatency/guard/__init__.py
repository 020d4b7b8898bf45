"""Refusals before and after the weights load: pure functions that return every reason as words for an operator."""
