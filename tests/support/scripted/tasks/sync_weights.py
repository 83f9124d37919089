"""Plays a script; see scripted_component."""

import sys

from scripted_component import main

if __name__ == "__main__":
    sys.exit(main())
