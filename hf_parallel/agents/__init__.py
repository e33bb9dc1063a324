"""Agents as coroutines, on the engine: traces of runs, flow graphs and pages (Hive, section 5)."""
