"""Microbenchmarks of the ops, one file each, run by pytest."""
