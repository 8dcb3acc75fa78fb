"""Ops and decoding on a GPU; bench/gpu.sh runs them."""
