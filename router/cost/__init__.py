"""Expected seconds."""
