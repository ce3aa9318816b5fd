"""Benchmarks: `fastdecode-bench`. cli.py lists the commands; each is a module of its name."""
