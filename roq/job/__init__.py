"""A job before it runs: where it is stored, what can be found wrong with it, its prompts, its memory."""
