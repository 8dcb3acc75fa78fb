"""The early-exit framework's evaluation of a T5."""
