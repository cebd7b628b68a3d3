"""The request log and the metrics."""
