"""Floor 7: optimizer chains and learning-rate schedules."""
