"""Decoders: parameters, initialisation and forward passes. See `decoder`."""
