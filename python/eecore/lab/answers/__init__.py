"""What a model writes by itself, as text to learn from: questions, and its answers to them."""
