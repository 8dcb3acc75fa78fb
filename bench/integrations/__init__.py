"""eecore inside transformers and inside vLLM."""
