"""The results of fuzzing campaigns and soaks."""
