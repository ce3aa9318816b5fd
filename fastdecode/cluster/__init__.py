"""Clusters of S-nodes and R-nodes on Ray. Only rays.py imports Ray."""
