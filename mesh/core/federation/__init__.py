"""Other regions: how they are, what they ask for, and who owns whose replicas."""
