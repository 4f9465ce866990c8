"""What is minimised: which decisions, how much each counts, ratios, surrogates and penalties.  Pure functions."""
