"""Exit modes and drafts, compared with full depth and with other engines."""
