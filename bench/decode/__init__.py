"""Full-depth decoding and prompts, beside other engines."""
