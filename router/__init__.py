"""kvroute: a cache-aware request router for LLM inference engines."""

__version__ = "0.1.0"
