"""Whether saved layers become saved time."""
