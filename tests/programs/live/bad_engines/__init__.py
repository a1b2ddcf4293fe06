"""A misbehaving engine beside two healthy ones: what clients and operators see."""
