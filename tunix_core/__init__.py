"""Decoupled agentic-RL post-training: the library that every process of a run is built from."""
