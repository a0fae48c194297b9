"""Training data: formats, chat template and label mask, split, sampler, token files (no torch)."""
