"""Those who can't be placed at once: who may wait, in which order, and for how long."""
