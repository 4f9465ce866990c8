"""What a run remembers from update to update.  Pure functions; memory is passed in and handed back."""
