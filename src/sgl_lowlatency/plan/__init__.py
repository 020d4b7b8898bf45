"""The static plan: which block computes which weight tiles, in what order, and what it waits for. No torch."""
