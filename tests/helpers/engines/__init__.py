"""Engines, schedulers and APIs over real, scripted and virtual parts."""
