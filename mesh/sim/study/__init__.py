"""Studies: the twin run many times, for a comparison or for a plan.

Data flows one way: `scenario` and the settings built on it → `cells` (one world each) →
`run_cells` → `results` and `pictures`. `plan` searches the fewest replicas in the same worlds.
"""
