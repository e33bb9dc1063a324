"""Shared parts of modes whose answers have branches: rows, blocks, budgets, joins, output."""
