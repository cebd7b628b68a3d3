"""Where blocks live: one protocol; memory and Redis behind it."""
