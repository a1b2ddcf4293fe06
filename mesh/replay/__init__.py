"""Trace replay: play recorded traffic against OpenAI endpoints and report the results.

Data flows one way: `trace_formats` (parses files) → `trace` (what all formats have in common) →
`schedule` (when and to which region each request is sent) → `prompt_text` (its text) → `play` and
`client` (the only modules with a clock and a socket) → `tally` (the results) → `report`.
"""
