"""Between the shards and the train step: ledger, replay buffer, packing. NumPy only, never jax."""
