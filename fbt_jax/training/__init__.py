"""Training: pass schedule, optimizer, step, loop, checkpoints, metrics, FLOP counts."""
