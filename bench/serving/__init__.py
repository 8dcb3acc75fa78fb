"""The server: the cost of HTTP, and its behaviour in a long run."""
