"""The decode loop: what runs want, the rows that stand, and the host that computes them for one call."""
