"""All that touches processes, files and people."""
