"""What a planner tells its user."""
