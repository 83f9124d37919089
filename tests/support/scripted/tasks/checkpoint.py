"""Plays a script; see tests.support.scripted_component."""

import sys

from tests.support.scripted_component import main

if __name__ == "__main__":
    sys.exit(main())
