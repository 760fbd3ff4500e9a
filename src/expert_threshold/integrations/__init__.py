"""Bridges to other programs."""
