"""The parts of `fastdecode-bench soak`: its processes, its models and its load."""
