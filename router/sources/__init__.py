"""What keeps the index true: own history and what the engines report."""
