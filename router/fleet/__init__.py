"""Instances: health, load, the in-flight ledger."""
