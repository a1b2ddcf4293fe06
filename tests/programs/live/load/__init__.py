"""Load on one real router: a fleet by script, clients, and what the router's processes use."""
