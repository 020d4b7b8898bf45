"""From a loaded model to a built step: weight views, plans, workspace. Nothing after it allocates device memory to keep."""
