"""A job before it runs: storage in Redis, checks, prompts, memory estimate."""
