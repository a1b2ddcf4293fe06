"""Processes that are started, watched, restarted after they die, and stopped."""
