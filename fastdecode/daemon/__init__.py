"""The daemon of both roles: S-node, R-node, the links between them, and their configuration."""
