"""Exit modes and drafts, beside full depth and beside others."""
