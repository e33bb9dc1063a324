"""What modes share in which an answer has branches: rows, blocks, budgets, joins, output."""
