"""Bytes to and from an instance: connections, streaming, cancellation."""
