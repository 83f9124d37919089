"""The learner: one process that turns trajectories into steps, snapshots and checkpoints."""
