"""Measurements. Each is a module: `python -m tests.benchmarks.<name> [--quick] [--json FILE] [--check]`."""
