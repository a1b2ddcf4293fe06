"""What `tests.programs.live.control_cost` is made of."""
