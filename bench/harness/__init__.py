"""What benchmarks share: ceilings, peers, processes, prompts, turns, results."""
