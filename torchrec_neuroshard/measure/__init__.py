"""Timing of real kernels and collectives, and the append-only store of what was measured."""
