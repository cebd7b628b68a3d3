"""Simulated inference engines: instances without GPUs that behave like real ones."""
