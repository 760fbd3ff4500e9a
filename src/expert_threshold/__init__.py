"""Mixture-of-experts language models with Expert Threshold routing."""

__version__ = "0.1.0"
