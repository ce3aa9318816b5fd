"""Devices that this machine may lack: a simulated CUDA driver, and devices that show what a real one hides."""
