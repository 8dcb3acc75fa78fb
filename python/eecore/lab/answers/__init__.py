"""Text that a model writes as its own training data: questions, and its answers to them."""
