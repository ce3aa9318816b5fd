"""Chooses hardware: profiles of machines, FastDecode's equations, predictions, and the engine in virtual time."""
