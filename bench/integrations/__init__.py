"""Inside transformers and inside vLLM."""
