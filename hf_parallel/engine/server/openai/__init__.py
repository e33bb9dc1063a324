"""OpenAI's API: requests, answers, tool calls and kept responses."""
