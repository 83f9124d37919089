"""Stands in front of the project's `tasks` package: scripted components under the real names.

What is not replaced here, the supervisor above all, is found in the real package.
"""

from pathlib import Path

__path__.append(str(Path(__file__).parents[4] / "tasks"))
