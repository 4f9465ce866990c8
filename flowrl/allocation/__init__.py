"""What is worth rolling out.  Pure functions; memory is passed in."""
