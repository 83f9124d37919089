"""What a person runs: the command line, the demo, the live view, the report, the local service."""
