"""Saved trajectories for people: choose some, ask in SQL, carry them elsewhere and back."""
