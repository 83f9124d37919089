"""Actors: a policy engine that decodes many environment sessions together, and the loop around it."""
