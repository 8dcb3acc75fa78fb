"""The loss of quality by weights of fewer bits."""
