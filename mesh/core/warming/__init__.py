"""Idle replicas compute hot prefixes before clients request them (GORGO section 8). Off by default.

`hot_prefixes.py` counts which prefixes many prompts share and whether demand rises,
`idle_replicas.py` what idle replicas may spend, `warming.py` decides.
"""
