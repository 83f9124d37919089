"""What trajectories and policies are worth: tables over hours, held-out success, the audit of a run."""
