"""What runs show: figures from their records, and a page per run."""
