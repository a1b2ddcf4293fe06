"""Studies: the twin run many times, for a comparison or for a plan.

Data flows one way: `scenario` and the settings built on it (what a person asks) → `cells` (one
world each) → `parallel` (running them) → `out`, `table`, `pictures` (what came of them). `plan`
asks the same worlds another question: how few replicas are enough, found by `search`.
"""
