"""What `tests.benchmarks.control_cost` is made of."""
