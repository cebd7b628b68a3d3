"""The HTTP surface: OpenAI routes, health, admin, errors."""
