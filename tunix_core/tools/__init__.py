"""Functions that a policy calls: their schemas, the forms of calls in messages, and running them."""
