"""Benchmarks of eecore: ``python -m bench NAME``, from the checkout's root; see README.md."""
