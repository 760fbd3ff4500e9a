"""Benchmarks, as a package so that another of this name elsewhere is not imported in its place."""
