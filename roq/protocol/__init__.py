"""What the Lua library is, seen from Python: its source, functions, keys, and the invariants of a run."""
