"""Ranks of an S-Part as processes that a test kills or stops."""
