"""Routing policies: small pure functions over the same candidates."""
