"""The server: what HTTP costs, and how it holds up."""
