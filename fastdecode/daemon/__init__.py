"""The daemon `fastdecode-node`: its two roles (S-node, R-node), their links and their configuration."""
