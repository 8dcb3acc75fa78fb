"""Microbenchmarks of the ops, one file for each op, run by pytest."""
