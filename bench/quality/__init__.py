"""What weights of fewer bits cost in quality."""
