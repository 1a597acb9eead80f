"""The engine on hardware that is not here: the same scheduler, pool and events, step times from the planner."""
