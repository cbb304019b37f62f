"""The Lua library from Python: its source, functions, keys, and the invariants of a run."""
