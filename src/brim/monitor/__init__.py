"""Figures about the card and the host, read on use."""
