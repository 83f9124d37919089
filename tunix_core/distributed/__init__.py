"""Meshes and placements."""
