"""Benchmarks: `fastdecode-bench`."""
