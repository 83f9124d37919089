"""Where metrics go besides the run directory: services that a person already looks at."""
