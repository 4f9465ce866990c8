"""Who did better than their peers, and which decisions earned it.  Pure functions."""
