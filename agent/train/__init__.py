"""The fused training engine: arena, packed step, runner, checkpoints."""
