"""The mode `pdos`: independent parts of one answer decoded side by side (Parallel Decoding in One Sequence)."""
