"""Requests in, tokens out: the engine of one thread, and the one that many share."""
