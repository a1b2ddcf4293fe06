"""What a router knows of the replicas that are its to place on, and what it tells of them."""
