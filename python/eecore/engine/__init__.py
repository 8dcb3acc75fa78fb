"""The engine of one thread, and the ways in which many threads and asyncio tasks share it."""
