"""Where the package's code takes the place of a model's own."""
