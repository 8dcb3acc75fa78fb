"""What exits and modes are worth: quality exit by exit, modes side by side, sweeps."""
