"""What fuzzing campaigns and soaks have left."""
