"""Nodes, and the ends of links, as processes that a test kills, stops or blocks."""
