"""Drawing: graphs of agents and runs as Mermaid text, and the page of a run."""
