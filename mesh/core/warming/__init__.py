"""Prefixes that are hot are computed on idle replicas before their clients come (GORGO section 8).

Off by default. `hot.py` knows which prefixes many prompts share, `trend.py` whether demand rises,
`idle_budget.py` what idle replicas may spend, `warming.py` decides.
"""
