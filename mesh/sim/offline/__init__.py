"""Offline work in the simulator: jobs, their stores, batch runners, what became of each line."""
