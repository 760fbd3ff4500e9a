"""Comparisons and sweeps: several runs with the same budget in one folder, paired, judged and tabulated."""
