"""The intent model in every exit mode, beside its peers."""
