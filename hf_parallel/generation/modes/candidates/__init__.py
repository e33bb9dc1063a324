"""Candidates: completions of one prompt that compete. `best_of` prunes them, `search` also forks them."""
