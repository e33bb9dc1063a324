"""Structured output: JSON schemas, and the grammars that constrain answers and tool calls."""
