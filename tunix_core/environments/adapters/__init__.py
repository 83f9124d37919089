"""Environments of other packages, each an optional extra that is imported when a session needs it."""
