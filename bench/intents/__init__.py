"""The intent model in every exit mode, compared with its peers."""
