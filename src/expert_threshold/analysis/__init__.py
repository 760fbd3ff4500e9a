"""Figures, sentences and pages made from run folders."""
