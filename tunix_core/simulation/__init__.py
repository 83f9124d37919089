"""A run in virtual time: thousands of actors, a publisher and a learner around the real pacing code."""
