"""Ablations: their records, trends, figures and documents beside the paper's values."""
