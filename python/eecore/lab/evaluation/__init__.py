"""Evaluation of exits and modes: quality exit by exit, modes side by side, sweeps."""
