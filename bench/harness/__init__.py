"""Tools that all benchmarks share: ceilings, peers, processes, prompts, turns, results."""
