"""Worker groups: the algorithm as plain calls, run by many processes."""
