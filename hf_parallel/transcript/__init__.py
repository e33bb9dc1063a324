"""Transcripts: the record of a call, its sections as plain data, and an HTML page of them."""
