"""Sampling of rows: processors, random numbers, end of rows, log-probabilities. It knows no caches and no modes."""
