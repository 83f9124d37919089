"""What runs inside a sandbox; standard library only, and nothing of the project outside this folder."""
